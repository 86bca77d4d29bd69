"""The table of cases that every backend passes: experts, schemes and shapes, with the result of each row in float64.

Experts without rows hold NaN, or numbers with scales of NaN, and so do rows of inputs without a pair: who reads these
gives himself away. Inputs of a scheme that quantizes them are chosen so that quantizing changes none.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels.expert_routing.reference import group_by_expert
from pallas_kernels.grouped_matmul import Gate, Groups
from pallas_kernels.quantized_matmul import Backend, QuantizedWeight, Scheme
from tests.pallas_kernels.quantized_matmul import cases as products

Spread = Literal["random", "one", "absent", "none"]


@dataclasses.dataclass(frozen=True)
class Case:
    """`tokens` that each choose `choices` of `experts` of weights `[out, inputs]`; with a gate, gate and up are.

    With the spread `one`, all tokens choose the first experts; with `absent`, some choose experts of another shard;
    with `none`, all do. Without a scheme, weights have 16 bits.
    """

    name: str
    scheme: Scheme | None = None
    tokens: int = 5
    choices: int = 2
    experts: int = 8
    out: int = 64
    inputs: int = 256
    gate: Gate | None = None
    bias: bool = False
    of_tokens: bool = False
    spread: Spread = "random"
    scales: str = "bfloat16"

    def __str__(self) -> str:
        return self.name

    @property
    def outputs(self) -> int:
        """The outputs of an expert's weight: with a gate, those of gate and up."""
        return self.out * (2 if self.gate else 1)


class GroupedProduct(NamedTuple):
    """The arguments of a product, the results in float64 of rows that have a pair, and the error allowed of each."""

    x: Any
    weight: Any
    groups: Groups
    bias: Any
    expected: np.ndarray
    allowed: np.ndarray


SWIGLU = Gate()
CLAMPED = Gate(slope=1.702, limit=7.0, up_offset=1.0)
INT4 = Scheme("int4", 128)
MXFP4 = Scheme("fp4", 32)

CASES = (
    Case("bf16-down"),
    Case("bf16-up", gate=SWIGLU, of_tokens=True),
    Case("bf16-one-token", tokens=1, gate=SWIGLU, of_tokens=True),
    Case("bf16-up-gelu", gate=Gate("gelu_pytorch_tanh"), of_tokens=True),
    Case("bf16-up-clamped", gate=CLAMPED, bias=True, of_tokens=True),
    Case("bf16-down-bias", bias=True),
    Case("bf16-one-expert", tokens=70, choices=1, spread="one"),
    Case("bf16-one-expert-up", tokens=70, choices=1, spread="one", gate=SWIGLU, of_tokens=True),
    Case("bf16-absent", tokens=9, spread="absent", gate=SWIGLU, of_tokens=True),
    Case("bf16-absent-down", tokens=9, spread="absent"),
    Case("bf16-none", spread="none"),
    Case("bf16-many-rows", tokens=150, choices=4, experts=12, gate=SWIGLU, of_tokens=True),
    Case("bf16-many-rows-down", tokens=150, choices=4, experts=12),
    Case("bf16-many-experts", tokens=6, choices=8, experts=128, inputs=128),
    Case("bf16-wide", tokens=3, out=192, inputs=768),
    Case("bf16-narrow", tokens=20, out=96, inputs=160),
    Case("int4-down", INT4),
    Case("int4-up", INT4, gate=SWIGLU, of_tokens=True),
    Case("int4-many-rows", INT4, tokens=90, choices=3, gate=SWIGLU, of_tokens=True),
    Case("int4-zeros", Scheme("int4", 128, zeros=True), bias=True),
    Case("int4-zeros-group-32", Scheme("int4", 32, zeros=True), spread="absent", gate=SWIGLU, of_tokens=True),
    Case("int8-group-32", Scheme("int8", 32), gate=SWIGLU, of_tokens=True),
    Case("int8-channel", Scheme("int8")),
    Case("int8-token", Scheme("int8", activations="token"), gate=SWIGLU, of_tokens=True, scales="float32"),
    Case("fp8-channel", Scheme("fp8"), tokens=20),
    Case("fp8-token", Scheme("fp8", activations="token"), gate=SWIGLU, of_tokens=True, scales="float32"),
    Case("fp8-token-down", Scheme("fp8", activations="token"), tokens=40, spread="absent", scales="float32"),
    Case("fp8-static", Scheme("fp8", activations="static"), scales="float32"),
    Case("fp8-blocks", Scheme("fp8", 128, activations="group"), gate=SWIGLU, of_tokens=True, out=128, scales="float32"),
    Case("fp8-blocks-down", Scheme("fp8", 128, activations="group"), tokens=33, inputs=384, scales="float32"),
    Case("fp4-up", MXFP4, gate=CLAMPED, bias=True, of_tokens=True),
    Case("fp4-down", MXFP4, bias=True, tokens=17),
    Case("fp4-many-rows", MXFP4, tokens=80, choices=4),
)


