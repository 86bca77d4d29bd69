"""An engine process with the fake executor. `config.model` selects its behaviour; see `build_engine`."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from jaxserve.api_types import EngineInfo
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.core.loop import EngineLoop
from jaxserve.engine.core.profiling import Profiling
from jaxserve.engine.process.main import run
from jaxserve.engine.scheduling.admission import QueueLimits
from jaxserve.engine.scheduling.scheduler import Scheduler
from jaxserve.errors import ConfigError, ModelNotFoundError
from jaxserve.step_plan import Capacity, StepPlan, StepResult
from tests.engine.fake_executor import VOCAB, FakeExecutor
from tests.engine.fake_profiler import FakeProfiler


class _Stuck(FakeExecutor):
    """Never returns a result."""

    def collect(self, handle: object) -> StepResult:
        print("stuck", file=sys.stderr, flush=True)
        threading.Event().wait()
        return super().collect(handle)


class _Broken(FakeExecutor):
    """Fails at the third step."""

    def dispatch(self, plan: StepPlan) -> Any:
        if len(self.plans) == 2:
            raise RuntimeError("the device is on fire")
        return super().dispatch(plan)


class _NoRoomError(ConfigError):
    """A subclass of `ConfigError`, as `runtime/` has one."""


def build_engine(config: EngineConfig) -> tuple[EngineLoop, EngineInfo]:
    """Build an engine as `jaxserve.worker` does, with the fake executor that `config.model` names."""
    match config.model:
        case "unfit":
            raise ConfigError("page_size is 3; make it a power of two")
        case "cramped":
            raise _NoRoomError("no memory is left")
        case "nowhere":
            raise ModelNotFoundError("there is no model called nowhere")
        case "buggy":
            raise RuntimeError("that was not foreseen")
        case "gone":
            os._exit(7)
    num_slots, max_model_len = config.max_running_requests or 8, config.context_length or 64
    capacity = Capacity(
        num_slots=num_slots,
        num_pages=(config.pool_tokens or num_slots * max_model_len) // config.page_size,
        page_size=config.page_size,
        max_model_len=max_model_len,
        decode_buckets=(num_slots,),
        token_buckets=(64,),
        prompt_logprob_tokens=num_slots + 8,
        pooled_size=1,
    )
    scheduler = Scheduler(
        capacity,
        chunked_prefill_size=32,
        max_prefill_tokens=32,
        max_num_batched_tokens=64,
        limits=QueueLimits.of(config),
        record_cache_events=config.kv_events_config is not None,
        random_seed=config.random_seed,
    )
    executor = {"stuck": _Stuck, "broken": _Broken}.get(config.model, FakeExecutor)(capacity)
    info = EngineInfo(
        max_model_len=max_model_len,
        vocab_size=VOCAB,
        page_size=config.page_size,
        num_pages=capacity.num_pages,
        max_running_requests=num_slots,
        chunked_prefill_size=32,
        device="fake",
        dtype="float32",
        attention_backend="reference",
        num_programs=0,
        startup_seconds={"build": 0.0},
    )
    profiling = Profiling(FakeProfiler(), config.profile_dir)
    return EngineLoop(scheduler, executor, overlap=not config.disable_overlap_schedule, profiling=profiling), info


if __name__ == "__main__":
    sys.exit(run(build_engine))
