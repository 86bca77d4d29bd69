"""The engine with dummy weights: start-up times, decode steps, and offline throughput."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from device_sections.models import AWQ, FP8, write_model
from device_sections.prediction import limits, step_seconds
from device_sections.run import SectionRun
from jaxserve.api_types import EngineRequest, SamplingParams
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.client import InProcessEngine
from jaxserve.runtime.devices.device import facts_of_device
from jaxserve.runtime.sizing.deployment import Deployment, deploy, read_model

# (prompt tokens, output tokens, requests), the most telling first; likewise (rows, tokens of each) of decode steps.
_WORKLOADS = ((1000, 1000, 512), (128, 128, 1024), (2048, 128, 512))
_FIRST_STEP, *_STEPS = (128, 1024), (1, 1024), (32, 1024), (256, 1024), (64, 4096), (128, 4096)
_LEAST_SECONDS = 10
# Output tokens a second of TensorRT-LLM, from its performance overviews, by device, model and workload.
_TENSORRT_LLM = {
    ("H100", "Llama-3.1-8B fp8"): {(128, 128): 28312, (1000, 1000): 15220, (2048, 128): 3450},
    ("H200", "Llama-3.1-8B fp8"): {(128, 128): 27911, (1000, 1000): 17744, (2048, 128): 3538},
    ("H100", "gpt-oss-20b"): {(1000, 1000): 11557},
    ("H200", "gpt-oss-20b"): {(1000, 1000): 13858},
}


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
    _model(run, "Llama-3.1-8B", AWQ)


def llama_3_1_8b_fp8(run: SectionRun) -> None:
    """Measure Llama-3.1-8B's shape in fp8, with a scale for each token of the inputs, and with an fp8 KV cache."""
    _model(run, "Llama-3.1-8B", FP8, kv_cache_dtype="auto" if run.device.platform == "cpu" else "fp8_e4m3")


def gpt_oss_20b(run: SectionRun) -> None:
    """Measure gpt-oss-20b's shape, with experts in MXFP4."""
    _model(run, "gpt-oss-20b")


def gemma_3_4b(run: SectionRun) -> None:
    """Measure Gemma-3-4B's shape, which has two KV groups and heads of 256."""
    _model(run, "Gemma-3-4B")


def _model(run: SectionRun, name: str, quantization: dict[str, Any] | None = None, **options: Any) -> None:
    """Measure a decode step, the first workload, then other steps and workloads while there is time."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(name, run.tiny, Path(folder), quantization)
        settings: dict[str, Any] = {"model": model, "load_format": "dummy", **options}
        settings |= {"disable_radix_cache": True, "program_cache_dir": str(run.cache)}
        if run.tiny:
            settings |= {"max_running_requests": 4, "cuda_graph_bs": (4,), "max_total_tokens": 1024,
                         "chunked_prefill_size": 32}  # fmt: skip
        else:
            settings |= {"max_running_requests": 512, "cuda_graph_bs": (1, 32, 128, 256, 384, 512),
                         "chunked_prefill_size": 8192}  # fmt: skip
        config = EngineConfig(**settings)
        engine = InProcessEngine.start(config)
        if quantization is not None:
            name = f"{name} {quantization['quant_method']}"
        try:
            for phase, seconds in engine.info.startup_seconds.items():
                run.row(f"{name} start: {phase}", seconds, "s", note=f"attention: {engine.info.attention_backend}")
            made = deploy(config, read_model(config.model), facts_of_device(run.device))
            steps, workloads = (_STEPS, _WORKLOADS) if not run.tiny else (((1, 32),), ((16, 8, 4),))
            _decode_step(run, engine, name, *((2, 32) if run.tiny else _FIRST_STEP), made)
            _throughput(run, engine, name, *workloads[0], made)
            _peak_memory(run, name)
            for batch, context in steps:
                if run.left > _LEAST_SECONDS and batch * (context + 64) <= engine.info.num_pages * config.page_size:
                    _decode_step(run, engine, name, batch, context, made)
            for workload in workloads[1:]:
                if run.left > _LEAST_SECONDS:
                    _throughput(run, engine, name, *workload, made)
        finally:
            engine.close()


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
    """Return output tokens per second if prompts run at the roofline and all slots decode at the predicted speed."""
    batch = min(count, made.capacity.num_slots)
    step = step_seconds(run, made, decodes=batch, context=prompt + output // 2)
    limit = limits(run, made)
    rate = None if limit is None else limit.prefill_tokens_per_second(prompt)
    if step is None or rate is None:
        return None
    return output / (prompt / rate + output * step / batch)
