"""The engine with dummy weights: start-up times, decode steps, and offline throughput."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from device_sections.models import write_model
from device_sections.prediction import limits, step_seconds
from device_sections.run import SectionRun
from jaxserve.api_types import EngineRequest, SamplingParams
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.client import InProcessEngine
from jaxserve.runtime.devices.device import facts_of_device
from jaxserve.runtime.sizing.deployment import Deployment, deploy, read_model

# (prompt tokens, output tokens, requests)
_WORKLOADS = ((128, 128, 1024), (1000, 1000, 512), (2048, 128, 512))
_STEPS = ((128, 1024), (1, 1024), (32, 1024), (64, 1024), (256, 1024), (64, 4096), (128, 4096))


def qwen3_0_6b(run: SectionRun) -> None:
    """Measure Qwen3-0.6B's shape."""
    _model(run, "Qwen3-0.6B")


def llama_3_2_1b(run: SectionRun) -> None:
    """Measure Llama-3.2-1B's shape."""
    _model(run, "Llama-3.2-1B")


def llama_3_1_8b(run: SectionRun) -> None:
    """Measure Llama-3.1-8B's shape."""
    _model(run, "Llama-3.1-8B")


def llama_3_1_8b_int4(run: SectionRun) -> None:
    """Measure Llama-3.1-8B's shape in W4A16, as an AWQ checkpoint has it."""
    _model(run, "Llama-3.1-8B", {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True})


def llama_3_1_8b_fp8(run: SectionRun) -> None:
    """Measure Llama-3.1-8B's shape in fp8, with a scale for each token of the inputs."""
    _model(run, "Llama-3.1-8B", {"quant_method": "fp8", "activation_scheme": "dynamic"})


def gemma_3_4b(run: SectionRun) -> None:
    """Measure Gemma-3-4B's shape, which has two KV groups and heads of 256."""
    _model(run, "Gemma-3-4B")


def _model(run: SectionRun, name: str, quantization: dict[str, Any] | None = None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(name, run.tiny, Path(folder), quantization)
        settings: dict[str, Any] = {"model": model, "load_format": "dummy"}
        settings |= {"disable_radix_cache": True, "log_level": "warning", "program_cache_dir": str(run.cache)}
        if run.tiny:
            settings |= {"max_running_requests": 4, "cuda_graph_bs": (4,), "max_total_tokens": 1024,
                         "chunked_prefill_size": 32}  # fmt: skip
        else:
            settings |= {"max_running_requests": 256, "cuda_graph_bs": (1, 32, 64, 128, 256),
                         "chunked_prefill_size": 8192}  # fmt: skip
        config = EngineConfig(**settings)
        engine = InProcessEngine.start(config)
        if quantization is not None:
            name = f"{name} {quantization['quant_method']}"
        try:
            for phase, seconds in engine.info.startup_seconds.items():
                run.row(f"{name} start: {phase}", seconds, "s", note=f"attention: {engine.info.attention_backend}")
            made = deploy(config, read_model(config.model), facts_of_device(run.device))
            for batch, context in ((2, 32),) if run.tiny else _STEPS:
                if run.left > 15 and batch * (context + 64) <= engine.info.num_pages * engine.info.page_size:
                    _decode_step(run, engine, name, batch, context, made)
            for prompt, output, count in ((16, 8, 4),) if run.tiny else _WORKLOADS:
                if run.left > 15:
                    _throughput(run, engine, name, prompt, output, count, made)
        finally:
            engine.close()


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
    names = _requests(engine, count, prompt, output)
    tokens, start = 0, time.perf_counter()
    while engine.has_work and run.left > 5:
        tokens += sum(len(event.token_ids) for event in engine.step())
    seconds = time.perf_counter() - start
    note = "" if not engine.has_work else f"stopped after {seconds:.0f} s"
    engine.abort(names)
    while engine.has_work:
        engine.step()
    predicted = _predicted_throughput(run, made, prompt, output, count)
    run.row(f"{name} offline {prompt}/{output}: output", tokens / seconds, "tok/s", predicted=predicted, note=note)


def _predicted_throughput(run: SectionRun, made: Deployment, prompt: int, output: int, count: int) -> float | None:
    """Return output tokens per second if prompts run at the roofline and all slots decode at the predicted speed."""
    batch = min(count, made.capacity.num_slots)
    step = step_seconds(run, made, decodes=batch, context=prompt + output // 2)
    limit = limits(run, made)
    rate = None if limit is None else limit.prefill_tokens_per_second(prompt)
    if step is None or rate is None:
        return None
    return output / (prompt / rate + output * step / batch)
