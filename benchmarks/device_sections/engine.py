"""The engine with dummy weights: start-up times, decode steps, and offline throughput."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from device_sections.models import AWQ, FP8, write_model
from device_sections.prediction import limits, step_seconds
from device_sections.run import SectionRun
from jaxserve.api_types import EngineRequest, SamplingParams
from jaxserve.cli.common.table import format_table
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.client import InProcessEngine
from jaxserve.runtime.devices.device import facts_of_device
from jaxserve.runtime.sizing import aot
from jaxserve.runtime.sizing.deployment import Deployment, deploy, read_model
from jaxserve.runtime.step.program import ProgramKey

# (prompt tokens, output tokens, requests), the most telling first; likewise (rows, tokens of each) of decode steps.
_WORKLOADS = ((1000, 1000, 512), (128, 128, 1024), (2048, 128, 512))
_STEPS = (128, 1024), (1, 1024), (32, 1024), (256, 1024), (64, 4096), (128, 4096)
_LEAST_SECONDS = 10
# Output tokens a second of TensorRT-LLM, from its performance overviews, by device, model and workload.
_TENSORRT_LLM = {
    ("H100", "Llama-3.1-8B fp8"): {(128, 128): 28312, (1000, 1000): 15220, (2048, 128): 3450},
    ("H200", "Llama-3.1-8B fp8"): {(128, 128): 27911, (1000, 1000): 17744, (2048, 128): 3538},
    ("H100", "gpt-oss-20b"): {(1000, 1000): 11557},
    ("H200", "gpt-oss-20b"): {(1000, 1000): 13858},
}


@dataclasses.dataclass(frozen=True)
class EngineSection:
    """A section that measures the engine with a model's shape and dummy weights, quantized if it says how.

    `options` are settings of `EngineConfig` for this section only.
    """

    model: str
    quantization: dict[str, Any] | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the model in rows."""
        return f"{self.model} {self.quantization['quant_method']}" if self.quantization else self.model

    def config(self, folder: Path, tiny: bool) -> EngineConfig:
        """Write the model to a folder; return the settings of its engine."""
        sizes: dict[str, Any] = {"max_running_requests": 512, "cuda_graph_bs": (1, 32, 128, 256, 384, 512),
                                 "chunked_prefill_size": 8192, **self.options}  # fmt: skip
        if tiny:
            sizes = {"max_running_requests": 4, "cuda_graph_bs": (4,), "max_total_tokens": 1024,
                     "chunked_prefill_size": 32}  # fmt: skip
        model = write_model(self.model, tiny, folder, self.quantization)
        return EngineConfig(model=model, load_format="dummy", disable_radix_cache=True, **sizes)

    def __call__(self, run: SectionRun) -> None:
        """Measure a decode step, the first workload, then other steps and workloads while there is time."""
        with tempfile.TemporaryDirectory() as folder:
            config = self.config(Path(folder), run.tiny)
            config = msgspec.structs.replace(config, program_cache_dir=str(run.cache))
            # Before anything asks for the device: it decides how much of its memory XLA takes.
            engine = InProcessEngine.start(config)
            try:
                self._measure(run, engine, config)
            finally:
                engine.close()

    def _measure(self, run: SectionRun, engine: InProcessEngine, config: EngineConfig) -> None:
        for phase, seconds in engine.info.startup_seconds.items():
            run.row(f"{self.name} start: {phase}", seconds, "s", note=f"attention: {engine.info.attention_backend}")
        made = deploy(config, read_model(config), facts_of_device(run.device))
        step, *steps = ((2, 32), (1, 32)) if run.tiny else _STEPS
        workload, *workloads = ((16, 8, 4),) if run.tiny else _WORKLOADS
        _decode_step(run, engine, self.name, *step, made)
        _throughput(run, engine, self.name, *workload, made)
        _peak_memory(run, self.name)
        for batch, context in steps:
            if run.left > _LEAST_SECONDS and batch * (context + 64) <= engine.info.num_pages * config.page_size:
                _decode_step(run, engine, self.name, batch, context, made)
        for workload in workloads:
            if run.left > _LEAST_SECONDS:
                _throughput(run, engine, self.name, *workload, made)


llama_3_1_8b = EngineSection("Llama-3.1-8B")
# It has a scale for each token of the inputs, and an fp8 KV cache.
llama_3_1_8b_fp8 = EngineSection("Llama-3.1-8B", FP8, {"kv_cache_dtype": "fp8_e4m3"})
# It has few programs, because compiling takes most of its start.
gpt_oss_20b = EngineSection("gpt-oss-20b", options={"cuda_graph_bs": (8, 128, 512)})
llama_3_1_8b_int4 = EngineSection("Llama-3.1-8B", AWQ)
llama_3_2_1b = EngineSection("Llama-3.2-1B")
gemma_3_4b = EngineSection("Gemma-3-4B")
qwen3_0_6b = EngineSection("Qwen3-0.6B")


