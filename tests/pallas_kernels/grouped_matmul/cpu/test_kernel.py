"""The kernel of a CPU passes the table of cases, whatever instructions it multiplies with."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu import cpu_features
from pallas_kernels.expert_routing.reference import group_by_expert
from pallas_kernels.grouped_matmul import Gate, grouped_matmul
from pallas_kernels.grouped_matmul.cpu import backend
from pallas_kernels.grouped_matmul.cpu.kernel import GroupedMatmul
from pallas_kernels.quantized_matmul import (
    BLOCK,
    FACTORS,
    Backend,
    PackedWeight,
    QuantizedWeight,
    Scheme,
    pack_dense,
    pack_numbers,
    packed_shape,
)
from pallas_kernels.quantized_matmul.cpu.integers import I16Products
from pallas_kernels.quantized_matmul.layout import FP4_VALUES, unpack_numbers
from pallas_kernels.target import CPU
from tests.pallas_kernels.grouped_matmul.cases import CASES, Case, make_case
from tests.pallas_kernels.quantized_matmul.cpu.paths import Emulated, EmulatedTiles, Integers, Plain
from tests.selection import grid

pytestmark = pytest.mark.slow


@dataclasses.dataclass(frozen=True)
class PlainGrouped(Plain, GroupedMatmul):
    pass


@dataclasses.dataclass(frozen=True)
class EmulatedGrouped(Emulated, GroupedMatmul):
    pass


@dataclasses.dataclass(frozen=True)
class IntegerGrouped(Integers, GroupedMatmul):
    pass


@dataclasses.dataclass(frozen=True)
class EmulatedTilesGrouped(EmulatedTiles, GroupedMatmul):
    pass


KERNELS = {
    "best": GroupedMatmul,
    "plain": PlainGrouped,
    "bf16": EmulatedGrouped,
    "integers": IntegerGrouped,
    "tiles": EmulatedTilesGrouped,
}
# Each kernel takes a second to compile: `make test` has one of every format, and of every way to multiply.
QUICK = {
    ("bf16-up", "best"),
    ("bf16-absent", "best"),
    ("bf16-down-bias", "plain"),
    ("bf16-up-clamped", "bf16"),
    ("int4-zeros", "best"),
    ("int4-zeros", "integers"),
    ("int8-token", "best"),
    ("fp4-up", "best"),
    ("fp4-many-rows", "bf16"),
    ("fp8-blocks", "best"),
    ("fp8-token-down", "plain"),
    ("fp8-blocks", "tiles"),
}
TABLE = grid(itertools.product(CASES, KERNELS), lambda one: (one[0].name, one[1]) in QUICK)


def packed(weight: Any) -> PackedWeight:
    """Return the same weights in the layout of a CPU."""
    experts, outputs, inputs = weight.shape
    format = weight.scheme.numbers if isinstance(weight, QuantizedWeight) else "bf16"
    strips, *run = packed_shape(outputs, inputs, format)
    data = np.zeros((experts * strips, *run), np.uint8)
    shape = experts, strips, *run
    if format == "bf16":
        pack_dense(np.asarray(weight).reshape(-1, inputs), data)
        return PackedWeight(jnp.asarray(data.reshape(shape)))
    scheme = weight.scheme
    q = np.asarray(unpack_numbers(weight)).reshape(-1, inputs)
    factors = np.zeros((len(q), inputs // BLOCK), FACTORS)

    def by_block(one: Any) -> np.ndarray:
        by_group = np.asarray(one, np.float32).reshape(len(q), -1)
        return np.repeat(by_group, factors.shape[1] // by_group.shape[1], axis=1)

    factors["scale"] = by_block(weight.scale)
    if scheme.numbers == "fp8":
        numbers = q.astype(jnp.float8_e4m3fn).view(np.uint8)
    elif scheme.numbers == "fp4":
        signed = (q[..., None] == FP4_VALUES) & (np.signbit(FP4_VALUES) == np.signbit(q)[..., None])
        numbers = signed.argmax(axis=-1).astype(np.uint8)
    else:
        middle = 2 ** (scheme.bits - 1)
        numbers = (q + middle).astype(np.uint8)
        factors["minimum"] = -factors["scale"] * (middle + (0 if weight.zero is None else by_block(weight.zero)))
    pack_numbers(numbers, factors, scheme.numbers, data)
    return PackedWeight(jnp.asarray(data.reshape(shape)), input_scale=weight.input_scale, scheme=scheme)


@pytest.mark.parametrize(("case", "path"), TABLE, ids=str)
def test_rows_are_those_of_float64_but_for_the_rounding_of_sums(
    case: Case, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "GroupedMatmul", KERNELS[path])
    x, weight, groups, bias, expected, allowed = make_case(case, Backend())
    options = {"gate": case.gate, "of_tokens": case.of_tokens, "target": CPU}
    multiply = jax.jit(lambda bias, *arguments: grouped_matmul(*arguments, bias=bias, **options))
    out = multiply(bias, x, packed(weight), groups)
    found = np.asarray(out)[: len(expected)].astype(np.float64)
    if isinstance(KERNELS[path](packed(weight).format).products(cpu_features()), I16Products):
        allowed *= 2  # small inputs are rounded
    assert (np.abs(found - expected) <= allowed).all(), np.nanmax(np.abs(found - expected) / allowed)


@pytest.mark.parametrize(
    ("numbers", "path"),
    grid(
        itertools.product(("bf16", "int4", "int8", "fp4", "fp8"), KERNELS),
        lambda one: one in (("bf16", "best"), ("int4", "best")),
    ),
)
def test_a_row_does_not_depend_on_other_rows(numbers: Any, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number of tokens is computed in tiles of other heights; the outputs are several items of threads."""
    monkeypatch.setattr(backend, "GroupedMatmul", KERNELS[path])
    scheme = None if numbers == "bf16" else Scheme(numbers, 32)
    case = Case("company", scheme, tokens=30, experts=4, out=416, inputs=192, gate=Gate(), of_tokens=True)
    x, weight, *_ = make_case(case, Backend())
    held = packed(weight)
    ids = np.asarray(np.random.default_rng(5).permuted(np.tile(np.arange(4), (30, 1)), axis=1)[:, :2], np.int32)

    @jax.jit
    def multiply(x: jax.Array, ids: jax.Array) -> jax.Array:
        groups = group_by_expert(ids, 4)
        return grouped_matmul(x, held, groups, gate=Gate(), of_tokens=True, target=CPU)[groups.places]

    whole = np.asarray(multiply(x, ids))
    for first, count in ((3, 1), (7, 2), (11, 5), (4, 11)):
        some = slice(first, first + count)
        np.testing.assert_array_equal(multiply(x[some], ids[some]), whole[some])


def test_matrices_of_an_expert_are_one_run_of_strips() -> None:
    case = Case("matrices", tokens=6, gate=Gate(), of_tokens=True)
    x, weight, groups, _, expected, allowed = make_case(case, Backend())
    held = packed(weight)
    experts, strips, *run = held.data.shape
    held = dataclasses.replace(held, data=held.data.reshape(experts, 2, strips // 2, *run))
    found = np.asarray(grouped_matmul(x, held, groups, gate=case.gate, of_tokens=True, target=CPU), np.float64)
    assert (np.abs(found - expected) <= allowed).all()
