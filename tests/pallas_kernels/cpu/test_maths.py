from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu import call, cpu_features, maths
from pallas_kernels.cpu.emit import Function, Module, Value
from pallas_kernels.cpu.ffi import Call, handler
from pallas_kernels.cpu.types import F32
from pallas_kernels.gated_delta.cpu import logistic

LANES = 16
REGISTER = F32.times(LANES)


@dataclasses.dataclass(frozen=True)
class OnBlocks:
    """Applies a function to 256 numbers at a time, 16 vectors."""

    function: Callable[[Function, list[Value]], list[Value]]

    @property
    def name(self) -> str:
        return f"test_{self.function.__name__}"

    def write(self, module: Module, features: frozenset[str]) -> None:
        def body(call: Call) -> None:
            (source,), (target,) = call.arguments, call.results

            def one(f: Function, item: Value, x: Value, out: Value) -> None:
                place = item * (LANES * LANES * 4)
                registers = [f.load(REGISTER, f.at(x, place), 64 * i) for i in range(LANES)]
                for i, value in enumerate(self.function(f, registers)):
                    f.store(value, f.at(out, place), 64 * i)

            call.parallel_for(source.dim(0), [source.data, target.data], one)

        handler(module, self.name, 1, 1, body)


def _run(function: Callable[[Function, list[Value]], list[Value]], x: np.ndarray) -> np.ndarray:
    blocks = jnp.asarray(x.reshape(-1, LANES, LANES))
    kernel = OnBlocks(function)
    return np.asarray(jax.jit(lambda x: call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), x))(blocks))


def exponentials(f: Function, x: list[Value]) -> list[Value]:
    return [maths.exp(f, one) for one in x]


def logarithms(f: Function, x: list[Value]) -> list[Value]:
    return [maths.log(f, one) for one in x]


def tangents(f: Function, x: list[Value]) -> list[Value]:
    return [maths.tanh(f, one) for one in x]


def sigmoids(f: Function, x: list[Value]) -> list[Value]:
    return [logistic.sigmoid(f, one, cpu_features()) for one in x]


def divided_sigmoids(f: Function, x: list[Value]) -> list[Value]:
    return [logistic.sigmoid(f, one, frozenset()) for one in x]


def softplus(f: Function, x: list[Value]) -> list[Value]:
    return [logistic.softplus(f, one) for one in x]


def columns(f: Function, x: list[Value]) -> list[Value]:
    return maths.transpose(f, x)


def row_sums(f: Function, x: list[Value]) -> list[Value]:
    return [maths.lane_sums(f, x)] * LANES


def sums_everywhere(f: Function, x: list[Value]) -> list[Value]:
    return [maths.reduce_lanes(f, one, operator.add) for one in x]


def rounded(f: Function, x: list[Value]) -> list[Value]:
    return [maths.from_bf16(f, maths.to_bf16(f, one)) for one in x]


def test_exponentials_are_those_of_float64() -> None:
    x = np.concatenate([np.linspace(-87, 88, 2**16), np.linspace(-1e-3, 1e-3, 2**12)]).astype(np.float32)
    np.testing.assert_allclose(_run(exponentials, x).ravel(), np.exp(x.astype(np.float64)), rtol=2e-7)


def test_masked_logits_have_no_weight_and_nan_stays() -> None:
    x = np.zeros(LANES * LANES, np.float32)
    x[:4] = -87.1, -1e30, -np.inf, np.nan
    found = _run(exponentials, x).ravel()
    assert found[:3].tolist() == [0, 0, 0]
    assert np.isnan(found[3])
    assert (found[4:] == 1).all()


def test_logarithms_are_those_of_float64() -> None:
    x = np.concatenate([np.geomspace(1.2e-38, 3e38, 2**16), 1 - np.geomspace(2.0**-24, 0.5, 2**12)]).astype(np.float32)
    np.testing.assert_allclose(_run(logarithms, x).ravel(), np.log(x.astype(np.float64)), rtol=2e-7, atol=1e-12)


def test_tangents_are_those_of_float64() -> None:
    x = np.linspace(-100, 100, 2**14, dtype=np.float32)
    np.testing.assert_allclose(_run(tangents, x).ravel(), np.tanh(x.astype(np.float64)), atol=2e-7, rtol=0)


@pytest.mark.parametrize("function", [sigmoids, divided_sigmoids])
def test_sigmoids_are_those_of_float64(function: Callable[[Function, list[Value]], list[Value]]) -> None:
    x = np.concatenate([np.linspace(-10, 100, 2**15), np.linspace(-86, -10, 2**15)]).astype(np.float32)
    found, expected = _run(function, x).ravel(), 1 / (1 + np.exp(-x.astype(np.float64)))
    np.testing.assert_allclose(found[: 2**15], expected[: 2**15], rtol=4e-7)
    np.testing.assert_allclose(found[2**15 :], expected[2**15 :], rtol=3e-6)
    assert (_run(function, np.full(256, -1e4, np.float32)) < 2e-38).all()


def test_softplus_is_that_of_float64() -> None:
    x = np.concatenate([np.linspace(-86, 100, 2**16), np.linspace(-1, 1, 2**12)]).astype(np.float32)
    np.testing.assert_allclose(_run(softplus, x).ravel(), np.logaddexp(0, x.astype(np.float64)), rtol=5e-7)
    assert (_run(softplus, np.full(256, -1e4, np.float32)) == 0).all()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (columns, lambda x: x.swapaxes(1, 2)),
        (row_sums, lambda x: np.repeat(x.sum(axis=2)[:, None], LANES, axis=1)),
        (sums_everywhere, lambda x: np.repeat(x.sum(axis=2, keepdims=True), LANES, axis=2)),
    ],
)
def test_operations_across_lanes(
    function: Callable[[Function, list[Value]], list[Value]], expected: Callable[[np.ndarray], np.ndarray]
) -> None:
    x = np.random.default_rng(0).integers(-99, 99, (3, LANES, LANES)).astype(np.float32)
    np.testing.assert_array_equal(_run(function, x), expected(x))


def test_bfloat16_is_rounded_as_jax_does() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 2**12, dtype=np.uint32)
    bits[:8] = 0x3F808000, 0x3F818000, 0x3F80FFFF, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FFFFFFF, 0x80000000
    x = bits.view(np.float32)
    with np.errstate(invalid="ignore"):
        expected = x.astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(_run(rounded, x).ravel(), expected)