def compile_for(target: str) -> bool:
    """Compile the smallest and the largest program of each kind of every section's engine for a target that isn't
    here, print a table of them, and return whether all are good."""
    sections = {name: value for name, value in globals().items() if isinstance(value, EngineSection)}
    lines, good = [], True
    for name, section in sections.items():
        with tempfile.TemporaryDirectory() as folder:
            deployment = aot.deploy_on_target(section.config(Path(folder), tiny=False), target)
        [every], start = aot.program_parts(deployment, aot.meshes_for_target(deployment, target)), time.perf_counter()
        reports = list(aot.compile_programs([dataclasses.replace(every, keys=_extremes(every.keys))]))
        faults = [f"{report.name}: {report.fault}" for report in reports if report.fault]
        largest = max(reports, key=lambda report: report.temp_bytes)
        lines.append(
            (
                name,
                f"{len(reports) - len(faults)} of {len(reports)}",
                f"{time.perf_counter() - start:.0f}",
                f"{largest.temp_bytes / 2**20:,.0f} ({largest.name})",
                "; ".join(faults),
            )
        )
        good = good and not faults
    header = ("section", f"programs good for {target}", "seconds", "most temp MiB", "faults")
    print(format_table(header, lines, left=(0, 4)))
    return good


def _extremes(keys: Sequence[ProgramKey]) -> list[ProgramKey]:
    """Return the smallest and the largest program of each kind."""
    ascending = sorted((key for key in keys if key.size), key=lambda key: key.size)
    by_kind = [((key.kind, key.greedy), key) for key in ascending]
    return list({*dict(by_kind).values(), *dict(reversed(by_kind)).values()})


def _peak_memory(run: SectionRun, name: str) -> None:
    """Report the most memory that was in use, beside all that XLA may allocate."""
    stats = run.device.memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        limit = stats.get("bytes_limit", 0) / 2**30
        run.row(f"{name}: peak memory", stats["peak_bytes_in_use"] / 2**30, "GiB", note=f"of {limit:.1f} GiB")


def _requests(engine: InProcessEngine, count: int, prompt: int, output: int) -> list[str]:
    rng = np.random.default_rng(0)
    names = []
    for _ in range(count):
        names.append(f"bench-{time.monotonic_ns()}")
        engine.submit(
            EngineRequest(
                request_id=names[-1],
                prompt_ids=rng.integers(0, engine.info.vocab_size, prompt).tolist(),
                sampling=SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True),
            )
        )
    return names


def _decode_step(
    run: SectionRun, engine: InProcessEngine, name: str, batch: int, context: int, made: Deployment
) -> None:
    """Measure steps in which all rows decode: from the end of the last prefill to the end of the first request."""
    steps = 4 if run.tiny else 48
    names = _requests(engine, batch, context, steps + 16)
    started: set[str] = set()
    while len(started) < batch and run.left > 0:
        started |= {event.request_id for event in engine.step() if event.token_ids}
    # The requests prefilled first have already decoded some tokens.
    tokens, rounds, start = 0, 0, time.perf_counter()
    while rounds < steps and tokens < steps * batch and engine.has_work:
        tokens += sum(len(event.token_ids) for event in engine.step())
        rounds += 1
    seconds = (time.perf_counter() - start) * batch / max(tokens, 1)
    engine.abort(names)
    while engine.has_work:
        engine.step()
    limit = limits(run, made)
    reference = None if limit is None else 1 / limit.decode_seconds(batch, context)
    predicted = step_seconds(run, made, decodes=batch, context=context)
    # The ratio compares speeds: the roofline's time over the measured one.
    run.row(f"{name} decode {batch} x {context}: steps/s", 1 / seconds, "1/s", reference=reference,
            goal=0.75 if (batch, context) == (128, 1024) else None,
            predicted=None if predicted is None else 1 / predicted,
            note=f"{seconds * 1e3:.2f} ms a step, {batch / seconds:,.0f} tok/s")  # fmt: skip


def _throughput(
    run: SectionRun, engine: InProcessEngine, name: str, prompt: int, output: int, count: int, made: Deployment
) -> None:
    """Measure all requests submitted at once; if time runs out, the output until then."""
    before = engine.stats().num_retractions
    names = _requests(engine, count, prompt, output)
    tokens, start = 0, time.perf_counter()
    while engine.has_work and run.left > 5:
        tokens += sum(len(event.token_ids) for event in engine.step())
    seconds = time.perf_counter() - start
    note = f"{count} requests" + (f", stopped after {seconds:.0f} s" if engine.has_work else "")
    engine.abort(names)
    while engine.has_work:
        engine.step()
    note += f", {engine.stats().num_retractions - before} retractions"
    known = (found for (device, of), found in _TENSORRT_LLM.items() if device in run.device.device_kind and of == name)
    run.row(f"{name} offline {prompt}/{output}: output", tokens / seconds, "tok/s",
            reference=next(known, {}).get((prompt, output)),
            predicted=_predicted_throughput(run, made, prompt, output, count), note=note)  # fmt: skip


def _predicted_throughput(run: SectionRun, made: Deployment, prompt: int, output: int, count: int) -> float | None:
    """Return output tokens per second if prompts run at the roofline and as many requests as the pool holds, at half
    of their output, decode at the predicted speed."""
    context = prompt + output // 2
    batch = min(count, made.capacity.num_slots, made.capacity.num_pages * made.capacity.page_size // context)
    step = step_seconds(run, made, decodes=batch, context=context)
    limit = limits(run, made)
    rate = None if limit is None else limit.prefill_tokens_per_second(prompt)
    if step is None or rate is None:
        return None
    return output / (prompt / rate + output * step / batch)
