from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxserve.errors import ConfigError
from jaxserve.model_source import ModelSource, read_config
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.registry import abstract_params, parse_model_config
from jaxserve.quant import choose_weights, held_weights, hold_weights
from jaxserve.weights import build_params, open_source, open_weights
from pallas_kernels.quantized_matmul import PackedWeight, unpack
from pallas_kernels.target import CPU
from tests.weights.conftest import GOLDEN, converted, on_one_device


def test_a_folder_is_read_as_safetensors_and_nothing_else() -> None:
    source = ModelSource(GOLDEN / "llama2", "folder", "llama2")
    for load_format in ("auto", "safetensors"):
        assert "model.norm.weight" in open_source(source, load_format).infos
    with pytest.raises(ConfigError, match=r"load_format=gguf was asked for, but .* holds safetensors"):
        open_source(source, "gguf")


def test_a_converted_folder_is_read_as_orbax_and_nothing_else(tmp_path: Path) -> None:
    config = parse_model_config(read_config(ModelSource(GOLDEN / "llama2", "folder", "llama2")))
    abstract = abstract_params(LaidOutModel(config), np.dtype(np.float32))
    target = converted(GOLDEN / "llama2", tmp_path / "converted", np.float32)
    for load_format in ("auto", "orbax", "dummy"):
        assert len(open_weights(target, abstract, load_format=load_format).order) > 10
    with pytest.raises(ConfigError, match=r"load_format=safetensors was asked for, but .* holds orbax"):
        open_weights(target, abstract, load_format="safetensors")
    source = ModelSource(GOLDEN / "llama2", "folder", "llama2")
    with pytest.raises(
        ConfigError, match=r"load_format=orbax was asked for, but .* is no folder of `jaxserve convert`"
    ):
        open_weights(source, abstract, load_format="orbax")


def test_an_orbax_checkpoint_of_somebody_else_is_refused_by_name(tmp_path: Path) -> None:
    ocp.PyTreeCheckpointer().save(tmp_path / "theirs", {"w": np.ones(3, np.float32)})
    shutil.copy(GOLDEN / "llama2" / "config.json", tmp_path)
    with pytest.raises(ConfigError, match=r"theirs is an Orbax checkpoint, but only a whole folder of `jaxserve conv"):
        open_source(ModelSource(tmp_path, "folder", "m"))


def test_other_formats_dont_pay_for_orbax() -> None:
    code = "import sys, jaxserve.worker; print({'orbax.checkpoint', 'tensorstore'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("load_format", ["dummy", "auto"])
def test_16_bit_weights_are_packed_from_every_format(load_format: Any, tmp_path: Path) -> None:
    source = ModelSource(GOLDEN / "smollm2", "folder", "m")
    config = parse_model_config(read_config(source))
    dtype = np.dtype(jnp.bfloat16)
    abstract = abstract_params(LaidOutModel(config), dtype)
    chosen = choose_weights("auto", abstract, {}, None, target=CPU, dtype=dtype)
    tree = hold_weights(abstract, chosen.forms)
    assert held_weights(tree)
    sources = [source]
    if load_format == "auto":
        sources.append(converted(GOLDEN / "smollm2", tmp_path / "orbax", jnp.bfloat16))
    for one in sources:
        dense = build_params(abstract, on_one_device(abstract), open_weights(one, abstract, load_format=load_format))
        packed = build_params(
            tree, on_one_device(tree), open_weights(one, tree, dense=abstract, load_format=load_format)
        )
        same = jax.tree.map(_unpacked, packed, is_leaf=lambda leaf: isinstance(leaf, PackedWeight))
        for one_leaf, other in zip(jax.tree.leaves(same), jax.tree.leaves(dense), strict=True):
            np.testing.assert_array_equal(one_leaf, other.astype(jnp.float32).reshape(one_leaf.shape))


def _unpacked(leaf: Any) -> Any:
    return unpack(leaf) if isinstance(leaf, PackedWeight) else leaf.astype(jnp.float32)
