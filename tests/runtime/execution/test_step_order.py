"""Which earlier step a step needs."""

from __future__ import annotations

from jaxserve.runtime.execution.step_order import StepOrder
from jaxserve.step_plan import Chunk, DraftRead, Draw


def _chunk(slot: int, tokens: list[int] | None = None, rank: int = 0) -> Chunk:
    return Chunk("r", slot, rank, 0, 1, tokens, ((),), 1, True)


def test_only_decodes_need_the_step_that_computed_their_slot() -> None:
    order = StepOrder()
    assert order.last_decoded([_chunk(0, [1]), _chunk(1, [2])]) == -1
    order.add([_chunk(0, [1]), _chunk(1, [2])], 0)
    order.add([_chunk(2, [3])], 1)
    order.add([_chunk(0, [3], rank=1)], 2)
    assert order.last_decoded([_chunk(0), _chunk(1)]) == 0
    assert order.last_decoded([_chunk(0), _chunk(2), _chunk(1, [5])]) == 1
    assert order.last_decoded([_chunk(2, [4])]) == -1
    assert order.last_of([Draw(rank=1, slot=0), Draw(rank=0, slot=0)]) == 2
    assert order.last_of([DraftRead(rank=0, slot=2, back=0, length=1)]) == 1
    order.add([_chunk(1)], 3)
    assert order.last_decoded([_chunk(1), _chunk(0)]) == 3
