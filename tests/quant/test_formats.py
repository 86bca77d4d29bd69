"""Checks which parameters are packed; the choice depends on types and shapes only."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.models.config import ModelConfig
from jaxserve.models.registry import family, parse_model_config
from jaxserve.params import Path
from jaxserve.quant import EMBEDDING, HEAD, WeightPacking, choose_packing, pack_specs, packed_weights
from tests.tiny_model import CONFIG
from tests.weights.conftest import tensor_parts

BF16 = np.dtype(jnp.bfloat16)
QKV, OUTPUT, GATE_UP, DOWN = (
    ("layers", 0, "attention", "qkv"),
    ("layers", 0, "attention", "output"),
    ("layers", 0, "mlp", "up"),
    ("layers", 0, "mlp", "down"),
)


def model(**changes: Any) -> ModelConfig:
    """Return a model of one layer, whose linear layers are all made of whole blocks."""
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "vocab_size": 256, "num_hidden_layers": 1}
    return parse_model_config({**CONFIG, **sizes, **changes})


def types(config: ModelConfig, default: str = "Q4_0", **others: str) -> dict[str, str]:
    """Return a type for each tensor of the checkpoint; `others` gives types by a part of the name."""
    return {
        name: next((kind for part, kind in others.items() if part in name), "F32" if "norm" in name else default)
        for name in tensor_parts(family(config).abstract(config, BF16))
    }


def chosen(config: ModelConfig, stored: dict[str, str], asked: Any = "auto", **device: Any) -> WeightPacking:
    module = family(config)
    place = {"platform": "cpu", "dtype": BF16, "tensor": 1} | device
    return choose_packing(asked, module.abstract(config, place["dtype"]), stored, **place)


def bits(config: ModelConfig, stored: dict[str, str]) -> dict[Path, int]:
    """Return the bits of the weights that stay quantized."""
    return chosen(config, stored).quantized


def test_every_linear_layer_is_packed_in_the_bits_of_its_type() -> None:
    config = model()
    for kind, width in {"Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "Q5_0": 8, "Q5_1": 8, "Q5_K": 8, "Q8_0": 8}.items():
        made = chosen(config, types(config, kind))
        assert made == WeightPacking(dict.fromkeys((QKV, OUTPUT, GATE_UP, DOWN, HEAD), width), num_linears=5)


def test_a_parameter_of_several_tensors_has_the_widest_or_stays_dense() -> None:
    config = model()
    mixed = bits(config, types(config, v_proj="Q8_0", up_proj="Q6_K", lm_head="F16"))
    assert mixed == {QKV: 8, OUTPUT: 4, DOWN: 4}


def test_a_tied_head_is_packed_as_its_embedding_is_stored() -> None:
    tied = model(tie_word_embeddings=True)
    assert bits(tied, types(tied, embed="Q8_0"))[HEAD] == 8
    assert HEAD not in bits(tied, types(tied, embed="Q6_K"))
    untied = model()
    assert bits(untied, types(untied, embed="Q6_K", lm_head="Q4_1"))[HEAD] == 4


def test_weights_without_whole_blocks_or_strips_stay_dense() -> None:
    narrow = model(head_dim=16)  # a block would span two heads
    assert OUTPUT not in bits(narrow, types(narrow))
    odd = model(vocab_size=250, intermediate_size=80)
    assert bits(odd, types(odd)) == {QKV: 4, OUTPUT: 4, GATE_UP: 4}


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ({"platform": "cuda"}, "only a CPU .* the device is a cuda"),
        ({"dtype": np.dtype(np.float32)}, "dtype=float32"),
        ({"tensor": 2}, "tp_size is 2"),
    ],
)
def test_an_obstacle_is_the_reason_or_an_error(device: dict[str, Any], says: str) -> None:
    config = model()
    made = chosen(config, types(config), **device)
    assert not made.bits
    assert re.search(says, made.reason)
    with pytest.raises(ConfigError, match=f"quantization=gguf: .*{says}.*; leave it at auto, or set none"):
        chosen(config, types(config), "gguf", **device)
    made = chosen(config, types(config), "none", **device)
    assert (made.bits, made.num_linears, made.reason, len(made.dense)) == ({}, 5, "", 5)


def test_a_file_without_packable_blocks_is_an_error_if_they_were_requested() -> None:
    config = model()
    for stored in ({}, types(config, "BF16")):
        made = chosen(config, stored)
        assert (made.quantized, made.reason) == ({}, ""), "nothing to say where nothing is quantized"
    assert "it holds F32, Q6_K;" in chosen(config, types(config, "Q6_K")).reason
    with pytest.raises(ConfigError, match="quantization=gguf: the model has no quantized blocks: only GGUF files have"):
        chosen(config, {}, "gguf")
    with pytest.raises(ConfigError, match=r"can be kept as it is stored \(it holds BF16, F32; Q4_0, Q4_1"):
        chosen(config, types(config, "BF16"), "gguf")


def test_other_weights_are_packed_in_16_bits() -> None:
    config = model()
    linears = (QKV, OUTPUT, GATE_UP, DOWN, HEAD)
    assert chosen(config, {}).bits == dict.fromkeys(linears, 16)
    assert chosen(config, types(config), "none").bits == dict.fromkeys(linears, 16)
    mixed = chosen(config, types(config, v_proj="Q8_0", up_proj="Q6_K", lm_head="F16")).bits
    assert mixed == {QKV: 8, OUTPUT: 4, GATE_UP: 16, DOWN: 4, HEAD: 16}
    narrow = model(head_dim=16)  # 32 inputs may span two heads if they are not a block of the file
    assert chosen(narrow, types(narrow)).bits[OUTPUT] == 16


def test_a_tied_head_of_16_bits_is_the_embedding() -> None:
    tied = model(tie_word_embeddings=True)
    made = chosen(tied, {})
    assert made.bits == dict.fromkeys((QKV, OUTPUT, GATE_UP, DOWN, EMBEDDING), 16)
    tree = pack_specs(family(tied).abstract(tied, BF16), made.bits)
    assert tree.output is None
    assert tree.embedding.data.nbytes == 256 * 64 * 2


def test_packed_weights_replace_dense_ones_in_the_tree() -> None:
    tied = model(tie_word_embeddings=True)
    dense = family(tied).abstract(tied, BF16)
    tree = pack_specs(dense, {QKV: 4, OUTPUT: 8, HEAD: 8})
    assert {path: (weight.shape, weight.bits) for path, weight in packed_weights(tree).items()} == {
        QKV: ((2, 4, 32, 64), 4),
        OUTPUT: ((64, 2, 2, 32), 8),
        HEAD: ((256, 64), 8),
    }
    assert tree.layers[0].attention.output.data.shape == (4, 4, 16 * 32 + 16 * 8)
    assert (tree.embedding, tree.layers[0].mlp.down) == (dense.embedding, dense.layers[0].mlp.down)
    added = sum(packed.data.nbytes for packed in packed_weights(tree).values())
    removed = dense.layers[0].attention.qkv.nbytes + dense.layers[0].attention.output.nbytes
    sizes = [sum(spec.nbytes for spec in jax.tree.leaves(each)) for each in (dense, tree)]
    assert sizes[1] - sizes[0] == added - removed
    assert packed_weights(dense) == {}
    assert pack_specs(dense, {}) == dense
