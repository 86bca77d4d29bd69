"""Folders of `jaxserve convert --quantization` give the weights that are quantized as a checkpoint is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.model_source import ModelSource, read_config, resolve
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.registry import abstract_params, parse_model_config
from jaxserve.quant import choose_weights, convert_forms, held_weights, hold_weights, stored_by_config
from jaxserve.weights import build_params, open_weights
from pallas_kernels.target import CPU
from tests.weights.conftest import GOLDEN, converted, on_one_device
from tests.weights.quantized.fixtures import QUANTIZED

BF16 = np.dtype(jnp.bfloat16)


def loaded(source: ModelSource, setting: str, forms: str) -> Any:
    """Load a model as a CPU holds it (`packed`), in rows, or dequantized (`dense`)."""
    config = parse_model_config(read_config(source))
    method = config.quantization.method if config.quantization else None
    abstract = abstract_params(LaidOutModel(config), BF16)
    stored = stored_by_config(config.quantization, abstract)
    made = choose_weights(setting, abstract, stored, method, target=CPU, dtype=BF16)
    held = {"packed": made.forms, "rows": convert_forms(made.method, abstract), "dense": {}}[forms]
    tree = hold_weights(abstract, held)
    options: dict[str, Any] = {"quantization": config.quantization, "on_the_fly": made.on_the_fly}
    assert bool(held_weights(tree)) == (forms != "dense")
    return build_params(tree, on_one_device(tree), open_weights(source, tree, dense=abstract, **options))


@pytest.mark.parametrize(
    ("name", "setting"),
    [("llama3", "int4"), ("llama3", "int8"), ("llama3", "fp8"), ("mixtral", "int8"), ("qwen2_moe", "fp8")],
)
def test_a_converted_folder_has_the_weights_of_on_the_fly(name: str, setting: str, tmp_path: Path) -> None:
    original = resolve(str(GOLDEN / name))
    folder = converted(GOLDEN / name, tmp_path / "orbax", jnp.bfloat16, setting)
    for forms in ("packed", "rows"):
        # A CPU dequantizes a weight of 48 inputs, of which only the folder has numbers
        params = [list(held_weights(loaded(source, setting, forms)).values()) for source in (original, folder)]
        for now, stored in zip(*map(jax.tree.leaves, params), strict=True):
            # A minimum is rounded once more on its way by a zero
            np.testing.assert_allclose(now.astype(np.float32), stored.astype(np.float32), rtol=1e-6)


def test_a_converted_folder_can_be_dequantized(tmp_path: Path) -> None:
    folder = converted(GOLDEN / "llama3", tmp_path / "orbax", jnp.bfloat16, "int8")
    exact = loaded(resolve(str(GOLDEN / "llama3")), "auto", "dense")
    for found, expected in zip(jax.tree.leaves(loaded(folder, "auto", "dense")), jax.tree.leaves(exact), strict=True):
        largest = np.abs(expected.astype(np.float32)).max()
        np.testing.assert_allclose(found.astype(np.float32), expected.astype(np.float32), atol=largest / 100)


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quantization=int4: the checkpoint is quantized by awq; leave it out"):
        converted(QUANTIZED / "awq", tmp_path / "a", jnp.bfloat16, "int4")
    with pytest.raises(ConfigError, match="quantization=gptq: a folder is written in fp8, int8, int4, or in 16"):
        converted(QUANTIZED / "awq", tmp_path / "b", jnp.bfloat16, "gptq")
    dense = converted(QUANTIZED / "awq", tmp_path / "c", jnp.bfloat16)
    assert parse_model_config(read_config(dense)).quantization is None


def test_scales_of_a_kv_cache_are_not_lost_in_silence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    converted(QUANTIZED / "awq", tmp_path / "without", jnp.bfloat16)
    assert not caplog.records
    converted(QUANTIZED / "compressed_fp8_kv_cache", tmp_path / "with", jnp.bfloat16)
    assert [record.message for record in caplog.records] == [
        "the scales of an fp8 KV cache are not kept; --calculate-kv-scales makes them anew"
    ]
