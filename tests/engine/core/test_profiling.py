from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from jaxserve.api_types import ProfileInfo
from jaxserve.engine.core.loop import EngineLoop
from jaxserve.engine.core.profiling import Profiling
from jaxserve.engine.scheduling.scheduler import Scheduler
from jaxserve.errors import InvalidRequestError, RequestFailedError
from jaxserve.observability.timeline import Timeline
from tests.engine.conftest import make_capacity, make_request
from tests.engine.fake_executor import FakeExecutor
from tests.engine.fake_profiler import FakeProfiler


def _profiling(tmp_path: Path, fail: str = "") -> tuple[Profiling, FakeProfiler]:
    profiler = FakeProfiler(fail)
    return Profiling(profiler, str(tmp_path / "profiles")), profiler


def test_a_profile_has_a_folder_and_counts_its_steps(tmp_path: Path) -> None:
    profiling, profiler = _profiling(tmp_path)
    profiling.count_step()
    started = profiling.start(with_stack=True)
    assert started.num_steps == 0
    assert Path(started.directory).is_relative_to(tmp_path / "profiles")
    profiling.count_step()
    profiling.count_step()
    assert profiling.stop().result() == ProfileInfo(started.directory, 2)
    assert profiler.calls == [("start profiles", True), ("stop", False)]
    again = profiling.start()
    assert again.directory != started.directory
    profiling.close()


def test_a_profile_with_a_number_of_steps_ends_by_itself(tmp_path: Path) -> None:
    profiling, profiler = _profiling(tmp_path)
    folder = profiling.start("mine", num_steps=2).directory
    assert Path(folder).is_relative_to(tmp_path / "profiles" / "mine")
    profiler.go.clear()
    profiling.count_step()
    profiling.count_step()
    profiling.count_step()
    written = profiling.stop()
    assert not written.done()
    with pytest.raises(InvalidRequestError, match="still being written"):
        profiling.start()
    profiler.go.set()
    assert written.result() == ProfileInfo(folder, 2)
    with pytest.raises(InvalidRequestError, match=rf"no profile is running; the last: 2 steps, in {folder}"):
        profiling.stop()


def test_invalid_profile_requests_are_rejected(tmp_path: Path) -> None:
    for unable in (Profiling(), Profiling(FakeProfiler()), Profiling(None, str(tmp_path))):
        with pytest.raises(InvalidRequestError, match="--profile-dir"):
            unable.start()
    profiling, profiler = _profiling(tmp_path)
    with pytest.raises(InvalidRequestError, match="no profile is running; POST /start_profile"):
        profiling.stop()
    with pytest.raises(InvalidRequestError, match="at least 1, got 0"):
        profiling.start(num_steps=0)
    for outside in ("..", "/tmp", "a/../../b"):
        with pytest.raises(InvalidRequestError, match="not within the directory of profiles") as refused:
            profiling.start(outside)
        assert refused.value.param == "output_dir"
    assert profiler.calls == []
    profiling.start()
    with pytest.raises(InvalidRequestError, match=r"running already, in .*stop_profile"):
        profiling.start()


def test_a_failing_profiler_affects_nothing_else(tmp_path: Path) -> None:
    profiling, profiler = _profiling(tmp_path, fail="start")
    with pytest.raises(RequestFailedError, match="no profiler here"):
        profiling.start()
    profiler.fail = "stop"
    profiling.start()
    with pytest.raises(RequestFailedError, match="no space left"):
        profiling.stop().result()
    with pytest.raises(InvalidRequestError, match="no profile is running; POST"):
        profiling.stop()
    profiler.fail = ""
    profiling.start()
    profiling.close()
    assert profiler.calls[-1] == ("stop", False)


def test_the_loop_counts_steps_and_names_its_phases(tmp_path: Path) -> None:
    profiling, _ = _profiling(tmp_path)
    timeline, executor = Timeline(), FakeExecutor(make_capacity())
    scheduler = Scheduler(executor.capacity, chunked_prefill_size=32, max_prefill_tokens=32, max_num_batched_tokens=64)
    loop = EngineLoop(scheduler, executor, timeline=timeline, profiling=profiling)
    seen: list[str] = []

    def span(name: str) -> AbstractContextManager[None]:
        seen.append(name)
        return nullcontext()

    timeline.watch(span)
    profiling.start()
    loop.add(make_request("a", max_tokens=2))
    while loop.has_work:
        loop.step()
    assert seen == ["plan", "plan", "commit", "plan", "commit"]
    assert profiling.stop().result().num_steps == 2
    timeline.unwatch()
    loop.add(make_request("b", max_tokens=1))
    loop.step()
    assert len(seen) == 5
