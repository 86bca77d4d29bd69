"""Kernels between products compile for GPUs without one and don't spill, and one row is multiplied well on TPUs."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.layers.linear import linear
from jaxserve.runtime.devices.topology import target_mesh
from pallas_kernels.paged_attention import (
    Preparation,
    kv_layout,
)
from pallas_kernels.paged_attention.triton.qkv import write_qkv
from pallas_kernels.quantized_matmul import Backend, Scheme
from pallas_kernels.quantized_matmul.activations import quantize_inputs
from pallas_kernels.target import target_of
from tests.aot.kernels import E5M2, FP8, checked_kernels
from tests.selection import grid

pytestmark = pytest.mark.aot

TARGETS = ("nvidia-h200", "nvidia-l4", "nvidia-a100-80")
QKV: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {"bias": True, "norms": True, "kv_dtype": FP8},
    "dim-64": {"heads": 9, "kv_heads": 3, "head_dim": 64, "norms": True},
    "dim-80-mha": {"heads": 32, "kv_heads": 32, "head_dim": 80, "bias": True},
    "dim-96-7-to-1": {"heads": 28, "kv_heads": 4, "head_dim": 96, "norms": True},
    "dim-256-16-to-1": {"heads": 16, "kv_heads": 1, "head_dim": 256, "bias": True, "norms": True},
    "float32": {"dtype": "float32", "norms": True},
    "unrotated": {"rotates": False, "norms": True},
    "dim-256-float32-norms-scaled": {
        "heads": 16,
        "head_dim": 256,
        "norms": True,
        "norm_dtype": "float32",
        "scales_queries": True,
    },
    "dim-256-normed-values": {"heads": 8, "head_dim": 256, "norms": True, "norm_dtype": "float32", "norm_values": True},
    "dim-512-keys-as-values": {
        "heads": 32,
        "kv_heads": 4,
        "head_dim": 512,
        "norms": True,
        "norm_dtype": "float32",
        "norm_values": True,
        "keys_as_values": True,
    },
    "fp8-dim-512": {"heads": 8, "kv_heads": 1, "head_dim": 512, "norms": True, "norm_values": True, "kv_dtype": FP8},
    "e5m2": {"norms": True, "kv_dtype": E5M2},
}
QUICK = (
    ("nvidia-h200", "everything"),
    ("nvidia-h200", "dim-256-float32-norms-scaled"),
    ("nvidia-h200", "dim-256-16-to-1"),
    ("nvidia-h200", "dim-512-keys-as-values"),
    ("nvidia-l4", "dim-80-mha"),
)


def _compiled(target: str, function: Any, *shapes: Any) -> Any:
    mesh = target_mesh(target)
    sharding = NamedSharding(mesh, PartitionSpec())
    arguments = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes)
    sharded = jax.shard_map(function, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(sharded).lower(*arguments).compile()


@pytest.mark.parametrize(("target", "variant"), grid(itertools.product(TARGETS, QKV), QUICK.__contains__))
def test_the_write_of_new_tokens_does_not_spill(target: str, variant: str) -> None:
    if target == "nvidia-a100-80" and QKV[variant].get("kv_dtype") == FP8:
        pytest.skip("converts no e4m3")
    sizes = {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", **QKV[variant]}
    heads, kv_heads, head_dim = (sizes[name] for name in ("heads", "kv_heads", "head_dim"))
    forms = {name: name in QKV[variant] for name in ("norm_values", "keys_as_values")}
    dtype, tokens = jnp.dtype(sizes["dtype"]), 128
    width = (heads + (1 if forms["keys_as_values"] else 2) * kv_heads) * head_dim
    f32, kv_dtype = np.dtype(np.float32), jnp.dtype(sizes.get("kv_dtype", dtype))
    struct = jax.ShapeDtypeStruct
    layout = kv_layout(
        num_layers=2, num_pages=64, page_size=16, num_kv_heads=kv_heads, head_dim=head_dim, dtype=kv_dtype
    )
    pool = struct(layout.shape, kv_dtype)
    scales = struct((2, 2, kv_heads), f32) if kv_dtype.itemsize == 1 else None
    half = struct((tokens, head_dim // 2), f32)
    norm = struct((head_dim,), jnp.dtype(sizes.get("norm_dtype", dtype)))

    def write(*operands: Any) -> Any:
        qkv, *parts, kv, slots = operands
        return write_qkv(qkv, Preparation(1e-5, *parts, **forms), kv, 1, slots, interpret=False)

    compiled = _compiled(
        target,
        write,
        struct((tokens, width), dtype),
        struct((width,), dtype) if sizes.get("bias") else None,
        (norm, norm) if sizes.get("norms") else None,
        (half, half) if sizes.get("rotates", True) else None,
        struct((tokens,), f32) if sizes.get("scales_queries") else None,
        layout.paged_kv(pool, pool, scales),
        struct((tokens,), np.dtype(np.int32)),
    )
    assert [one.kernel for one in checked_kernels(compiled, target)] == ["paged_attention_write_qkv (triton)"]


INPUTS = ((4096, None), (14336, None), (29568, None), (14336, 128), (7168, 64))
QUICK_INPUTS = (("nvidia-h200", "fp8", (14336, 128)), ("nvidia-a100-80", "int8", (29568, None)))


@pytest.mark.parametrize(
    ("target", "numbers", "sizes"),
    grid(itertools.product(TARGETS, ("fp8", "int8"), INPUTS), QUICK_INPUTS.__contains__),
)
def test_one_pass_quantizes_rows_without_spills(target: str, numbers: Any, sizes: tuple[int, int | None]) -> None:
    inputs, group = sizes
    if target == "nvidia-a100-80" and numbers == "fp8":
        pytest.skip("has no units for fp8: its products take inputs that XLA quantizes")
    scheme = Scheme(numbers, group, activations="group" if group else "token")
    device = target_of(target_mesh(target).devices.flat[0])

    def quantize(x: jax.Array) -> Any:
        return quantize_inputs(x, scheme, None, Backend("triton", device), one_pass=True)

    compiled = _compiled(target, quantize, jax.ShapeDtypeStruct((64, inputs), jnp.bfloat16))
    assert [one.kernel for one in checked_kernels(compiled, target)] == ["quantize_inputs (triton)"]


@pytest.mark.parametrize("target", ["tpu-v5e", "tpu-v6e"])
def test_one_row_is_multiplied_in_the_matrix_units_of_a_tpu(target: str) -> None:
    row, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 2048), (4096, 2048)))
    assert "convolution(" in _compiled(target, linear, row, weight).as_text()
