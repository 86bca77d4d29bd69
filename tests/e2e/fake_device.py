"""A server whose device alone is fake: real processes, scheduler, HTTP and metrics, and a step that takes no time to
speak of. `python -m tests.e2e.fake_device serve FLAGS` is the server, `python -m tests.e2e.fake_device` its engine.

`--model` says how the device behaves: `slow` takes its time, `out-of-memory` fails at its 300th step, `compiling`
compiles once while it serves.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from jaxserve.api_types import EngineInfo
from jaxserve.cli import serve as command
from jaxserve.cli.common import flags
from jaxserve.config.schema import EngineConfig
from jaxserve.config.server_schema import ServerConfig
from jaxserve.engine.core.loop import EngineLoop
from jaxserve.engine.process.main import run
from jaxserve.engine.scheduling.admission import QueueLimits
from jaxserve.engine.scheduling.priorities import Priorities
from jaxserve.engine.scheduling.scheduler import Scheduler
from jaxserve.model_source.pooling import ModelTask, PooledTask, Pooling
from jaxserve.observability import log
from jaxserve.server.loading import EngineSource
from jaxserve.server.serve import serve
from jaxserve.server.server_state import LoadedModel
from jaxserve.step_plan import Capacity, StepPlan
from jaxserve.text.answers.formats import choose_formats
from jaxserve.text.grammars.checking import GrammarChecker
from tests.engine.fake_executor import FakeExecutor
from tests.server.tiny import TEMPLATE, VOCAB_SIZE, TinyTemplate, tiny_tokenizer

# A device as fast as this still lets requests queue up behind it.
_STEP_SECONDS = {"slow": 0.03}
_USUAL_STEP_SECONDS = 0.002
_MEMORY = 80 * 2**30


class _Device(FakeExecutor):
    def __init__(self, capacity: Capacity, model: str) -> None:
        super().__init__(capacity)
        self._model = model
        self.compiles_after_ready = int(model == "compiling")
        self._num_steps = 0

    def dispatch(self, plan: StepPlan) -> Any:
        self._num_steps += 1
        if self._model == "out-of-memory" and self._num_steps == 300:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes")
        time.sleep(_STEP_SECONDS.get(self._model, _USUAL_STEP_SECONDS))
        self.plans.clear()
        return super().dispatch(plan)


def build_engine(config: EngineConfig) -> tuple[EngineLoop, EngineInfo]:
    """What `jaxserve.worker` does; every setting of the scheduler counts."""
    num_slots, max_model_len = config.max_running_requests or 32, config.context_length or 1024
    capacity = Capacity(
        num_slots=num_slots,
        num_pages=(config.pool_tokens or num_slots * max_model_len) // config.page_size,
        page_size=config.page_size,
        max_model_len=max_model_len,
        decode_buckets=config.cuda_graph_bs or tuple(range(1, num_slots + 1)),
        token_buckets=(64, 4096),
        prompt_logprob_tokens=num_slots + 8,
        fine_decode_rows=config.cuda_graph_max_bs or num_slots,
        pooled_size=1,
    )
    scheduler = Scheduler(
        capacity,
        chunked_prefill_size=4096,
        max_prefill_tokens=4096,
        max_num_batched_tokens=4096,
        policy=config.schedule_policy,
        priorities=Priorities.of(config),
        retraction_policy=config.retraction_policy,
        prefill_max_requests=config.prefill_max_requests,
        eviction_policy=config.radix_eviction_policy,
        conservativeness=config.schedule_conservativeness,
        limits=QueueLimits.of(config),
        record_cache_events=config.kv_events_config is not None,
    )
    info = EngineInfo(
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        page_size=config.page_size,
        num_pages=capacity.num_pages,
        max_running_requests=num_slots,
        chunked_prefill_size=4096,
        device="fake",
        dtype="float32",
        attention_backend="reference",
        num_programs=0,
        startup_seconds={},
        schedule_policy=config.schedule_policy,
        uses_priorities=config.uses_priorities,
        free_bytes=int(_MEMORY * (1 - (config.mem_fraction_static or 0.9))),
        working_bytes=2**30,
        memory_bound=config.pool_tokens is None,
    )
    return EngineLoop(scheduler, _Device(capacity, config.model), overlap=True), info


async def load(engine_config: EngineConfig, server_config: ServerConfig, source: EngineSource) -> LoadedModel:
    """A tokenizer of bytes, and the engine process."""
    tokenizer = tiny_tokenizer()
    engine = await source.start_engine()
    task = ModelTask(pooled=PooledTask(kind="embed", pooling=Pooling("last"), size=1, normalize=False))
    template, grammars = TinyTemplate(tokenizer), GrammarChecker(tokenizer)
    return LoadedModel(engine, tokenizer, template, TEMPLATE, grammars, choose_formats(TEMPLATE), task)


if __name__ == "__main__":
    if sys.argv[1:2] != ["serve"]:
        sys.exit(run(build_engine))
    settings = flags.config_from_arguments(command.parser().parse(sys.argv[2:]))
    log.setup(settings.engine.log_level, config_file=settings.engine.log_config_file)
    sys.exit(serve(settings.engine, settings.server, load=load, engine_module="tests.e2e.fake_device"))
