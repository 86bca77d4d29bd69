"""Reading a compiled program's text: what instructions move."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxserve.runtime.programs.hlo import HloModule, Tables

TEXT = """\
HloModule step

%fused_gather (param_0: f32[1000,64], param_1: s32[8]) -> f32[8,64] {
  %param_0 = f32[1000,64]{1,0} parameter(0)
  %param_1 = s32[8]{0} parameter(1)
  ROOT %gather.1 = f32[8,64]{1,0} gather(%param_0, %param_1), offset_dims={1}
}

%fused_update (param_0.1: f32[1000,64], param_1.1: f32[8,64], param_2: s32[8]) -> f32[1000,64] {
  %param_0.1 = f32[1000,64]{1,0} parameter(0)
  %param_1.1 = f32[8,64]{1,0} parameter(1)
  %param_2 = s32[8]{0} parameter(2)
  ROOT %scatter.1 = f32[1000,64]{1,0} scatter(%param_0.1, %param_2, %param_1.1), to_apply=%add
}

%fused_dot (param_0.2: bf16[16,128], param_1.2: bf16[32,128]) -> f32[16,32] {
  %param_0.2 = bf16[16,128]{1,0} parameter(0)
  %param_1.2 = bf16[32,128]{1,0} parameter(1)
  ROOT %dot.1 = f32[16,32]{1,0} dot(%param_0.2, %param_1.2), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

ENTRY %main (table: f32[1000,64], ids: s32[8], x: bf16[16,128], w: bf16[32,128], pool: s8[4096]) -> f32[8,64] {
  %table = f32[1000,64]{1,0} parameter(0)
  %ids = s32[8]{0} parameter(1)
  %x = bf16[16,128]{1,0} parameter(2)
  %w = bf16[32,128]{1,0} parameter(3)
  %pool = s8[4096]{0} parameter(4)
  %rows = f32[8,64]{1,0} fusion(%table, %ids), kind=kLoop, calls=%fused_gather
  %updated = f32[1000,64]{1,0} fusion(%table, %rows, %ids), kind=kInput, calls=%fused_update
  %product = f32[16,32]{1,0} fusion(%x, %w), kind=kCustom, calls=%fused_dot
  %library = (f32[16,32]{1,0}, s8[999]{0}) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul"
  %of_library = f32[16,32]{1,0} get-tuple-element(%library), index=0
  %write = (s8[4096]{0}, f32[8]{0}) custom-call(%pool, %ids), custom_call_target="__gpu$xla.gpu.triton"
  %written = s8[4096]{0} get-tuple-element(%write), index=0
  %decode = f32[8,64]{1,0} custom-call(%written, %ids), custom_call_target="__gpu$xla.gpu.triton"
  %x8 = f8e4m3fn[16,512]{1,0} parameter(5)
  %w8 = f8e4m3fn[32,512]{1,0} parameter(6)
  %x16 = bf16[16,512]{1,0} parameter(7)
  %library8 = (bf16[16,32]{1,0}, s8[999]{0}) custom-call(%x8, %w8), custom_call_target="__cublas$lt$matmul$f8"
  %own = f32[3,16,32]{2,1,0} custom-call(%x16, %w8), metadata={op_name="jit(f)/quantized_matmul/mpmd_map"}
  %scratch = s8[64]{0} custom-call(), metadata={op_name="jit(f)/quantized_matmul/pallas_call"}
  %own8 = bf16[16,32]{1,0} custom-call(%x8, %w8), metadata={op_name="jit(f)/quantized_matmul/pallas_call"}
  %xs = bf16[16,4,128]{2,1,0} parameter(8)
  %ws = bf16[4,32,128]{2,1,0} parameter(9)
  %batch = bf16[4,16,32]{2,1,0} dot(%xs, %ws), lhs_batch_dims={1}, lhs_contracting_dims={2}, rhs_batch_dims={0}
  %batches = (bf16[4,32,16]{1,0,2}, s8[9]{0}) custom-call(%ws, %xs), custom_call_target="__cublas$lt$matmul", \
backend_config={"dot_dimension_numbers":{"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["1"]}}
  ROOT %copy = f32[8,64]{1,0} copy(%decode)
}
"""
ROWS, IDS = 8 * 64 * 4, 8 * 4


@pytest.mark.parametrize(
    ("name", "read", "written", "flops"),
    [
        ("rows", ROWS + IDS, ROWS, 0),
        ("updated", ROWS + IDS, ROWS, 0),
        ("product", (16 + 32) * 128 * 2, 16 * 32 * 4, 2 * 16 * 32 * 128),
        ("library", (16 + 32) * 128 * 2, 16 * 32 * 4, 2 * 16 * 32 * 128),
        ("library8", (16 + 32) * 512, 16 * 32 * 2 + 999, 16 * 32 * 512),
        ("batch", (16 + 32) * 4 * 128 * 2, 4 * 16 * 32 * 2, 2 * 4 * 16 * 32 * 128),
        ("batches", (16 + 32) * 4 * 128 * 2, 4 * 16 * 32 * 2 + 9, 2 * 4 * 16 * 32 * 128),
        ("own", (16 * 2 + 32) * 512, 3 * 16 * 32 * 4, 2 * 16 * 32 * 512),
        ("scratch", 0, 64, 0),
        ("own8", (16 + 32) * 512, 16 * 32 * 2, 16 * 32 * 512),
        ("write", IDS, 0, 0),
        ("decode", IDS, ROWS, 0),
        ("copy", ROWS, ROWS, 0),
    ],
)
def test_what_an_instruction_moves(name: str, read: int, written: int, flops: float) -> None:
    module = HloModule(TEXT)
    moved = module.traffic(module.entry.instructions[name], Tables(pools=frozenset({4096})))
    assert (moved.read_bytes, moved.written_bytes, moved.flops) == (read, written, flops)


def test_a_program_of_this_jax_is_read() -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w)

    shapes = jnp.zeros((64, 128)), jnp.zeros((128, 256))
    module = HloModule(jax.jit(step).lower(*shapes).compile().as_text())
    assert {one.opcode for one in module.entry.instructions.values()} >= {"parameter"}
    assert sum(module.traffic(one, Tables()).flops for one in module.entry.instructions.values()) == 2 * 64 * 128 * 256
