"""Hugging Face transformers' continuous batching on the same machine and shape, if torch is installed."""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import numpy as np

from device_sections.models import config_of
from device_sections.run import SectionRun


def transformers(run: SectionRun) -> None:
    """Measure Llama-3.2-1B's shape in bfloat16, 128 tokens in and 128 out."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        run.row("transformers", 0, "", note="torch or transformers is not installed: nothing to compare with")
        return
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    if not torch.cuda.is_available():
        run.row("transformers", 0, "", note="torch finds no GPU: nothing to compare with")
        return
    raw = config_of("Llama-3.2-1B", run.tiny)
    config: Any = LlamaConfig(**{name: value for name, value in raw.items() if name != "architectures"})
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model: Any = LlamaForCausalLM(config).eval()
    count, length = (4, 8) if run.tiny else (256, 128)
    ids = np.random.default_rng(0).integers(0, raw["vocab_size"], (count, length)).tolist()
    settings = GenerationConfig(max_new_tokens=length, do_sample=False, eos_token_id=-1, use_cache=True)
    model.generate_batch(inputs=ids[:4], generation_config=settings)
    start = time.perf_counter()
    outputs = model.generate_batch(inputs=ids, generation_config=settings)
    seconds = time.perf_counter() - start
    tokens = sum(len(output.generated_tokens) for output in outputs.values())
    run.row("transformers Llama-3.2-1B offline 128/128: output", tokens / seconds, "tok/s", note=f"{count} requests")
