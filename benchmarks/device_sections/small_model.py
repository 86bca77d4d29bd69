"""Small models on the device, whole: by the kernels that serve, and by plain XLA in their place."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from device_sections.models import AWQ, FP8, write_model
from device_sections.run import SectionRun
from jaxserve.api_types import EngineRequest, SamplingParams
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.client import InProcessEngine

# The tolerance of log probabilities in bfloat16, where logits near 1 are rounded by 2^-8 in every layer, and where
# inputs of products are rounded to fp8. Another context changes log probabilities by 1 to 3.
_TOLERANCE, _FP8_TOLERANCE = 0.1, 0.5
_PROMPTS = (5, 70, 200)
_OUTPUT = 24
_MODELS: dict[str, tuple[str, dict[str, Any] | None, str]] = {
    "dense": ("Llama small", None, "auto"),
    "dense in fp8": ("Llama small", FP8, "fp8_e4m3"),
    "dense in int4": ("Llama small", AWQ, "auto"),
    "mixture in MXFP4": ("gpt-oss small", None, "auto"),
}


def check(run: SectionRun) -> None:
    """Compare the log probabilities of prompts, and of tokens that decode steps choose, with reference attention's.

    Each output is scored again as the prompt of another request: decode steps and prefill must agree.
    """
    checks = {name: functools.partial(_fault, run, *model) for name, model in _MODELS.items()}
    run.compare("small models", checks, 0)


def _fault(run: SectionRun, model: str, quantization: dict[str, Any] | None, kv_dtype: Any) -> str | None:
    tolerance = _FP8_TOLERANCE if quantization is FP8 else _TOLERANCE
    kv_dtype = "auto" if run.device.platform == "cpu" else kv_dtype
    prompts = [np.random.default_rng(length).integers(0, 256, length).tolist() for length in _PROMPTS]
    served = _Model(run, model, quantization, kv_dtype, "auto")
    outputs, chosen = served.generate(prompts)
    whole = [[*prompt, *output] for prompt, output in zip(prompts, outputs)]
    again = served.score(whole)
    served.close()
    plain = _Model(run, model, quantization, kv_dtype, "reference")
    expected = plain.score(whole)
    plain.close()
    apart = max(float(np.abs(np.subtract(a, b)).max()) for a, b in zip(again, expected))
    if not apart < tolerance:
        return f"log probabilities of prompts are {apart:.3f} apart from reference attention's"
    decoded = [scores[-_OUTPUT:] for scores in expected]
    apart = max(float(np.abs(np.subtract(a, b)).max()) for a, b in zip(chosen, decoded))
    return None if apart < tolerance else f"log probabilities of decode steps are {apart:.3f} apart from a prompt's"


class _Model:
    """An engine with dummy weights."""

    def __init__(
        self, run: SectionRun, model: str, quantization: dict[str, Any] | None, kv_dtype: Any, attention: Any
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        path = write_model(model, run.tiny, Path(self._folder.name), quantization)
        self._engine = InProcessEngine.start(
            EngineConfig(
                model=path,
                load_format="dummy",
                attention_backend=attention,
                kv_cache_dtype=kv_dtype,
                max_running_requests=8,
                cuda_graph_bs=(8,),
                max_total_tokens=2048,
                context_length=512,
                chunked_prefill_size=256,
                mem_fraction_static=0.5,
                program_cache_dir=str(run.cache),
            )
        )

    def close(self) -> None:
        self._engine.close()
        self._folder.cleanup()

    def generate(self, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
        """Return greedy tokens of all prompts at once, and their log probabilities."""
        events = self._run(prompts, SamplingParams(max_tokens=_OUTPUT, temperature=0.0, logprobs=0, ignore_eos=True))
        tokens = [[id for event in of for id in event.token_ids] for of in events]
        return tokens, [[one.logprob for event in of for one in event.logprobs or ()] for of in events]

    def score(self, prompts: list[list[int]]) -> list[list[float]]:
        """Return the log probabilities of all tokens but the first of each prompt."""
        events = self._run(prompts, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
        found = [[one for event in of for one in event.prompt_logprobs or ()] for of in events]
        return [[one.logprob for one in of if one is not None] for of in found]

    def _run(self, prompts: list[list[int]], sampling: SamplingParams) -> list[list[Any]]:
        events: dict[str, list[Any]] = {str(index): [] for index in range(len(prompts))}
        for name, prompt in zip(events, prompts):
            self._engine.submit(EngineRequest(request_id=name, prompt_ids=prompt, sampling=sampling))
        while self._engine.has_work:
            for event in self._engine.step():
                events[event.request_id].append(event)
        return list(events.values())