def make_case(case: Case, backend: Backend) -> GroupedProduct:
    """Return the arguments of a case, whose weight is multiplied by a backend, and its results."""
    rng = np.random.default_rng(sum(case.name.encode()))
    groups = group_by_expert(jnp.asarray(_ids(rng, case)), case.experts)
    starts, tokens = np.asarray(groups.starts), np.asarray(groups.tokens)
    rows = case.tokens if case.of_tokens else groups.num_rows
    empty = np.diff(starts) == 0
    x, weight, dense, magnitudes = (
        _dense(rng, case, rows) if case.scheme is None else _quantized(rng, case, rows, backend)
    )
    x = np.array(x)
    if not case.of_tokens:
        x[starts[-1] :] = np.nan
    if case.scheme is None:
        weight = weight.at[empty].set(jnp.nan)
    else:
        weight = dataclasses.replace(weight, scale=weight.scale.at[empty].set(jnp.nan))
    bias = rng.standard_normal((case.experts, case.outputs)).astype(jnp.bfloat16) if case.bias else None
    experts = np.repeat(np.arange(case.experts), np.diff(starts))
    inputs = x.astype(np.float64)[tokens[: starts[-1]] if case.of_tokens else slice(0, starts[-1])]
    sums = np.einsum("ri,roi->ro", inputs, dense[experts])
    errors = 2.0**-20 * np.einsum("ri,roi->ro", np.abs(inputs), magnitudes[experts])
    if bias is not None:
        sums += bias.astype(np.float64)[experts]
        errors += 2.0**-22 * np.abs(sums)
    if case.gate is None:
        return GroupedProduct(jnp.asarray(x), weight, groups, bias, sums, errors + 1e-30)
    gate, up = sums[:, : case.out], sums[:, case.out :]
    expected = _joined(case.gate, gate, up)
    change = np.abs(_joined(case.gate, gate + errors[:, : case.out], up) - expected)
    change += np.abs(_joined(case.gate, gate - errors[:, : case.out], up) - expected)
    change += np.abs(_joined(case.gate, gate, np.abs(up) + 1)) * errors[:, case.out :] / (np.abs(up) + 1)
    allowed = 2 * change + 2.0**-16 * np.abs(expected) + 2.0**-20 * (1 + np.abs(up))
    return GroupedProduct(jnp.asarray(x), weight, groups, bias, expected, allowed)


def _ids(rng: np.random.Generator, case: Case) -> np.ndarray:
    if case.spread == "one":
        return np.tile(np.arange(case.choices, dtype=np.int32), (case.tokens, 1))
    chosen = np.argsort(rng.random((case.tokens, case.experts)), axis=1)[:, : case.choices].astype(np.int32)
    if case.spread == "none":
        return np.full_like(chosen, case.experts + 3)
    if case.spread == "absent":
        chosen[rng.random(chosen.shape) < 0.4] = -1
        chosen[0] = case.experts
    return chosen


def _dense(rng: np.random.Generator, case: Case, rows: int) -> tuple[np.ndarray, Any, np.ndarray, np.ndarray]:
    x = rng.standard_normal((rows, case.inputs)).astype(jnp.bfloat16)
    weight = (rng.standard_normal((case.experts, case.outputs, case.inputs)) * 0.1).astype(jnp.bfloat16)
    exact = weight.astype(np.float64)
    return x, jnp.asarray(weight), exact, np.abs(exact)


def _quantized(
    rng: np.random.Generator, case: Case, rows: int, backend: Backend
) -> tuple[np.ndarray, QuantizedWeight, np.ndarray, np.ndarray]:
    """Make a product of the other table with the experts as one dimension of its outputs."""
    assert case.scheme is not None
    one = products.Case(case.name, case.scheme, rows, (case.experts, case.outputs), case.inputs, scales=case.scales)
    x, weight, exact, magnitudes = products.make_terms(one, backend)
    shape = (case.experts, case.outputs, case.inputs)
    return x, weight, exact.reshape(shape), magnitudes.reshape(shape)


def _joined(gate: Gate, g: np.ndarray, u: np.ndarray) -> np.ndarray:
    if gate.limit is not None:
        g, u = np.minimum(g, gate.limit), np.clip(u, -gate.limit, gate.limit)
    if gate.activation == "silu":
        return g / (1 + np.exp(-gate.slope * g)) * (u + gate.up_offset)
    return 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * (u + gate.up_offset)
