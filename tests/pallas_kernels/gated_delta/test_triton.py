"""The Triton kernels, interpreted."""

from __future__ import annotations

import pytest

from tests.pallas_kernels.gated_delta.cases import CASES, CORNERS, Case, check, make_batch
from tests.pallas_kernels.gated_delta.test_gated_delta import run, skip_refused
from tests.selection import grid

pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize("case", grid(CASES, lambda case: case.name in CORNERS), ids=str)
def test_equals_a_loop_over_tokens(case: Case) -> None:
    skip_refused(case, "triton")
    batch = make_batch(case)
    check(case, batch, *run(case, batch, "triton"))
