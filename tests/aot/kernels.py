"""Compiles attention for devices that aren't here, and checks what kernels take of a GPU."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.runtime.devices.target import load_target
from jaxserve.runtime.programs.hlo import instructions
from jaxserve.runtime.programs.inspection import KernelReport, own_kernels_of
from pallas_kernels.paged_attention import (
    AttentionOptions,
    PagedKV,
    Problem,
    Rows,
    choose_backend,
    kv_layout,
    kv_platform,
    paged_attention,
    target_of,
)

FP8, E5M2 = "float8_e4m3fn", "float8_e5m2"
TOKENS, LAYERS = 512, 2
# Keys and values together: as on a device, each more than 32 bits can address. On a TPU with heads outermost, the
# stride between heads would exceed what its copies support.
POOL_BYTES = 10 * 2**30


def compile_attention(
    mesh: Mesh,
    backend_name: str,
    *,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    page_size: int = 16,
    rows: int = 64,
    max_pages: int | None = None,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    window: int | None = None,
    cap: float | None = None,
    sinks: bool = False,
    decode_only: bool = False,
    max_queries: int | None = None,
    chunks_only: bool = False,
    reuses: bool = False,
    value_dim: int | None = None,
    compiler_options: dict[str, Any] | None = None,
) -> Any:
    """Return the compiled attention of one layer over a pool of `POOL_BYTES`, which is donated.

    With `reuses`, a second layer reads the keys and values of the first one, and a third one writes its own. With
    `value_dim`, the pool has latent rows.
    """
    dtypes = jnp.dtype(dtype), jnp.dtype(kv_dtype or dtype)
    problem = Problem(heads, kv_heads, head_dim, page_size, *dtypes, value_dim)
    backend = choose_backend(target_of(mesh.devices.flat[0]), problem, backend_name)

    def struct(*shape: int, dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def attention(kv: PagedKV, sinks: jax.Array | None, *arrays: Any) -> Any:
        q, k, v, *where = arrays
        options = AttentionOptions(head_dim**-0.5, window, cap, sinks)
        of_rows = Rows(*where, decode_only=decode_only, max_queries=max_queries, chunks_only=chunks_only)
        attend = functools.partial(paged_attention, rows=of_rows, options=options, backend=backend)
        q, kv = attend(q, k, v, kv, 1)
        if reuses:
            q, kv = attend(q, None, None, kv, 1)
            q, kv = attend(q, q[:, :kv_heads], q[:, :kv_heads], kv, 0)
        return q, kv

    heads_of = {"num_kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim}
    sizes = {"num_layers": LAYERS, "page_size": page_size, **heads_of}
    form = {"dtype": problem.kv_dtype, "platform": kv_platform(backend)}
    page = kv_layout(**sizes, **form, num_pages=1).nbytes
    layout = kv_layout(**sizes, **form, num_pages=POOL_BYTES // page)
    pools = (struct(*shape, dtype=layout.dtype) for shape in (layout.shape, layout.values_shape))
    tokens = rows if decode_only else TOKENS
    new = struct(tokens, kv_heads, head_dim, dtype=problem.dtype)
    sharded = jax.shard_map(attention, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(sharded, donate_argnums=0).lower(
            layout.paged_kv(*pools, struct(2, LAYERS, kv_heads, dtype=np.float32) if kv_dtype else None),
            struct(heads, dtype=np.float32) if sinks else None,
            struct(tokens, heads, head_dim, dtype=problem.dtype),
            new,
            new if value_dim is None else None,
            struct(rows, max_pages or 8192 // page_size),
            struct(rows + 1),
            struct(rows),
            struct(),
            struct(),
        )
    return lowered.compile(compiler_options)


def checked_kernels(compiled: Any, target: str) -> tuple[KernelReport, ...]:
    """Return a program's kernels; assert that none spills or exceeds the shared memory of a block on the target."""
    found, unread = own_kernels_of(compiled, instructions(compiled.as_text()))
    assert unread is None
    [limit] = re.findall(r"shared_memory_per_block_optin: (\d+)", load_target(target).target_config or "")
    for one in found:
        assert one.registers
        assert one.stack_bytes == 0, f"{one.kernel} spills"
        assert one.shared_bytes is not None
        assert one.shared_bytes <= int(limit), one.kernel
    return found
