from __future__ import annotations

from typing import Any

import pytest

from jaxserve.engine.scheduling.bucket_stats import BucketStats
from jaxserve.step_plan import Chunk, StepKind, StepPlan
from tests.engine.conftest import make_capacity

CAPACITY = make_capacity(verify_buckets=(8, 32), max_drafts=3)


def chunk(length: int, *, decode: bool = False, **options: Any) -> Chunk:
    tokens = None if decode else [1] * length
    fields = {"logits": length if decode else 1, "sample": True} | options
    return Chunk(request_id="r", slot=0, rank=0, start=0, length=length, tokens=tokens, new_pages=((),), **fields)


DECODES = [chunk(1, decode=True), chunk(1, decode=True)]
DRAFTS = [chunk(1, decode=True), chunk(4, decode=True)]


@pytest.mark.parametrize(
    ("kind", "decodes", "prompts", "used", "size"),
    [
        ("decode", DECODES, [], 2, 2),
        ("verify", DRAFTS, [], 5, 8),
        ("mixed", DECODES, [chunk(9)], 11, 16),
        ("mixed", DRAFTS, [chunk(12)], 17, 64),
        ("prompt_logprobs", DECODES, [chunk(3, logits=3)], 5, 8),
        ("prompt_logprobs", [], [chunk(1, target=7)], 1, 8),
    ],
)
def test_a_step_counts_in_the_program_that_it_ran_in(
    kind: StepKind, decodes: list[Chunk], prompts: list[Chunk], used: int, size: int
) -> None:
    drafts = sum(one.length - 1 for one in decodes)
    plan = StepPlan(opens=[], chunks=decodes + prompts, num_decodes=len(decodes), greedy=False, num_drafts=drafts)
    assert plan.kind == kind
    stats = BucketStats(CAPACITY)
    stats.count(plan)
    assert (dict(stats.used), dict(stats.sizes)) == ({kind: used}, {kind: size})
    assert stats.decode_steps_by_rows.total() == (kind == "decode")
    assert stats.last_bucket == (size if kind in ("decode", "verify") else 0)
