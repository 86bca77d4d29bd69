"""The table of cases finds the bugs that kernels are prone to: each is seeded in a copy of a kernel's source.

A seed names the file, the text and its replacement; the modules of the backend are imported again with it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from pallas_kernels.dispatch import BackendName
from pallas_kernels.packed_attention import __name__ as PACKAGE
from tests.pallas_kernels.packed_attention import test_packed_attention as suite
from tests.pallas_kernels.packed_attention.cases import CASES, check, make_batch
from tests.selection import grid, is_interpreted


@dataclasses.dataclass(frozen=True)
class Seed:
    """Replaces `old` by `new` in a module of a backend; then the case of this name must fail."""

    bug: str
    module: str
    old: str
    new: str
    case: str = "texts"
    backend: BackendName = "cpu"

    def __str__(self) -> str:
        return f"{self.backend}-{self.bug}"


_triton, _mosaic_tpu = (functools.partial(Seed, backend=name) for name in ("triton", "mosaic_tpu"))

SEEDS = [
    Seed("sees-past-the-text", "items", "splat(f, block.length)", "splat(f, block.length + 1)"),
    Seed("reads-past-the-text", "blocks", "f.minimum(at + i, block.length - 1)", "(at + i)", "bf16-one-token-texts"),
    Seed("reaches-too-far", "items", "splat(f, query + facts.reach)", "splat(f, query + facts.reach + 1)", "reach"),
    Seed(
        "reaches-too-far-back", "items", "splat(f, query - facts.reach)", "splat(f, query - facts.reach - 1)", "reach"
    ),
    Seed("a-block-too-late", "items", "f.maximum(first - facts.reach, 0)", "first", "reach"),
    Seed("a-block-too-few", "items", "f.minimum(first + count + facts.reach", "f.minimum(first + count", "reach"),
    Seed("a-strip-leaves-out-a-block", "items", "(at <= last + facts.reach)", "(at <= first)", "reach"),
    Seed("a-bias-of-another-head", "items", "(head * facts.group + g)", "(head + g)", "bias-reach-and-group"),
    Seed(
        "biases-in-reverse",
        "items",
        "f.maximum(distance, 0 - far), far)",
        "f.maximum(0 - distance, 0 - far), far)",
        "bias",
    ),
    Seed("another-head", "blocks", "head * head_bytes", "head * 0"),
    Seed("a-head-of-another-group", "items", "r % facts.group * head_bytes", "r * 0", "group-4"),
    Seed("a-tile-too-few", "backend", "+ (tile_queries(facts) - 1)", "", "one-long-text"),
    _triton("reads-past-the-text", "kernel", "key = jnp.minimum(key, end - 1)", "pass"),
    _triton("reaches-too-far", "kernel", "jnp.abs(distance) <= reach", "jnp.abs(distance) <= reach + 1", "reach"),
    _triton("sees-past-the-text", "kernel", "lax.div(end - begin, block)", "pl.cdiv(end - begin, block)"),
    _triton(
        "a-bias-of-another-head", "kernel", "inputs.bias.at[head[:, None]", "inputs.bias.at[head[:, None] * 0", "bias"
    ),
    _mosaic_tpu("reads-padding", "backend", "k, v = jnp.where(live, k, 0), jnp.where(live, v, 0)", "pass"),
    _mosaic_tpu("sees-past-the-text", "kernel", "(key < stop)", "(key <= stop)"),
    _mosaic_tpu(
        "a-tile-too-few",
        "kernel",
        "stops = -(-by_tile[:, :, 1].max(axis=1) // TILE)",
        "stops = by_tile[:, :, 1].max(axis=1) // TILE",
    ),
    _mosaic_tpu("another-head", "kernel", "(h // group, 0, 0)", "(0, 0, 0)"),
]
QUICK = ("sees-past-the-text", "reads-past-the-text", "a-block-too-few", "biases-in-reverse")


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    """These tests and the others don't see each other's compiled programs."""
    suite.compiled.cache_clear()
    yield
    suite.compiled.cache_clear()


def _plant(seed: Seed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Import the backend's modules again, one of them with the seed in it; the present ones are restored later."""
    importlib.import_module(f"{PACKAGE}.{seed.backend}.backend")
    for name in list(sys.modules):
        if name.startswith(f"{PACKAGE}.{seed.backend}"):
            monkeypatch.delitem(sys.modules, name)
    name = f"{PACKAGE}.{seed.backend}.{seed.module}"
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    assert source.count(seed.old) == 1, f"{seed.module} has the seed's text {source.count(seed.old)} times"
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(source.replace(seed.old, seed.new), spec.origin, "exec"), module.__dict__)
    if seed.backend != "cpu":
        return
    # A process keeps what it has compiled under a name
    facts = importlib.import_module(f"{PACKAGE}.cpu.blocks").CpuPacked
    name, suffix = facts.name.fget, seed.bug.replace("-", "_")
    monkeypatch.setattr(facts, "name", property(lambda self: f"{name(self)}_{suffix}"))


def _compute(seed: Seed) -> None:
    case = next(case for case in CASES if case.name == seed.case)
    batch = make_batch(case)
    check(case, batch, suite.run(batch, seed.backend))


@pytest.mark.parametrize(
    "seed",
    grid(
        SEEDS,
        lambda seed: seed.bug in QUICK and not is_interpreted(seed.backend),
        lambda seed: is_interpreted(seed.backend),
    ),
    ids=str,
)
def test_a_seeded_bug_is_found(seed: Seed, monkeypatch: pytest.MonkeyPatch) -> None:
    _plant(seed, monkeypatch)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        _compute(seed)


def test_without_a_seed_the_case_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = Seed("none", "backend", "def refusal(", "def refusal(")
    _plant(seed, monkeypatch)
    _compute(seed)
