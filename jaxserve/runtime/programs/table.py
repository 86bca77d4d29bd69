"""The table of all kinds of programs, by name. The set is closed: every program is of one of these kinds."""

from __future__ import annotations

from jaxserve.config.schema import EngineConfig
from jaxserve.runtime.step.draft import DRAFT, DRAFT_READ
from jaxserve.runtime.step.draw import DRAW
from jaxserve.runtime.step.encode import ENCODE
from jaxserve.runtime.step.kv_scales import KV_SCALES
from jaxserve.runtime.step.page_copies import READ_PAGES, WRITE_PAGES
from jaxserve.runtime.step.program import ProgramKey
from jaxserve.runtime.step.slot_update import SLOT_UPDATES
from jaxserve.runtime.step.step import STEPS
from jaxserve.step_plan import Capacity

_KINDS = (*SLOT_UPDATES, KV_SCALES, READ_PAGES, WRITE_PAGES, DRAW, DRAFT, DRAFT_READ, *STEPS, ENCODE)
KINDS = {kind.name: kind for kind in _KINDS}


def program_keys(config: EngineConfig, capacity: Capacity) -> list[ProgramKey]:
    """Return the keys of all programs of a deployment of these sizes."""
    kinds = (ENCODE,) if capacity.encodes else _KINDS
    return [key for kind in kinds if kind.wants(config) for key in kind.keys(capacity)]


def step_keys(capacity: Capacity) -> list[ProgramKey]:
    """Return the keys of all programs of steps."""
    return [key for kind in KINDS.values() if kind.is_step for key in kind.keys(capacity)]
