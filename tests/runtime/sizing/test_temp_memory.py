"""If memory bounds the pool, the pool is sized by the compiler's figure, which is measured once and kept."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from jaxserve.config.schema import DEFAULT_MEM_FRACTION, EngineConfig
from jaxserve.runtime.devices.device import DeviceFacts, facts_of_target
from jaxserve.runtime.sizing import temp_memory
from jaxserve.runtime.sizing.deployment import Deployment, deploy
from jaxserve.runtime.sizing.memory import InsufficientMemoryError
from jaxserve.runtime.sizing.temp_memory import TempMemory, largest_programs, size_pool_by_compiler, with_temp_memory
from pallas_kernels.paged_attention import KernelTarget
from tests.runtime.tiny import mesh, model

CONFIG = EngineConfig(dtype="float32", max_running_requests=64, chunked_prefill_size=64, cuda_graph_bs=(64,))
PLENTY = 2**30


def _deploy(memory_bytes: int, config: EngineConfig = CONFIG) -> Deployment:
    return deploy(config, model(), DeviceFacts(KernelTarget("cpu"), memory_bytes))


def _pool_bytes(made: Deployment) -> int:
    return made.sizes.pool_bytes


def _bound() -> int:
    """Return a memory size with which the pool is three quarters as large as it could be, by the estimate."""
    made = _deploy(PLENTY)
    return int((made.sizes.footprint.non_pool + _pool_bytes(made) * 3 // 4) / DEFAULT_MEM_FRACTION)


BOUND = _bound()


@pytest.mark.grid
def test_the_pool_takes_the_memory_that_programs_leave_and_the_figure_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    compile_for_it = temp_memory.measure_temp_memory
    monkeypatch.setattr(temp_memory, "measure_temp_memory", lambda *args: asked.append(1) or compile_for_it(*args))
    estimated = _deploy(BOUND)
    assert estimated.sizes.memory_bound
    made = size_pool_by_compiler(estimated, {0: mesh()}, tmp_path)
    footprint = made.sizes.footprint
    [kept] = tmp_path.rglob("working-memory.json")
    figure = msgspec.json.decode(kept.read_bytes(), type=TempMemory)
    assert footprint.activations == figure.with_margin

    [largest] = [key for key in made.program_keys if str(key) == figure.program]
    analysis = made.builder(mesh()).compile(largest).memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes <= footprint.activations, "for the pool it ended up with"
    left = int(BOUND * DEFAULT_MEM_FRACTION) - footprint.non_pool - _pool_bytes(made)
    assert 0 <= left < made.capacity.page_size * footprint.kv_per_token[0]

    assert size_pool_by_compiler(_deploy(BOUND), {0: mesh()}, tmp_path) == made
    assert len(asked) == 1


@pytest.mark.parametrize(("target", "draws"), [("cpu", ["draw-1"]), ("nvidia-h200", [])])
def test_programs_that_draw_count_and_have_one_row_on_a_cpu_only(target: str, draws: list[str]) -> None:
    config = msgspec.structs.replace(CONFIG, max_running_requests=16, cuda_graph_bs=(4,), dtype="bfloat16")
    device = DeviceFacts(KernelTarget("cpu"), PLENTY) if target == "cpu" else facts_of_target(target)
    made = deploy(config, model(), device)
    names = [str(key) for key in made.program_keys if str(key).startswith("draw-")]
    assert names == [*draws, "draw-8", "draw-16"]
    largest = {str(key) for key in largest_programs(made)}
    assert {"draw-16", "decode-16-greedy", "decode-16-full", "mixed-64-full"} <= largest
    assert not {"draw-8", "decode-8-greedy", "update"} & largest


def test_an_unreadable_figure_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(temp_memory, "measure_temp_memory", lambda *_: TempMemory(1000, "mixed-64"))
    first = size_pool_by_compiler(_deploy(BOUND), {0: mesh()}, tmp_path)
    [kept] = tmp_path.rglob("working-memory.json")
    kept.write_text("{")
    assert size_pool_by_compiler(_deploy(BOUND), {0: mesh()}, tmp_path) == first
    assert kept.read_text() != "{"


def test_nothing_is_compiled_unless_memory_bounds_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(temp_memory, "measure_temp_memory")
    for made in (_deploy(PLENTY), _deploy(BOUND, msgspec.structs.replace(CONFIG, max_total_tokens=1024))):
        assert not made.sizes.memory_bound
        assert size_pool_by_compiler(made, {0: mesh()}, None) is made


def test_programs_that_leave_no_memory_are_refused() -> None:
    with pytest.raises(InsufficientMemoryError, match="activations"):
        with_temp_memory(_deploy(BOUND), TempMemory(BOUND, "mixed-64"))
