"""The table of cases that every backend passes: schemes, shapes and dtypes, with the product of each in float64.

Inputs of a scheme that quantizes them are chosen so that quantizing changes none: the product is that of the inputs.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import Backend
from pallas_kernels.quantized_matmul.backends import arrangement
from pallas_kernels.quantized_matmul.layout import FP4_VALUES, QuantizedWeight, num_groups
from pallas_kernels.quantized_matmul.scheme import Scheme

FP8 = np.dtype(jnp.float8_e4m3fn)
_LARGEST = {"int4": 7, "int8": 127, "fp8": 448}


@dataclasses.dataclass(frozen=True)
class Case:
    """A product of `rows` with a weight `[*out, inputs]`; `scales` is the type of its scales.

    Zeros are whole numbers, or of the type of scales and `fractional`.
    """

    name: str
    scheme: Scheme
    rows: int = 3
    out: tuple[int, ...] = (48,)
    inputs: int = 256
    dtype: str = "bfloat16"
    scales: str = "float32"
    fractional: bool = False
    order: bool = False

    def __str__(self) -> str:
        return self.name


class Product(NamedTuple):
    """The arguments of a product, the product in float64, and the sums of its terms' magnitudes."""

    x: np.ndarray
    weight: QuantizedWeight
    expected: np.ndarray
    magnitude: np.ndarray


INT4, INT8 = Scheme("int4", 128), Scheme("int8", 128)
INT4_ZEROS, INT8_ZEROS = Scheme("int4", 128, zeros=True), Scheme("int8", 128, zeros=True)

CASES = (
    Case("int4-row", INT4, rows=1),
    Case("int4-wide", INT4, rows=5, out=(200,), inputs=1024, scales="bfloat16"),
    Case("int4-64-rows", INT4, rows=64, out=(130,), scales="float16"),
    Case("int4-many-rows", INT4, rows=150, out=(136,)),
    Case("int4-heads", INT4, out=(2, 3, 24), scales="bfloat16"),
    Case("int4-order", INT4, order=True),
    Case("int4-group-32", Scheme("int4", 32), rows=17),
    Case("int4-group-64", Scheme("int4", 64), out=(40,), inputs=192),
    Case("int4-group-96", Scheme("int4", 96), inputs=288),
    Case("int4-group-256", Scheme("int4", 256), inputs=512),
    Case("int4-channel", Scheme("int4"), rows=4, inputs=320),
    Case("int4-zeros", INT4_ZEROS, rows=2, out=(72,), scales="float16"),
    Case("int4-zeros-fractional", INT4_ZEROS, rows=33, fractional=True),
    Case("int4-zeros-group-32-order", Scheme("int4", 32, zeros=True), rows=9, order=True),
    Case("int4-zeros-channel", Scheme("int4", zeros=True), rows=16),
    Case("int4-float16", INT4_ZEROS, dtype="float16"),
    Case("int4-float32", INT4, dtype="float32"),
    Case("int8-float16", INT8, dtype="float16", scales="float16"),
    Case("fp8-float16", Scheme("fp8"), dtype="float16", rows=9),
    Case("int8-row", INT8, rows=1, scales="bfloat16"),
    Case("int8-many-rows", INT8, rows=140, out=(130,)),
    Case("int8-group-16", Scheme("int8", 16), rows=6, scales="float16"),
    Case("int8-group-32-order", Scheme("int8", 32), order=True),
    Case("int8-half-a-block", Scheme("int8", 32, zeros=True), rows=5, inputs=448),
    Case("int8-channel-half-a-block", Scheme("int8"), rows=5, inputs=448),
    Case("int8-zeros", INT8_ZEROS, rows=20, out=(2, 40)),
    Case("int8-channel", Scheme("int8"), rows=1, out=(2, 40), scales="bfloat16"),
    Case("int8-channel-order", Scheme("int8"), rows=70, order=True),
    Case("int8-zeros-channel", Scheme("int8", zeros=True), rows=7),
    Case("int8-float32", Scheme("int8"), dtype="float32"),
    Case("int8-token-row", Scheme("int8", activations="token"), rows=1),
    Case("int8-token", Scheme("int8", activations="token"), rows=70, out=(2, 40), scales="bfloat16"),
    Case("int8-token-zeros", Scheme("int8", zeros=True, activations="token"), rows=18),
    Case("int8-static", Scheme("int8", activations="static"), rows=5, order=True),
    Case("int8-blocks", Scheme("int8", 64, activations="group"), rows=4),
    Case("fp4-row", Scheme("fp4", 32), rows=1, scales="bfloat16"),
    Case("fp4-many-rows", Scheme("fp4", 32), rows=70, out=(2, 40), scales="bfloat16"),
    Case("fp8-row", Scheme("fp8"), rows=1),
    Case("fp8-channel", Scheme("fp8"), rows=66, out=(2, 40), scales="bfloat16"),
    Case("fp8-group", Scheme("fp8", 128), rows=12, inputs=512),
    Case("fp8-token-row", Scheme("fp8", activations="token"), rows=1),
    Case("fp8-token", Scheme("fp8", activations="token"), rows=70, out=(2, 40), scales="bfloat16"),
    Case("fp8-static", Scheme("fp8", activations="static"), rows=16),
    Case("fp8-blocks-row", Scheme("fp8", 128, activations="group"), rows=1, inputs=384),
    Case("fp8-blocks", Scheme("fp8", 128, activations="group"), rows=65, out=(130,), inputs=512, scales="bfloat16"),
)


