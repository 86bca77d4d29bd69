"""Measures text processing: loading the tokenizer, and detokenizing each token of a stream.

It uses the default model's tokenizer on natural text in many scripts and on random ids (invalid bytes, the worst case).
The cost of a token must not grow with the output, so the first and the last tenth of a long output are timed
separately.

    python benchmarks/text.py
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from jaxserve.api_types import EngineRequest, FinishReason, SamplingParams, TokenEvent
from jaxserve.cli.common.table import format_table
from jaxserve.config.schema import DEFAULT_MODEL
from jaxserve.model_source import read_config, resolve
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.output import OutputProcessor
from jaxserve.text.tokenizers.tokenizer import Tokenizer, load_tokenizer

REPOSITORY = Path(__file__).parents[1]
NATURAL = (
    "Hello world, it's 2024 — def f(x): return x**2\n你好，世界！こんにちは 안녕하세요 Привет, как дела? مرحبا שלום "
    "नमस्ते दुनिया สวัสดี Γειά σου 👩‍👩‍👧‍👦 🇩🇪 The quick brown fox jumps over the lazy dog. "
)
STOPS = {"no stop": (), "4 stops": ("\n\nUser:", "</answer>", "END OF TEXT", "Observation:")}
TOKENS = 20_000
ROUNDS = 5


def median(measure: Callable[[], float]) -> float:
    return statistics.median(measure() for _ in range(ROUNDS))


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def push_times(tokenizer: Tokenizer, ids: list[int], stops: tuple[str, ...]) -> list[float]:
    """Return the seconds per token over each tenth of the output, with one token per event as in a running server."""
    sampling = SamplingParams(max_tokens=TOKENS, stop=stops)
    processor = OutputProcessor(tokenizer, EngineRequest(request_id="r", prompt_ids=ids[:100], sampling=sampling))
    events = [TokenEvent("r", [token_id]) for token_id in ids]
    tenth = len(events) // 10
    times = []
    for part in range(10):
        start = time.perf_counter()
        for event in events[part * tenth : (part + 1) * tenth]:
            processor.push(event)
        times.append((time.perf_counter() - start) / tenth)
    processor.push(TokenEvent("r", [], finish_reason=FinishReason.LENGTH))
    return times


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default=str(REPOSITORY / "benchmarks/results/cpu/text.json"))
    arguments = parser.parse_args()
    source = resolve(DEFAULT_MODEL)
    tokenizer = load_tokenizer(source)
    imports = "import time; start = time.perf_counter(); import jaxserve.text.output, jaxserve.text.chat_template"
    timed_import = [sys.executable, "-c", f"{imports}; print(time.perf_counter() - start)"]
    prompt = (NATURAL * 40)[:4000]
    chat = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    messages = [{"role": role, "content": prompt[:200]} for _ in range(5) for role in ("user", "assistant")]
    rows = {
        "import text/ (ms)": 1e3 * median(lambda: float(subprocess.check_output(timed_import))),
        "read config of the GGUF file (ms)": 1e3 * median(lambda: seconds(lambda: read_config(source))),
        "load tokenizer of the GGUF file (ms)": 1e3 * median(lambda: seconds(lambda: load_tokenizer(source))),
        "encode 4,000 characters (ms)": 1e3 * median(lambda: seconds(lambda: tokenizer.encode(prompt))),
        "render 10 messages (µs)": 1e6 * median(lambda: seconds(lambda: chat.render(messages))),
    }
    natural = tokenizer.encode(NATURAL)
    rng = random.Random(0)
    streams = {
        "natural": (natural * (TOKENS // len(natural) + 1))[:TOKENS],
        "random ids": [rng.randrange(tokenizer.vocab_size) for _ in range(TOKENS)],
    }
    for kind, ids in streams.items():
        for name, stops in STOPS.items():
            rounds = [push_times(tokenizer, ids, stops) for _ in range(ROUNDS)]
            for part, label in ((0, "first"), (-1, "last")):
                rows[f"token, {kind}, {name}, {label} tenth of {TOKENS} (µs)"] = 1e6 * statistics.median(
                    times[part] for times in rounds
                )
    print(format_table(("", "median"), [(label, f"{value:.2f}") for label, value in rows.items()]))
    Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
    Path(arguments.output).write_text(json.dumps(rows, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
