from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxserve.runtime.programs.program_cache import build_programs
from jaxserve.runtime.step.program import ProgramKey
from tests.runtime.programs.large_pool import CAPACITY, KEYS
from tests.runtime.tiny import builder


@pytest.fixture(scope="package")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that has the programs."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="package")
def programs(kept: Path) -> dict[ProgramKey, Any]:
    built, compiled = build_programs(builder(CAPACITY), KEYS, kept)
    assert compiled == len(KEYS)
    return built
