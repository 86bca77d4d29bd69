"""Inspecting a compiled program: its instructions and kernels, and whether it copies the KV pool."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve.runtime.programs.builder import ProgramBuilder
from jaxserve.runtime.programs.hlo import Instruction, instructions
from jaxserve.runtime.programs.inspection import KernelReport, compile_and_inspect, own_kernels_of
from jaxserve.runtime.programs.kernel_names import kernel_name
from jaxserve.runtime.step.program import ProgramKey
from jaxserve.runtime.step.slot_update import UPDATE_KEY
from tests.runtime.programs.large_pool import CAPACITY
from tests.runtime.tiny import builder

DECODE = ProgramKey("decode", 4, True)
GPU_CODE = Path(__file__).parents[2] / "fixtures" / "gpu_code.bin"
TEXT = """\
ENTRY %main (x: f32[128,128]) -> f32[128,128] {
  %x.1 = f32[128,128]{1,0} parameter(0)
  %step.1 = f32[2,8]{1,0} custom-call(%x.1), custom_call_target="__gpu$xla.gpu.triton", \
output_to_operand_aliasing={{}: (1, {})}, metadata={op_name="jit(step)/paged_attention/decode/pallas_call"}
  %split.1 = f32[2,8]{1,0} custom-call(%x.1), custom_call_target="mosaic_gpu_v2", metadata={op_name="a/split/mpmd_map"}
  %tpu.1 = bf16[4]{0} custom-call(%x.1), custom_call_target="tpu_custom_call", metadata={op_name="k/pallas_call"}, \
backend_config={"scoped_memory_configs":[{"memory_space":"1","offset":"1000","size":"9000"}],"custom_call_config":{}, \
"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"5096"}]}
  %gemm = (f32[4]{0}, s8[64]{0}) custom-call(%x.1), custom_call_target="__cublas$lt$matmul$f8"
  %own = f32[4]{0} custom-call(%x.1), custom_call_target="llvm_paged_attention_decode_3x64_0123456789abcdef"
  %sums = f32[4]{0} custom-call(%x.1), custom_call_target="llvm_quantized_matmul_bf16"
  %other = f32[4]{0} custom-call(%x.1), custom_call_target="AllocateBuffer"
  %sum-start = f32[4]{0} all-reduce-start(%tpu.1)
  ROOT %copy = f32[128,128]{1,0} copy(%x.1)
}
"""


def test_kernels_of_a_text() -> None:
    found = list(instructions(TEXT))
    assert [(one.name, one.opcode, one.elements, kernel_name(one)) for one in found] == [
        ("x.1", "parameter", 16384, None),
        ("step.1", "custom-call", 16, "decode (triton)"),
        ("split.1", "custom-call", 16, "split (mosaic gpu)"),
        ("tpu.1", "custom-call", 4, "k (mosaic tpu)"),
        ("gemm", "custom-call", 64, "cublas lt matmul f8"),
        ("own", "custom-call", 4, "paged_attention_decode_3x64 (llvm)"),
        ("sums", "custom-call", 4, "quantized_matmul_bf16 (llvm)"),
        ("other", "custom-call", 4, None),
        ("sum-start", "all-reduce-start", 4, None),
        ("copy", "copy", 16384, None),
    ]
    assert [one.name for one in found if one.aliased] == ["step.1"]


class _Serialized:
    """A fake of a compiled program that has only machine code."""

    def __init__(self, payload: bytes | None) -> None:
        self.payload = payload

    def runtime_executable(self) -> _Serialized:
        return self

    def serialize(self) -> bytes:
        if self.payload is None:
            raise RuntimeError("UNIMPLEMENTED: serialize\nand more")
        return self.payload


def _calls(*names: str) -> list[Instruction]:
    call = '  %{} = f32[1]{{0}} custom-call(), custom_call_target="__gpu$xla.gpu.triton", metadata={{op_name="{}"}}'
    return list(instructions("\n".join(call.format(name, "doubling/pallas_call") for name in names)))


OTHERS = [one for one in instructions(TEXT) if one.name in ("gemm", "tpu.1")]


def test_kernel_resources_are_read_from_the_machine_code() -> None:
    program = _Serialized(GPU_CODE.read_bytes())
    found, unread = own_kernels_of(program, [*_calls("pallas_call.3", "pallas_call.5"), *OTHERS])
    assert found == (
        KernelReport("doubling (triton)", 2, registers=40, stack_bytes=0, shared_bytes=0, threads=128),
        KernelReport("k (mosaic tpu)", 1, vmem_bytes=4096),
    )
    assert unread is None
    # In this program, both calls have the same kernel name but different kernels.
    found, _ = own_kernels_of(program, _calls("pallas_call.3", "pallas_call.4"))
    assert [(one.calls, one.stack_bytes) for one in found] == [(1, 0), (1, 176)]


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (None, "RuntimeError: UNIMPLEMENTED: serialize"),
        (b"another format", "a serialized program holds no Riegeli file"),
        (GPU_CODE.read_bytes(), "1 of 2 calls have no machine code, such as pallas_call.9"),
    ],
)
def test_unreadable_resources_are_left_out_with_the_reason(payload: bytes | None, why: str) -> None:
    found, unread = own_kernels_of(_Serialized(payload), [*_calls("pallas_call.3", "pallas_call.9"), *OTHERS])
    assert found == (KernelReport("doubling (triton)", 2), KernelReport("k (mosaic tpu)", 1, vmem_bytes=4096))
    assert unread == why


def test_a_program_without_kernels_of_ours_is_not_serialized() -> None:
    assert own_kernels_of(None, [one for one in instructions(TEXT) if one.name in ("copy", "gemm")]) == ((), None)


@pytest.mark.parametrize("key", [UPDATE_KEY, DECODE], ids=str)
@pytest.mark.slow
def test_a_good_program(key: Any) -> None:
    report, compiled = compile_and_inspect(builder(CAPACITY), key)
    assert compiled is not None
    assert report.fault is None
    assert (report.name, report.collectives) == (str(key), {})
    assert report.alias_bytes > 2**20


def test_a_program_that_does_not_build_gets_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, key: Any, dump: Any) -> None:
        raise RuntimeError("no such instruction\nand more")

    monkeypatch.setattr(ProgramBuilder, "compile", fail)
    report, compiled = compile_and_inspect(builder(CAPACITY), DECODE)
    assert compiled is None
    assert report.fault == "RuntimeError: no such instruction"


class _Undonated(ProgramBuilder):
    def compile(self, key: Any, dump: Path | None = None) -> jax.stages.Compiled:
        state = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), self.state_specs)
        return jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s)).lower(state).compile()


class _Turned(ProgramBuilder):
    def compile(self, key: Any, dump: Path | None = None) -> jax.stages.Compiled:
        """Donates all arrays, but transposes the pool and back on the way."""
        state = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), self.state_specs)

        def turned(s: Any) -> Any:
            keys = jax.lax.optimization_barrier(s.kv[0].keys.swapaxes(1, 2).copy())
            keys = jax.lax.optimization_barrier(jax.numpy.cumsum(keys, axis=1)).swapaxes(1, 2)
            return dataclasses.replace(s, kv=(dataclasses.replace(s.kv[0], keys=keys),))

        return jax.jit(turned, donate_argnums=0).lower(state).compile()


@pytest.mark.parametrize(("kind", "fault"), [(_Undonated, "the state is copied"), (_Turned, "the KV pool is copied")])
def test_a_pool_that_is_copied_is_a_fault(kind: type[ProgramBuilder], fault: str) -> None:
    good = builder(CAPACITY)
    bad = kind(good.context, CAPACITY, good.mesh, good.param_specs, good.state_specs)
    report, _ = compile_and_inspect(bad, DECODE)
    assert report.fault is not None
    assert report.fault.startswith(fault)
