"""Where memory bounds the pool, it is sized by the compiler's figure, which is asked once."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from jaxserve.config.schema import DEFAULT_MEM_FRACTION, EngineConfig
from jaxserve.runtime.devices.device import DeviceFacts
from jaxserve.runtime.sizing import temp_memory
from jaxserve.runtime.sizing.deployment import Deployment, deploy
from jaxserve.runtime.sizing.memory import NoRoomError
from jaxserve.runtime.sizing.temp_memory import WorkingMemory, resized, sized_by_compiler
from pallas_kernels.paged_attention import Target
from tests.runtime.tiny import mesh, model

CONFIG = EngineConfig(dtype="float32", max_running_requests=64, chunked_prefill_size=64, cuda_graph_bs=(64,))
PLENTY = 2**30


def _deploy(memory_bytes: int, config: EngineConfig = CONFIG) -> Deployment:
    return deploy(config, model(), DeviceFacts(Target("cpu"), memory_bytes))


def _pool_bytes(made: Deployment) -> int:
    return made.capacity.num_pages * made.capacity.page_size * made.sizes.footprint.kv_per_token


def _bound() -> int:
    """So much memory that the pool gets three quarters of what could be used, by the estimate."""
    made = _deploy(PLENTY)
    return int((made.sizes.footprint.taken + _pool_bytes(made) * 3 // 4) / DEFAULT_MEM_FRACTION)


BOUND = _bound()


def test_the_pool_takes_what_the_programs_leave_and_the_next_start_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    compile_for_it = temp_memory.compiled_figure
    monkeypatch.setattr(temp_memory, "compiled_figure", lambda *args: asked.append(1) or compile_for_it(*args))
    estimated = _deploy(BOUND)
    assert estimated.sizes.memory_bound
    made = sized_by_compiler(estimated, mesh(), tmp_path)
    footprint = made.sizes.footprint
    [kept] = tmp_path.rglob("working-memory.json")
    figure = msgspec.json.decode(kept.read_bytes(), type=WorkingMemory)
    assert footprint.activations == figure.with_margin

    [largest] = [key for key in made.keys if str(key) == figure.program]
    analysis = made.builder(mesh()).compile(largest).memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes <= footprint.activations, "for the pool it ended up with"
    left = int(BOUND * DEFAULT_MEM_FRACTION) - footprint.taken - _pool_bytes(made)
    assert 0 <= left < made.capacity.page_size * footprint.kv_per_token

    assert sized_by_compiler(_deploy(BOUND), mesh(), tmp_path) == made
    assert len(asked) == 1


def test_a_figure_that_can_not_be_read_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(temp_memory, "compiled_figure", lambda *_: WorkingMemory(1000, "mixed-64"))
    first = sized_by_compiler(_deploy(BOUND), mesh(), tmp_path)
    [kept] = tmp_path.rglob("working-memory.json")
    kept.write_text("{")
    assert sized_by_compiler(_deploy(BOUND), mesh(), tmp_path) == first
    assert kept.read_text() != "{"


def test_where_memory_has_no_say_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(temp_memory, "compiled_figure")
    for made in (_deploy(PLENTY), _deploy(BOUND, msgspec.structs.replace(CONFIG, max_total_tokens=1024))):
        assert not made.sizes.memory_bound
        assert sized_by_compiler(made, mesh(), None) is made


def test_programs_that_leave_nothing_are_refused() -> None:
    with pytest.raises(NoRoomError, match="activations"):
        resized(_deploy(BOUND), WorkingMemory(BOUND, "mixed-64"))