def make_product(case: Case, backend: Backend) -> Product:
    """Return the arguments of a case, whose weight is multiplied by a backend, and its product."""
    x, weight, terms, magnitudes = make_terms(case, backend)
    inputs = (x if weight.order is None else x[:, np.asarray(weight.order)]).astype(np.float64)
    return Product(x, weight, inputs @ terms.T, np.abs(inputs) @ magnitudes.T)


def make_terms(case: Case, backend: Backend) -> tuple[np.ndarray, QuantizedWeight, np.ndarray, np.ndarray]:
    """Return the arguments of a case, its weights `[outputs, inputs]` in float64, and the most that rounding can see of
    each of them."""
    rng = np.random.default_rng(sum(case.name.encode()))
    scheme, groups = case.scheme, num_groups(case.inputs, case.scheme)
    q = _numbers(rng, (*case.out, case.inputs), scheme)
    scale = (rng.random((*case.out, groups)) * 0.02 + 0.005).astype(jnp.dtype(case.scales))
    zero = None
    if scheme.zeros:
        middle = 2 ** (scheme.bits - 1)
        zero = rng.integers(-middle, middle + 1, scale.shape) + (rng.random(scale.shape) if case.fractional else 0.0)
        zero = zero.astype(scale.dtype if case.fractional else np.int16)
    order = rng.permutation(case.inputs).astype(np.int32) if case.order else None
    x, input_scale = _inputs(rng, case)
    moved = arrangement(backend, case.inputs, scheme)
    numbers = q.reshape(*case.out, -1, len(moved))[..., moved].reshape(q.shape) if moved else q
    if scheme.bits == 4:
        nibbles = numbers.astype(np.uint8) & 15
        numbers = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    q = FP4_VALUES[q] if scheme.numbers == "fp4" else q
    weight = QuantizedWeight(
        jnp.asarray(numbers),
        jnp.asarray(scale),
        None if zero is None else jnp.asarray(zero),
        None if order is None else jnp.asarray(order),
        None if input_scale is None else jnp.asarray(input_scale),
        scheme,
        backend,
        moved,
    )
    terms, magnitudes = (_float64(q, scale, zero, absolute=absolute) for absolute in (False, True))
    return x, weight, terms, magnitudes


def _numbers(rng: np.random.Generator, shape: tuple[int, ...], scheme: Scheme) -> np.ndarray:
    if scheme.numbers == "fp4":
        return rng.integers(0, len(FP4_VALUES), shape).astype(np.int8)
    largest = _LARGEST[scheme.numbers]
    if scheme.numbers == "fp8":
        return np.clip(rng.standard_normal(shape) * 100, -largest, largest).astype(FP8)
    return rng.integers(-largest - 1, largest + 1, shape).astype(np.int8)


def _inputs(rng: np.random.Generator, case: Case) -> tuple[np.ndarray, np.float32 | None]:
    """Return inputs; quantized ones are numbers, the largest one in each group, times a power of two of its own."""
    scheme, shape = case.scheme, (case.rows, case.inputs)
    if scheme.activations is None:
        return rng.standard_normal(shape).astype(jnp.dtype(case.dtype)), None
    size = (scheme.group if scheme.activations == "group" else None) or case.inputs
    numbers = _numbers(rng, shape, dataclasses.replace(scheme, group=None)).astype(np.float32)
    grouped = np.maximum(numbers.reshape(case.rows, -1, size), -_LARGEST[scheme.numbers])
    grouped[..., size // 3] = _LARGEST[scheme.numbers]
    input_scale = np.float32(2.0**-6)
    if scheme.activations == "static":
        return (grouped * input_scale).reshape(shape).astype(jnp.dtype(case.dtype)), input_scale
    factors = 2.0 ** rng.integers(-9, -3, (*grouped.shape[:2], 1))
    return (grouped * factors).reshape(shape).astype(jnp.dtype(case.dtype)), None


def _float64(q: np.ndarray, scale: np.ndarray, zero: np.ndarray | None, *, absolute: bool) -> np.ndarray:
    """Return the weights `[outputs, inputs]`; if `absolute`, the most that rounding can see of each."""
    grouped = q.astype(np.float64).reshape(*scale.shape, -1)
    zeros = np.zeros(scale.shape) if zero is None else zero.astype(np.float64)
    grouped = np.abs(grouped) + np.abs(zeros)[..., None] if absolute else grouped - zeros[..., None]
    return (grouped * scale.astype(np.float64)[..., None]).reshape(-1, q.shape[-1])
