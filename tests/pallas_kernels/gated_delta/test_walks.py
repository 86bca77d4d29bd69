"""Sequences in many steps: backends against the whole sequence in float64, and the CPU's bits against each other."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_kernels.dispatch import BackendName
from pallas_kernels.gated_delta import BLOCK
from tests.pallas_kernels.gated_delta.cases import Case, bits, whole_history
from tests.pallas_kernels.gated_delta.test_gated_delta import skip_refused
from tests.pallas_kernels.gated_delta.walks import Advance, Walk
from tests.selection import examples

LENGTH = 110
DRAFTS = 4
SMALL = Case("walk", (), key_heads=2, group=2, key_dim=32, value_dim=32, max_drafts=DRAFTS, num_rows=4, num_tokens=48)


def _draw(rng: np.random.Generator, walk: Walk, sequence: int, room: int) -> Advance | None:
    """Draw what a sequence does in a step: a decode, a chunk, drafts of which some are rejected, or nothing."""
    at, left = walk.length(sequence), min(walk.longest - walk.length(sequence), room)
    kind = rng.choice(["wait", "decode", "chunk", "drafts"], p=[0.1, 0.3, 0.3, 0.3])
    if left == 0 or kind == "wait":
        return None
    new, drafts, wrong = 1, 0, 0
    if kind == "chunk":
        new = int(rng.integers(1, left + 1))
    elif kind == "drafts" and left > DRAFTS:
        drafts = int(rng.integers(0, DRAFTS + 1))
        new, wrong = 1 + drafts, int(rng.integers(0, DRAFTS - drafts + 1))
    borders = range((walk.folded(sequence) // BLOCK + 1) * BLOCK, at + new - drafts + 1, BLOCK)
    snapshot = int(rng.choice(borders)) if borders and rng.random() < 0.5 else None
    return Advance(sequence, new, drafts, wrong, bool(rng.random() < 0.3), snapshot)


def _stroll(walk: Walk, seed: int) -> None:
    """Compute three sequences by random steps; one begins again from its last snapshot."""
    rng = np.random.default_rng(seed)
    has_restarted = False
    while any(walk.length(sequence) < walk.longest for sequence in range(3)):
        advances: list[Advance] = []
        for sequence in rng.permutation(3).tolist():
            taken = sum(one.new + one.wrong for one in advances)
            one = _draw(rng, walk, sequence, min(walk.case.num_tokens - taken, 40))
            advances += [one] if one else []
        if advances:
            walk.step(*advances)
        borders = [border for sequence, border in walk.snapshots if sequence == 1]
        if walk.length(1) > walk.longest // 2 and borders and not has_restarted:
            walk.restart(1, max(borders))
            has_restarted = True


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_random_steps_equal_the_whole_sequence(backend: BackendName) -> None:
    skip_refused(SMALL, backend)
    for seed in range(examples(16, 2)):
        walk = Walk(SMALL, backend, 3, LENGTH)
        _stroll(walk, seed)
        for sequence, tokens in enumerate(walk.tokens):
            past = whole_history(SMALL, walk.weights, *tokens)
            scale = np.abs(past.outputs).max()
            np.testing.assert_allclose(walk.outputs[sequence], past.outputs, rtol=1e-4, atol=1e-5 * scale)
            for (owner, border), (state, tail) in walk.borders.items():
                if owner == sequence:
                    scale = np.abs(past.state(border)).max()
                    np.testing.assert_allclose(state, past.state(border), rtol=1e-4, atol=1e-5 * scale)
                    np.testing.assert_array_equal(tail, past.tail(border, SMALL.taps))


def _chunks(walk: Walk, *sizes: int) -> None:
    """Compute the first sequence alone, in chunks of these sizes in turn."""
    i = 0
    while left := LENGTH - walk.length(0):
        walk.step(Advance(0, min(sizes[i % len(sizes)], left)))
        i += 1


def _after_a_hit(walk: Walk) -> None:
    """Compute the first sequence in two parts: the second one begins with a snapshot of the first."""
    walk.step(Advance(0, 75, snapshot=48))
    walk.restart(0, 48)
    _chunks(walk, 19)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_steps(dtype: str) -> None:
    """Cover one pass, odd chunks, single tokens, hits, rejected drafts, and other rows.

    An item of a row alone has fewer values than one in company.
    """
    case = Case("walk", (), key_heads=1, group=2, key_dim=32, value_dim=128, dtype=dtype, max_drafts=DRAFTS, num_rows=6)
    case = Case(**{**vars(case), "num_tokens": LENGTH})
    whole = Walk(case, "cpu", 3, LENGTH)
    whole.step(Advance(0, LENGTH))
    found = {"odd chunks": (7, 31), "blocks": (16,), "single tokens": (1,), "two parts": (33, LENGTH)}
    walks = {}
    for name, sizes in found.items():
        walks[name] = Walk(case, "cpu", 3, LENGTH)
        _chunks(walks[name], *sizes)
    walks["a hit"] = Walk(case, "cpu", 3, LENGTH)
    _after_a_hit(walks["a hit"])
    walks["company and drafts"] = Walk(case, "cpu", 3, LENGTH)
    _stroll(walks["company and drafts"], 3)
    for name, walk in walks.items():
        np.testing.assert_array_equal(bits(walk.outputs[0]), bits(whole.outputs[0]), err_msg=name)
        last = LENGTH // BLOCK * BLOCK
        for mine, other in zip(walk.borders[0, last], whole.borders[0, last], strict=True):
            np.testing.assert_array_equal(bits(mine), bits(other), err_msg=f"{name}: the state")
        for position in range(last, LENGTH):
            for mine, other in zip(walk.entries[0, position], whole.entries[0, position], strict=True):
                np.testing.assert_array_equal(bits(mine), bits(other), err_msg=f"{name}: entry {position}")
