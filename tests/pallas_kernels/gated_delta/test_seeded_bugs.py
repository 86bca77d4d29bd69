"""The table of cases finds the bugs that kernels are prone to: each is seeded in a copy of a kernel's source.

A seed names the file, the text and its replacement; the modules of the backend are imported again with it.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from pallas_kernels.gated_delta import __name__ as PACKAGE
from tests.pallas_kernels.gated_delta import test_gated_delta as suite
from tests.pallas_kernels.gated_delta.cases import CASES, check, make_batch
from tests.selection import grid

pytestmark = pytest.mark.slow


@dataclasses.dataclass(frozen=True)
class Seed:
    """Replaces `old` by `new` in a module of the CPU's backend; then the case of this name must fail."""

    bug: str
    module: str
    old: str
    new: str
    case: str = "mixed"

    def __str__(self) -> str:
        return self.bug


SEEDS = [
    Seed(
        "drafts-are-folded",
        "operands",
        "f.maximum(certain & -LANES",
        "f.maximum(begin + past - first_token & -LANES",
        "drafts",
    ),
    Seed("drafts-change-the-pool", "items", "f.select(is_target, f.constant(I64, 0), 1)", "outside * 0", "drafts"),
    Seed("a-whole-block-is-kept-unfolded", "items", "| (next_block <= row.border)", "", "decode"),
    Seed("a-decay-of-another-block", "tokens", "before = f.select(part.start > 0, before, 0.0)", ""),
    Seed("inputs-before-the-border", "tokens", "f.select(position < row.folded, before, kept)", "kept"),
    Seed("inputs-before-the-sequence", "tokens", "f.select(position < 0, scratch.zeros, pointer)", "pointer"),
    Seed("taps-in-reverse", "tokens", "range(i, 2 * LANES, 2)", "range(1 - i, 2 * LANES, 2)"),
    Seed("a-token-does-not-see-itself", "panels", "output = f.fma(of_own, delta, output)", "pass"),
    Seed("a-state-that-does-not-decay", "panels", "[decay * number for", "[number for"),
    Seed("a-query-that-is-not-scaled", "tokens", "facts.key_dim**-0.5", "1.0"),
    Seed("a-rate-of-another-head", "tokens", "(row.head * facts.group + head) * 4", "(row.head + head) * 4", "group-2"),
    Seed("a-tail-one-too-late", "items", "border - before + i", "border - before + i + 1"),
    Seed("an-input-in-another-entry", "items", "position % facts.recent", "(position + 1) % facts.recent"),
    Seed("a-snapshot-at-another-border", "items", "next_block.equals(row.snapshot_len)", "is_target", "one-long-row"),
    Seed("a-state-that-does-not-move", "items", "lambda: _each(f, first, last, move)", "lambda: None", "decode"),
    Seed("another-layer", "backend", "layer_now * count", "count * 0"),
]
QUICK = ("drafts-are-folded", "inputs-before-the-border", "a-snapshot-at-another-border")


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    """These tests and the others don't see each other's compiled programs."""
    suite.compiled.cache_clear()
    yield
    suite.compiled.cache_clear()


def _plant(seed: Seed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Import the backend's modules again, one of them with the seed in it; the present ones are restored later."""
    importlib.import_module(f"{PACKAGE}.cpu.backend")
    for name in list(sys.modules):
        if name.startswith(f"{PACKAGE}.cpu"):
            monkeypatch.delitem(sys.modules, name)
    name = f"{PACKAGE}.cpu.{seed.module}"
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    assert source.count(seed.old) == 1, f"{seed.module} has the seed's text {source.count(seed.old)} times"
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(source.replace(seed.old, seed.new), spec.origin, "exec"), module.__dict__)
    # A process keeps what it has compiled under a name
    facts = importlib.import_module(f"{PACKAGE}.cpu.operands").CpuDelta
    name, suffix = facts.name.fget, seed.bug.replace("-", "_")
    monkeypatch.setattr(facts, "name", property(lambda self: f"{name(self)}_{suffix}"))


def _compute(seed: Seed) -> None:
    case = next(case for case in CASES if case.name == seed.case)
    batch = make_batch(case)
    check(case, batch, *suite.run(case, batch, "cpu"))


@pytest.mark.parametrize("seed", grid(SEEDS, lambda seed: seed.bug in QUICK), ids=str)
def test_a_seeded_bug_is_found(seed: Seed, monkeypatch: pytest.MonkeyPatch) -> None:
    _plant(seed, monkeypatch)
    with pytest.raises(AssertionError, match=r"Not equal to tolerance|Arrays are not equal"):
        _compute(seed)


def test_without_a_seed_the_case_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = Seed("none", "backend", "def refusal(", "def refusal(")
    _plant(seed, monkeypatch)
    _compute(seed)
