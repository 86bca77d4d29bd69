"""Times all-MiniLM-L6-v2 on this CPU beside sentence-transformers with the same weights; all take turns.

- 256 texts of 128 tokens and 1,000 of 16, in float32 and in bfloat16: by `SentenceTransformer.encode`, by `LLM.embed`,
  and in bfloat16 by one HTTP request.
- One short text after the other over HTTP, and how soon a server is ready whose programs are kept on disk.
- The smallest cosine of any vector to the one of sentence-transformers in float32.

    python benchmarks/encoders.py --reference /tmp/hf/bin/python --rounds 5
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import random
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from jaxserve import LLM
from jaxserve.bench.processes.server_process import serving
from jaxserve.cli.common.table import format_table
from jaxserve.model_source import resolve

REPOSITORY = Path(__file__).parents[1]
MODEL = "all-minilm-l6-v2"
SETS = {"256 texts of 128 tokens": (256, 128), "1,000 texts of 16 tokens": (1000, 16)}
DTYPES = ("float32", "bfloat16")
SHORT_TEXTS = 300

Run = Callable[[str], tuple[float, np.ndarray]]
"""Embeds the texts of a set and returns the seconds, and the vectors."""


def make_texts(rng: random.Random) -> dict[str, list[str]]:
    """Return texts of words that are one token each."""
    vocabulary = json.loads((resolve(MODEL).path / "tokenizer.json").read_text())["model"]["vocab"]
    words = sorted(word for word in vocabulary if re.fullmatch("[a-z]{3,}", word))
    return {
        name: [" ".join(rng.choices(words, k=tokens - 2)) for _ in range(count)]
        for name, (count, tokens) in SETS.items()
    }


@contextlib.contextmanager
def reference(python: str, dtype: str, texts: Path, folder: Path) -> Iterator[Run]:
    """Start sentence-transformers in another Python."""
    vectors = folder / f"{dtype}.npy"
    script = str(Path(__file__).with_name("encoders_reference.py"))
    command = [python, script, str(resolve(MODEL).path), dtype, str(texts), str(vectors)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"

        def run(name: str) -> tuple[float, np.ndarray]:
            print(name, file=process.stdin, flush=True)
            seconds = float(process.stdout.readline())  # type: ignore[union-attr]
            return seconds, np.load(vectors)

        yield run
        process.stdin.close()


def offline(llm: LLM, texts: dict[str, list[str]]) -> Run:
    def run(name: str) -> tuple[float, np.ndarray]:
        start = time.perf_counter()
        found = llm.embed(texts[name], use_tqdm=False)
        return time.perf_counter() - start, np.array([one.outputs.embedding for one in found])

    return run


def over_http(client: httpx.Client, url: str, texts: dict[str, list[str]]) -> Run:
    def run(name: str) -> tuple[float, np.ndarray]:
        start = time.perf_counter()
        answer = client.post(f"{url}/v1/embeddings", json={"input": texts[name], "encoding_format": "base64"})
        seconds = time.perf_counter() - start
        rows = answer.raise_for_status().json()["data"]
        return seconds, np.array([np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in rows])

    return run


def time_short_texts(client: httpx.Client, url: str) -> list[float]:
    """Return the milliseconds of each request of one short text, in ascending order."""
    times = []
    for i in range(SHORT_TEXTS):
        start = time.perf_counter()
        client.post(f"{url}/v1/embeddings", json={"input": f"what is the capital of country {i}"}).raise_for_status()
        times.append((time.perf_counter() - start) * 1000)
    return sorted(times)


def least_cosine(found: np.ndarray, expected: np.ndarray) -> float:
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    return float(((found * expected).sum(axis=1) / lengths).min())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", required=True, help="a Python that has torch and sentence-transformers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks/results/cpu/encoders.json")
    args = parser.parse_args()
    texts = make_texts(random.Random(0))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "texts.json").write_text(json.dumps(texts))
        flags = ["--model", MODEL, "--max-body-bytes", str(2**26)]
        with serving(flags, folder / "first.log", timeout=300):
            pass  # its programs are kept
        ways: dict[str, Run] = {}
        for dtype in DTYPES:
            own = stack.enter_context(reference(args.reference, dtype, folder / "texts.json", folder))
            ways[f"sentence-transformers, {dtype}"] = own
            ways[f"LLM.embed, {dtype}"] = offline(stack.enter_context(LLM(model=MODEL, dtype=dtype)), texts)
        start = time.perf_counter()
        url = stack.enter_context(serving(flags, folder / "server.log", timeout=300)).url
        ready = time.perf_counter() - start
        client = stack.enter_context(httpx.Client(timeout=300))
        ways["/v1/embeddings, bfloat16"] = over_http(client, url, texts)
        rates: dict[str, dict[str, list[float]]] = {name: {way: [] for way in ways} for name in SETS}
        vectors: dict[tuple[str, str], np.ndarray] = {}
        short: list[float] = []
        for number in range(args.rounds + 1):
            for name, (count, tokens) in SETS.items():
                for way, run in ways.items():
                    seconds, vectors[name, way] = run(name)
                    if number:  # the first round warms up
                        rates[name][way].append(count * tokens / seconds)
            times = time_short_texts(client, url)
            if number:
                short.append(statistics.median(times))
    expected = "sentence-transformers, float32"
    cosines = {way: min(least_cosine(vectors[name, way], vectors[name, expected]) for name in SETS) for way in ways}
    rows = [
        [way, *(f"{statistics.median(rates[name][way]):,.0f}" for name in SETS), f"{cosines[way]:.7f}"] for way in ways
    ]
    print(format_table(["tokens/s", *SETS, "least cosine"], rows))
    print(f"one short text over HTTP: p50 {statistics.median(short):.1f} ms; ready, warm: {ready:.1f} s")
    result: dict[str, Any] = {
        "rounds": args.rounds,
        "tokens_per_second": {
            name: {way: [round(rate) for rate in found] for way, found in of_set.items()}
            for name, of_set in rates.items()
        },
        "least_cosine": {way: round(cosine, 8) for way, cosine in cosines.items()},
        "short_text_p50_ms": [round(one, 2) for one in short],
        "ready_seconds": round(ready, 2),
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
