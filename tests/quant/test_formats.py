"""Which parameters are packed, from types and shapes alone."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.models.config import ModelConfig, parse_model_config
from jaxserve.models.registry import family
from jaxserve.params import Path
from jaxserve.quant import EMBEDDING, HEAD, Packing, choose, pack, packed_weights
from tests.tiny_model import CONFIG

BF16 = np.dtype(jnp.bfloat16)
QKV, OUTPUT, GATE_UP, DOWN = (
    ("layers", 0, "attention", "qkv"),
    ("layers", 0, "attention", "output"),
    ("layers", 0, "gate_up"),
    ("layers", 0, "down"),
)


def model(**changes: Any) -> ModelConfig:
    """One layer whose linears are all whole blocks."""
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "vocab_size": 256, "num_hidden_layers": 1}
    return parse_model_config({**CONFIG, **sizes, **changes})


def types(config: ModelConfig, default: str = "Q4_0", **others: str) -> dict[str, str]:
    """A type for each tensor of the checkpoint; `others` by a part of its name."""
    return {
        name: next((kind for part, kind in others.items() if part in name), "F32" if "norm" in name else default)
        for name in family(config).placements(config)
    }


def chosen(config: ModelConfig, stored: dict[str, str], asked: Any = "auto", **device: Any) -> Packing:
    module = family(config)
    place = {"platform": "cpu", "dtype": BF16, "tensor": 1} | device
    return choose(asked, module.abstract(config, place["dtype"]), module.placements(config), stored, **place)


def bits(config: ModelConfig, stored: dict[str, str]) -> dict[Path, int]:
    """Of those that stay in their blocks."""
    return chosen(config, stored).kept


def test_every_linear_layer_is_packed_in_the_bits_of_its_type() -> None:
    config = model()
    for kind, width in {"Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "Q5_0": 8, "Q5_1": 8, "Q5_K": 8, "Q8_0": 8}.items():
        made = chosen(config, types(config, kind))
        assert made == Packing(dict.fromkeys((QKV, OUTPUT, GATE_UP, DOWN, HEAD), width), num_linears=5)


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


def test_what_has_no_whole_blocks_or_strips_stays_dense() -> None:
    narrow = model(head_dim=16)  # a block would reach over two heads
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
def test_where_it_can_not_be_it_is_said_or_refused_by_name(device: dict[str, Any], says: str) -> None:
    config = model()
    made = chosen(config, types(config), **device)
    assert not made.bits
    assert re.search(says, made.reason)
    with pytest.raises(ConfigError, match=f"quantization=gguf: .*{says}.*; leave it at auto, or set none"):
        chosen(config, types(config), "gguf", **device)
    made = chosen(config, types(config), "none", **device)
    assert (made.bits, made.num_linears, made.reason, len(made.dense)) == ({}, 5, "", 5)


def test_a_file_without_such_blocks_is_dense_and_refused_where_they_were_asked_for() -> None:
    config = model()
    for stored in ({}, types(config, "BF16")):
        made = chosen(config, stored)
        assert (made.kept, made.reason) == ({}, ""), "nothing to say where nothing is quantized"
    assert "it holds F32, Q6_K;" in chosen(config, types(config, "Q6_K")).reason
    with pytest.raises(ConfigError, match="quantization=gguf: the model has no quantized blocks: only GGUF files have"):
        chosen(config, {}, "gguf")
    with pytest.raises(ConfigError, match=r"can be kept as it is stored \(it holds BF16, F32; Q4_0, Q4_1"):
        chosen(config, types(config, "BF16"), "gguf")


def test_what_is_in_no_blocks_is_packed_in_16_bits() -> None:
    config = model()
    linears = (QKV, OUTPUT, GATE_UP, DOWN, HEAD)
    assert chosen(config, {}).bits == dict.fromkeys(linears, 16)
    assert chosen(config, types(config), "none").bits == dict.fromkeys(linears, 16)
    mixed = chosen(config, types(config, v_proj="Q8_0", up_proj="Q6_K", lm_head="F16")).bits
    assert mixed == {QKV: 8, OUTPUT: 4, GATE_UP: 16, DOWN: 4, HEAD: 16}
    narrow = model(head_dim=16)  # a block of 32 inputs may reach over two heads where it is no block of the file
    assert chosen(narrow, types(narrow)).bits[OUTPUT] == 16


def test_a_tied_head_of_16_bits_is_the_embedding() -> None:
    tied = model(tie_word_embeddings=True)
    made = chosen(tied, {})
    assert made.bits == dict.fromkeys((QKV, OUTPUT, GATE_UP, DOWN, EMBEDDING), 16)
    tree = pack(family(tied).abstract(tied, BF16), made.bits)
    assert tree.output is None
    assert tree.embedding.data.nbytes == 256 * 64 * 2


def test_the_tree_has_packed_weights_in_the_place_of_dense_ones() -> None:
    tied = model(tie_word_embeddings=True)
    dense = family(tied).abstract(tied, BF16)
    tree = pack(dense, {QKV: 4, OUTPUT: 8, HEAD: 8})
    assert {path: (weight.shape, weight.bits) for path, weight in packed_weights(tree).items()} == {
        QKV: ((2, 4, 32, 64), 4),
        OUTPUT: ((64, 2, 2, 32), 8),
        HEAD: ((256, 64), 8),
    }
    assert tree.layers[0].attention.output.data.shape == (4, 4, 16 * 32 + 16 * 8)
    assert (tree.embedding, tree.layers[0].down) == (dense.embedding, dense.layers[0].down)
    added = sum(packed.data.nbytes for packed in packed_weights(tree).values())
    gone = dense.layers[0].attention.qkv.nbytes + dense.layers[0].attention.output.nbytes
    sizes = [sum(spec.nbytes for spec in jax.tree.leaves(each)) for each in (dense, tree)]
    assert sizes[1] - sizes[0] == added - gone
    assert packed_weights(dense) == {}
    assert pack(dense, {}) == dense
