"""Checks how weights are held; the choice depends on types and shapes only."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config.settings import settings
from jaxserve.errors import ConfigError
from jaxserve.model_source.pooling import PooledLayer, Pooling
from jaxserve.models.config import ModelConfig
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.registry import abstract_params, parse_model_config
from jaxserve.params import Path
from jaxserve.quant import (
    EMBEDDING,
    GGUF_TYPES,
    HEAD,
    Shards,
    Stored,
    StoredWeight,
    WeightChoice,
    WeightForm,
    choose_weights,
    held_weights,
    hold_weights,
    stored_by_config,
)
from pallas_kernels.quantized_matmul import PackedWeight, Scheme
from pallas_kernels.target import CPU, KernelTarget
from tests.models.hub_hybrids import HYBRIDS
from tests.tiny_model import CONFIG
from tests.weights.conftest import tensor_parts

BF16 = np.dtype(jnp.bfloat16)
QKV, OUTPUT, GATE_UP, DOWN = (
    ("layers", 0, "attention", "qkv"),
    ("layers", 0, "attention", "output"),
    ("layers", 0, "mlp", "up"),
    ("layers", 0, "mlp", "down"),
)
LINEARS = {QKV, OUTPUT, GATE_UP, DOWN, HEAD}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


def model(**changes: Any) -> ModelConfig:
    """Return a model of one layer, whose linear layers are all made of whole blocks."""
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "vocab_size": 256, "num_hidden_layers": 1}
    return parse_model_config({**CONFIG, **sizes, **changes})


def types(config: ModelConfig, default: str = "Q4_0", **others: str) -> Stored:
    """Return how each tensor of a checkpoint is stored; `others` gives types by a part of the name."""
    kinds = {
        name: next((kind for part, kind in others.items() if part in name), "F32" if "norm" in name else default)
        for name in tensor_parts(abstract_params(LaidOutModel(config), BF16))
    }
    return {name: GGUF_TYPES.get(kind, StoredWeight(kind)) for name, kind in kinds.items()}


def chosen(config: ModelConfig, stored: Stored | None = None, asked: str = "auto", **place: Any) -> WeightChoice:
    where = {"target": CPU, "dtype": BF16} | place
    abstract = abstract_params(LaidOutModel(config), where["dtype"])
    quantization = config.quantization
    method = quantization.method if quantization else "gguf" if stored else None
    stored = stored_by_config(quantization, abstract) if stored is None else stored
    return choose_weights(asked, abstract, stored, method, **where)


def numbers(choice: WeightChoice) -> Mapping[Path, str]:
    """Return the types of the numbers of quantized weights."""
    return {path: scheme.numbers for path, scheme in choice.quantized.items()}


def test_every_linear_layer_is_held_in_the_bits_of_its_type() -> None:
    config = model()
    for kind, stored in GGUF_TYPES.items():
        made = chosen(config, types(config, kind))
        if stored.scheme.group == 16:  # which no CPU kernel takes
            assert not made.quantized
        else:
            assert made.quantized == dict.fromkeys(LINEARS, stored.scheme)
            assert (made.method, made.others) == ("gguf", {})


def test_a_parameter_of_several_tensors_has_the_widest_or_is_dequantized() -> None:
    config = model()
    mixed = chosen(config, types(config, v_proj="Q8_0", up_proj="Q6_K", lm_head="F16"))
    assert numbers(mixed) == {QKV: "int8", OUTPUT: "int4", DOWN: "int4"}
    assert mixed.quantized[QKV].zeros, "the middle of 4 bits isn't that of 8"
    assert mixed.others[HEAD] == "stored as F16"
    assert "groups of 16" in mixed.others[GATE_UP]
    assert chosen(config, types(config, v_proj="F16")).others == {QKV: "partly stored as F16"}


def test_a_tied_head_is_held_as_its_embedding_is_stored() -> None:
    tied = model(tie_word_embeddings=True)
    assert numbers(chosen(tied, types(tied, embed="Q8_0")))[HEAD] == "int8"
    assert HEAD not in numbers(chosen(tied, types(tied, embed="F16")))
    untied = model()
    assert numbers(chosen(untied, types(untied, embed="F16", lm_head="Q4_1")))[HEAD] == "int4"


def test_weights_without_whole_blocks_or_strips_are_dequantized() -> None:
    odd = model(vocab_size=250, intermediate_size=80)
    assert numbers(chosen(odd, types(odd))).keys() == {QKV, OUTPUT, GATE_UP}


def test_shards_divide_blocks_and_strips() -> None:
    config = model(intermediate_size=128)
    made = chosen(config, types(config), shards=Shards(2, 2))
    assert numbers(made).keys() == LINEARS
    with pytest.raises(ConfigError, match=r"tp_size=2 would cut the groups of 32 inputs of layers.0.mlp.down, wh"):
        chosen(model(), types(model()), shards=Shards(2, 2))
    # An MLP of 96 has 3 groups, and 4 heads can't be divided by 3
    with pytest.raises(ConfigError, match=r"sizes that don't: 1$"):
        chosen(model(), types(model()), shards=Shards(2, 2), splits_into=model().splits_into)


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ({"target": KernelTarget("cuda", "NVIDIA T4", (7, 5))}, "no kernel for NVIDIA T4 multiplies by"),
        ({"dtype": np.dtype(np.float32)}, "dtype=float32"),
    ],
)
def test_an_obstacle_is_the_reason_or_an_error(place: dict[str, Any], says: str) -> None:
    config = model()
    made = chosen(config, types(config), **place)
    assert not made.quantized
    assert all(says in reason for reason in made.others.values())
    with pytest.raises(ConfigError, match=f"quantization=gguf: no linear layer can be held .*{says}"):
        chosen(config, types(config), "gguf", **place)
    made = chosen(config, types(config), "none", **place)
    assert (made.quantized, set(made.others.values())) == ({}, {"--quantization none"})


def test_another_method_than_that_of_the_checkpoint_is_an_error_that_names_both() -> None:
    awq = model(quantization_config=AWQ)
    assert chosen(awq, asked="awq").method == chosen(awq).method == "awq"
    for asked in ("gptq", "fp8", "int4", "gguf"):
        with pytest.raises(ConfigError, match=f"quantization={asked}: the checkpoint is quantized by awq"):
            chosen(awq, asked=asked)
    with pytest.raises(ConfigError, match=r"quantization=awq: the checkpoint is not quantized; .* fp8, int8, int4"):
        chosen(model(), asked="awq")


def test_a_checkpoint_of_16_bits_is_quantized_as_asked() -> None:
    config = model(intermediate_size=192)
    four = chosen(config, asked="int4")
    assert (four.method, four.on_the_fly) == ("int4", True)
    assert four.quantized[DOWN] == four.quantized[QKV] == Scheme("int4", 64, zeros=True)
    assert four.others == {HEAD: "the output head keeps its type"}
    assert four.forms[HEAD] == WeightForm()
    assert chosen(config, asked="int8").quantized[DOWN] == Scheme("int8", 64)
    assert chosen(config, asked="fp8").quantized[DOWN] == Scheme("fp8", activations="token")
    assert chosen(config, asked="int4", shards=Shards(2, 2)).quantized[DOWN].group == 32, "shards have whole groups"


def test_layers_after_pooling_keep_their_type_and_a_model_without_a_head_has_none() -> None:
    rows = PooledLayer("lm_head", 256, 2, tokens=(1, 2))
    pooling, weight = Pooling("last", (rows,)), ("pooled", 0, "weight")
    for tied in (False, True):
        config = model(tie_word_embeddings=tied, hidden_size=256)
        both = chosen(dataclasses.replace(config, pooling=pooling), asked="int8")
        only = chosen(dataclasses.replace(config, pooling=pooling, generates=False), asked="int8")
        assert both.others == {HEAD: "the output head keeps its type", weight: "layers after pooling keep their type"}
        assert only.others == {weight: "layers after pooling keep their type"}
        assert (EMBEDDING if tied else HEAD) in both.forms
        assert {EMBEDDING, HEAD}.isdisjoint(only.forms)
        assert only.forms[weight] == WeightForm()


def test_products_that_decide_keep_their_type() -> None:
    config = parse_model_config(HYBRIDS["Qwen3.6-35B-A3B"][0])
    choice = chosen(config, asked="fp8", target=KernelTarget("cuda", "NVIDIA H200", (9, 0)))
    kept = {path[2:] for path in choice.others}
    router = ("mlp", "router", "weight"), ("mlp", "shared_gate")
    assert kept == {("attention", "gates"), *router, ()}
    assert choice.others["layers", 0, "attention", "gates"].startswith("routers, and the gates")


@pytest.mark.parametrize(("size", "group"), [(32, 32), (-1, None), (None, None)])
def test_the_size_of_groups_tells_the_strategy(size: int | None, group: int | None) -> None:
    groups = {"g": {"weights": {"num_bits": 4, "type": "int", "group_size": size}}}
    made = chosen(model(quantization_config={**PACKED, "config_groups": groups}))
    assert set(made.quantized.values()) == {Scheme("int4", group)}


def test_inputs_in_an_order_of_their_own_are_not_divided() -> None:
    config = model(quantization_config=GPTQ, intermediate_size=128)
    assert all(form.reordered for form in chosen(config).forms.values() if form.scheme)
    two = chosen(config, shards=Shards(2, 2))
    assert numbers(two).keys() == {QKV, GATE_UP}
    assert "act-order" in two.others[DOWN]
    assert two.forms[DOWN] == WeightForm()


def test_weights_that_differ_in_order_are_dequantized() -> None:
    config = model(quantization_config=GPTQ)
    stored = dict(stored_by_config(config.quantization, abstract_params(LaidOutModel(config), BF16)))
    name = "model.layers.0.self_attn.k_proj.weight"
    stored[name] = StoredWeight(stored[name].type, stored[name].scheme, "gptq", order="another")
    made = chosen(config, stored)
    assert made.others[QKV] == "its tensors have their inputs in different orders"
    assert numbers(made).keys() == LINEARS - {QKV, HEAD}


def test_other_weights_are_packed_in_16_bits() -> None:
    config = model()
    assert chosen(config, {}).forms == dict.fromkeys(LINEARS, WeightForm())
    mixed = chosen(config, types(config, v_proj="Q8_0", up_proj="Q6_K", lm_head="F16"))
    assert {path for path, form in mixed.forms.items() if form.scheme is None} == {GATE_UP, HEAD}
    assert mixed.dense == ()
    assert chosen(config, {}, dtype=np.dtype(np.float32)).dense == tuple(chosen(config, {}).others)


def test_a_tied_head_of_16_bits_is_the_embedding() -> None:
    tied = model(tie_word_embeddings=True)
    made = chosen(tied, {})
    assert made.forms == dict.fromkeys((QKV, OUTPUT, GATE_UP, DOWN, EMBEDDING), WeightForm())
    tree = hold_weights(abstract_params(LaidOutModel(tied), BF16), made.forms)
    assert tree.output is None
    assert tree.embedding.data.nbytes == 256 * 64 * 2


def test_held_weights_replace_dense_ones_in_the_tree() -> None:
    tied = model(tie_word_embeddings=True)
    dense = abstract_params(LaidOutModel(tied), BF16)
    four, eight = WeightForm(Scheme("int4", 32)), WeightForm(Scheme("int8", 32))
    tree = hold_weights(dense, {QKV: four, OUTPUT: eight, HEAD: eight})
    assert {path: (weight.shape, weight.scheme) for path, weight in held_weights(tree).items()} == {
        QKV: ((2, 4, 32, 64), four.scheme),
        OUTPUT: ((64, 128), eight.scheme),
        HEAD: ((256, 64), eight.scheme),
    }
    assert tree.layers[0].attention.output.data.shape == (4, 4, 16 * 32 + 16 * 8)
    assert tree.layers[0].attention.output.data.axes == (None, "kv_heads", None)
    assert (tree.embedding, tree.layers[0].mlp.down) == (dense.embedding, dense.layers[0].mlp.down)
    added = sum(packed.data.nbytes for packed in held_weights(tree).values() if isinstance(packed, PackedWeight))
    removed = dense.layers[0].attention.qkv.nbytes + dense.layers[0].attention.output.nbytes
    sizes = [sum(spec.nbytes for spec in jax.tree.leaves(each)) for each in (dense, tree)]
    assert sizes[1] - sizes[0] == added - removed
    assert held_weights(dense) == {}
    assert hold_weights(dense, {}) == dense


def test_every_method_of_a_checkpoint_can_be_asked_for() -> None:
    with pytest.raises(ConfigError) as refused:
        model(quantization_config={"quant_method": "unknown"})
    supported = re.search(r"supported: (.*), and GGUF", str(refused.value))
    assert supported
    assert set(supported[1].split(", ")) <= set(settings()["quantization"].choices)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes' is not supported; supported: awq, gptq"),
        ({"load_in_4bit": True}, "quant_method='bitsandbytes' is not supported"),
        ({"bits": 4, "group_size": 64}, "quant_method is missing; it should be one of awq, gptq"),
        ({**AWQ, "version": "gemv"}, "version='gemv' is not supported"),
        ({**AWQ, "bits": 3}, "bits=3 is not supported; only 4"),
        ({**GPTQ, "bits": 2}, "bits=2 is not supported; only 4 or 8"),
        ({**GPTQ, "dynamic": {"+:model.*": {"bits": 3}}}, "dynamic: bits=3 is not supported"),
        ({**GPTQ, "dynamic": {"-:model.(": {}}}, r"'re:model\.\(' is no regular expression"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format=True is not supported"),
        ({**GPTQ, "format": "bitblas"}, "format='bitblas' is not supported; only 'gptq' or 'gptq_v2'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2' is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size=\[64, 64\] is not supported"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups should be an object of at least"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"format": "nvfp4-pack-quantized"}}},
            "config_groups.g: format='nvfp4-pack-quantized' is not supported",
        ),
        (
            {**PACKED, "config_groups": {"g": {"weights": {"num_bits": 4}, "input_activations": {"num_bits": 8}}}},
            "config_groups.g: 4-bit weights and quantized inputs are not supported",
        ),
        ({**PACKED, "transform_config": {"config_groups": {"R3": {}}}}, "transform_config .* is not supported"),
        ({**PACKED, "config_groups": {"g": 5}}, "config_groups: g should be an object, it is 5"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.compile(says)):
        model(quantization_config=changes)
