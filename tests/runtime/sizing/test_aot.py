"""Which programs of a deployment with pipeline stages are compiled ahead of time, by name."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.errors import ConfigError
from jaxserve.runtime.programs.bundle import BundlePart
from jaxserve.runtime.programs.transfers import FEEDBACK_KEY
from jaxserve.runtime.sizing.aot import matching_programs, names_of
from jaxserve.runtime.step.program import ProgramKey

FULL, GREEDY = ProgramKey("decode", 8, False), ProgramKey("decode", 8, True)
BUILDER: Any = None
PARTS = [
    BundlePart("stage-0", BUILDER, [FULL]),
    BundlePart("stage-1", BUILDER, [GREEDY, FULL]),
    BundlePart("transfer-0", BUILDER, [ProgramKey("send", 8)]),
    BundlePart("transfer-1", BUILDER, [FEEDBACK_KEY]),
]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("decode-8-full", ["stage-0/decode-8-full", "stage-1/decode-8-full"]),
        ("stage-1/*", ["stage-1/decode-8-greedy", "stage-1/decode-8-full"]),
        ("transfer-*", ["transfer-0/send-8", "transfer-1/feedback"]),
        ("*-8", ["transfer-0/send-8"]),
        ("*", names_of(PARTS)),
    ],
)
def test_names_match_with_and_without_the_stage(pattern: str, names: list[str]) -> None:
    chosen = matching_programs(PARTS, pattern)
    assert names_of(chosen) == names
    assert all(part.keys for part in chosen)


def test_a_name_of_no_program_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="no program is called 'x'; there are stage-0/decode-8-full, stage-1/decode-8-gr"
    ):
        matching_programs(PARTS, "x")
