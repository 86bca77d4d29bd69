"""Makes the fixture of compiled kernels: a program for an H200, as jax serializes it, and the names of its kernels.

Owns `tests/fixtures/gpu_code.bin`, and prints what the test of it expects: the calls of kernels, and the output of
`ptxas -v` for Mosaic's. Needs the CUDA compiler, but no GPU:

    JAX_PLATFORMS=cpu .venv-aot/bin/python scripts/make_gpu_code.py

If XLA is told to refuse kernels that spill registers, it must refuse `spilling` and no other; otherwise the script
fails and writes no fixture.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import triton as plt
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.runtime.devices.topology import target_mesh
from jaxserve.runtime.programs.inspection import instructions

FIXTURE = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "gpu_code.bin"
OUT = jax.ShapeDtypeStruct((64, 64), jnp.float32)
REFUSE_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}


def doubling(x: Any, out: Any) -> None:
    out[...] = x[...] * 2


def spilling(x: Any, out: Any) -> None:
    """Use more values than the registers of one warp hold."""
    out[...] = jnp.dot(x[...], x[...].T) + jnp.exp(x[...])


def copying(x: Any, out: Any, scratch: Any, barrier: Any) -> None:
    plgpu.copy_gmem_to_smem(x, scratch, barrier)
    plgpu.barrier_wait(barrier)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(scratch, out)
    plgpu.wait_smem_to_gmem(0)


def triton(kernel: Any, num_warps: int) -> Any:
    parameters = plt.CompilerParams(num_warps=num_warps, num_stages=1)
    return pl.pallas_call(kernel, out_shape=OUT, name=kernel.__name__, compiler_params=parameters)


def lowered(*kernels: Any) -> jax.stages.Lowered:
    """Lower a program of kernels, each of which takes the previous one's result."""
    mesh = target_mesh("nvidia-h200")
    x = jax.ShapeDtypeStruct(OUT.shape, OUT.dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def program(x: jax.Array) -> jax.Array:
        for kernel in kernels:
            x = kernel(x)
        return x

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(program).lower(x)


def main() -> None:
    scratch = {"scratch": plgpu.SMEM(OUT.shape, OUT.dtype), "barrier": plgpu.Barrier()}
    mosaic = plgpu.kernel(copying, out_type=OUT, scratch_types=scratch, kernel_name="copying")
    doubled, spilled = triton(doubling, 4), triton(spilling, 1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        lowered(doubled, mosaic).compile(REFUSE_SPILLS)
        del os.environ["MOSAIC_GPU_DUMP_TO"]
        print(next(Path(folder).glob("*.ptxas")).read_text())
    try:
        lowered(spilled).compile(REFUSE_SPILLS)
    except jax.errors.JaxRuntimeError as error:
        print(error)
    else:
        raise SystemExit("spilling doesn't spill any more")
    compiled = lowered(doubled, spilled, mosaic, doubled).compile()
    FIXTURE.write_bytes(compiled.runtime_executable().serialize())
    print({one.name: one.kernel for one in instructions(compiled.as_text()) if one.language})


if __name__ == "__main__":
    main()
