"""Programs of the Llama family compile for an H200 and a TPU v6e without either, and update the KV pool in place.

A Llama-3.1-8B is compiled with two layers, as the others are identical. SmolLM2, whose heads are 64 wide, is compiled
whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from jaxserve.model_source.pooling import ModelTask, PooledLayer, PooledTask, Pooling
from jaxserve.runtime.devices.mesh import device_bytes
from jaxserve.runtime.programs.hlo import instructions
from jaxserve.runtime.programs.inspection import compile_and_inspect
from jaxserve.runtime.programs.table import KINDS
from jaxserve.runtime.step.page_copies import read_key, write_key
from jaxserve.runtime.step.program import ProgramKey
from jaxserve.runtime.step.slot_update import ADJUST_KEY, UPDATE_KEY
from tests.aot.conftest import Row
from tests.aot.deployments import DECODE_ROWS, LLAMA_8B_TWO_LAYERS, MIXED_TOKENS, SMOLLM2_135M, deployment
from tests.selection import grid

pytestmark = pytest.mark.aot

DECODE = ProgramKey("decode", DECODE_ROWS, True)
MIXED = ProgramKey("mixed", MIXED_TOKENS, False)
DRAW = ProgramKey("draw", 8)
WITHOUT_WEIGHTS = (UPDATE_KEY, ADJUST_KEY, read_key(0), write_key(0))
MODELS = {"Llama-3.1-8B, 2 layers": LLAMA_8B_TWO_LAYERS, "SmolLM2-135M": SMOLLM2_135M}
LLAMA, SMOLLM2 = MODELS
KERNELS = {"nvidia-h200": "triton", "tpu-v6e": "mosaic tpu"}


CASES: list[tuple[str, str, int, ProgramKey]] = [
    *(
        (target, LLAMA, 1, key)
        for target in ("nvidia-h200", "tpu-v6e")
        for key in (*WITHOUT_WEIGHTS, DRAW, DECODE, MIXED)
    ),
    ("nvidia-h200", LLAMA, 4, DECODE),
    ("tpu-v6e", LLAMA, 4, DECODE),
    *((target, SMOLLM2, 1, key) for target in ("nvidia-h200", "tpu-v6e") for key in (DECODE, MIXED)),
]  # fmt: skip


SCORED = PooledLayer("score", 4096, 3)
POOLED = {
    "embeddings alone": ModelTask(False, PooledTask(kind="embed", pooling=Pooling("last"), size=4096)),
    "means and tokens": ModelTask(True, PooledTask(kind="embed", pooling=Pooling("mean"), size=4096)),
    "labels alone": ModelTask(False, PooledTask(kind="classify", pooling=Pooling("last", (SCORED,)), size=3)),
}


@pytest.mark.parametrize(
    ("target", "task", "tensor"),
    [
        ("nvidia-h200", "embeddings alone", 1),
        ("nvidia-h200", "means and tokens", 4),
        ("tpu-v6e", "means and tokens", 1),
        ("tpu-v6e", "labels alone", 4),
    ],
)
def test_a_step_that_pools_leaves_the_state_in_place(target: str, task: str, tensor: int) -> None:
    builder = deployment(target, LLAMA_8B_TWO_LAYERS, tensor=tensor, task=POOLED[task])
    read, _ = compile_and_inspect(builder, MIXED)
    assert read.fault is None
    assert read.unread is None
    assert read.alias_bytes >= device_bytes(builder.state_specs, builder.mesh.shape)
    assert read.temp_bytes < device_bytes(builder.state_specs.kv[0].keys, builder.mesh.shape)
    if not POOLED[task].generates:
        # After attention and after the MLP of each layer, and after the embedding: nothing is drawn.
        assert read.collectives == ({"all-reduce": 2 * 2 + 1} if tensor > 1 else {})


BERT_TWO_LAYERS = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 30_522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}


@pytest.mark.parametrize(("target", "data"), [("nvidia-h200", 1), ("nvidia-h200", 2), ("tpu-v6e", 1)])
def test_whole_texts_need_no_state_and_no_other_rank(target: str, data: int) -> None:
    task = ModelTask(False, PooledTask(kind="embed", pooling=Pooling("mean"), size=768))
    builder = deployment(target, BERT_TWO_LAYERS, tensor=1, data=data, task=task)
    assert device_bytes(builder.state_specs, builder.mesh.shape) == 0
    read, _ = compile_and_inspect(builder, ProgramKey("encode", MIXED_TOKENS))
    assert (read.fault, read.unread, read.collectives) == (None, None, {})
    assert sum(count for name, count in read.kernels.items() if name.startswith("packed_attention")) == 2, read.kernels


@pytest.mark.parametrize(
    ("target", "model", "tensor", "key"),
    grid(CASES, lambda case: case[1] == LLAMA or case[0] == "nvidia-h200"),
    ids=str,
)
def test_a_program_compiles_and_leaves_the_pool_in_place(
    target: str, model: str, tensor: int, key: ProgramKey, report: Callable[[Row], None]
) -> None:
    builder = deployment(target, MODELS[model], tensor=tensor)
    read, _ = compile_and_inspect(builder, key)
    name = model if tensor == 1 else f"{model}, tensor={tensor}"
    report(Row(target, name, str(key), read.seconds, read.temp_bytes, read.alias_bytes, read.own_kernels))
    assert read.fault is None
    assert read.unread is None
    assert read.alias_bytes >= device_bytes(builder.state_specs, builder.mesh.shape)
    assert read.temp_bytes < device_bytes(builder.state_specs.kv[0].keys, builder.mesh.shape)
    layers = builder.context.model.config.num_layers
    if KINDS[key.kind].is_step:
        kernels = {name: count for name, count in read.kernels.items() if name.endswith(f"({KERNELS[target]})")}
        assert sum(kernels.values()) >= layers, read.kernels
        calls: Counter[str] = Counter()
        for one in read.own_kernels:
            calls[one.kernel] += one.calls
        assert calls == kernels
        for one in read.own_kernels:
            if target == "tpu-v6e":
                assert one.vmem_bytes
            else:
                assert one.registers
                assert one.stack_bytes == 0, f"{one.kernel} spills"
    # After attention and after the MLP of each layer, after the embedding, and two to find the likeliest token.
    assert read.collectives == ({"all-reduce": 2 * layers + 3} if tensor > 1 else {})


@pytest.mark.parametrize(("key", "most"), [(UPDATE_KEY, 6), (ADJUST_KEY, 4)])
def test_slots_are_opened_by_one_kernel_for_each_array(key: ProgramKey, most: int) -> None:
    _, compiled = compile_and_inspect(deployment("nvidia-h200", LLAMA_8B_TWO_LAYERS, tensor=1), key)
    assert compiled is not None
    found = Counter(one.opcode for one in instructions(compiled.as_text()))
    assert found["fusion"] <= most
    assert not {"while", "conditional", "copy", "sort"} & found.keys()
