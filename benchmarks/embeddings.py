"""Times the embeddings of a decoder on this CPU, SmolLM2-135M in bfloat16, and chats beside a stream of them.

- 256 texts of 128 tokens: by `LLM.embed`, by one HTTP request, and with `--reference`, a Python that has torch and
  transformers, by the model of transformers with the same weights. All take turns.
- Chats of 8 clients, each alone and beside four clients that embed two such texts over and over: the time per output
  token, and how many tokens are embedded meanwhile.

    python benchmarks/embeddings.py --reference /tmp/hf/bin/python --rounds 5
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxserve import LLM
from jaxserve.bench.processes.server_process import serving
from jaxserve.cli.common.table import format_table
from jaxserve.model_source import read_config, resolve
from jaxserve.text.tokenizers.save import save_tokenizer
from jaxserve.weights.open import open_source

REPOSITORY = Path(__file__).parents[1]
TEXTS, TOKENS = 256, 128
BATCHES = (8, 32)
CHATS, CHAT_TOKENS, EMBEDDERS, EMBEDDED = 8, 128, 4, 2


def write_checkpoint(folder: Path) -> None:
    """Write SmolLM2 with its weights in bfloat16, as a folder that both sides read."""
    source = resolve("smollm2-135m-instruct")
    opened, tensors = open_source(source), {}
    for name, info in opened.infos.items():
        wide = np.empty(info.shape, np.float32)
        opened.read(name, tuple(slice(0, size) for size in info.shape), wide)
        tensors[name] = wide.astype(ml_dtypes.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(read_config(source)))
    save_tokenizer(source, folder)


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Return texts of random ids, so that none has a prefix of another."""
    return [[rng.randrange(40_000) for _ in range(TOKENS)] for _ in range(count)]


@contextlib.contextmanager
def reference(python: str, folder: Path, batch: int) -> Iterator[Callable[[], float]]:
    """Start the model of transformers; yield what returns the seconds of all texts."""
    command = [python, str(Path(__file__).with_name("embeddings_reference.py")), folder, TEXTS, TOKENS, batch]
    with subprocess.Popen([*map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"

        def run() -> float:
            print("go", file=process.stdin, flush=True)
            return float(process.stdout.readline())  # type: ignore[union-attr]

        yield run
        process.stdin.close()


def time_texts(folder: Path, python: str | None, rounds: int, logs: Path) -> dict[str, list[float]]:
    """Return the tokens per second of each way to embed, by round."""
    rng = random.Random(0)
    flags = ["--model", str(folder), "--runner", "pooling", "--max-body-bytes", str(2**26)]
    with contextlib.ExitStack() as stack:
        ways: dict[str, Callable[[], float]] = {}
        for batch in BATCHES if python else ():
            assert python is not None
            ways[f"transformers, batches of {batch}"] = stack.enter_context(reference(python, folder, batch))
        llm = LLM(model=str(folder), runner="pooling")
        url = stack.enter_context(serving(flags, logs / "pooling.log", timeout=300)).url
        client = stack.enter_context(httpx.Client(timeout=300))

        def offline() -> float:
            texts = prompts(rng, TEXTS)
            start = time.perf_counter()
            llm.embed(texts, use_tqdm=False)
            return time.perf_counter() - start

        def over_http() -> float:
            body = {"input": prompts(rng, TEXTS), "encoding_format": "base64"}
            start = time.perf_counter()
            client.post(f"{url}/v1/embeddings", json=body).raise_for_status()
            return time.perf_counter() - start

        ways |= {"LLM.embed": offline, "/v1/embeddings": over_http}
        found: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds + 1):
            for name, run in ways.items():
                seconds = run()
                if number:  # the first round warms up
                    found[name].append(TEXTS * TOKENS / seconds)
        return found


async def _chat(client: httpx.AsyncClient, url: str, rng: random.Random) -> float:
    """Return the seconds per output token after the first one."""
    body = {
        "prompt": prompts(rng, 1)[0][:64], "max_tokens": CHAT_TOKENS, "ignore_eos": True, "stream": True,
        "temperature": 0,
    }  # fmt: skip
    times = []
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith('data: {"id'):
                times.append(time.perf_counter())
    return (times[-1] - times[0]) / (CHAT_TOKENS - 1)


async def time_chats(url: str, *, beside: bool, rng: random.Random, waves: int) -> tuple[list[float], float]:
    """Return the seconds per output token of each chat, and the tokens embedded per second beside them."""
    done, start = 0, time.perf_counter()

    async def embed() -> None:
        nonlocal done
        while True:
            body = {"input": prompts(rng, EMBEDDED), "encoding_format": "base64"}
            (await client.post(f"{url}/v1/embeddings", json=body)).raise_for_status()
            done += EMBEDDED * TOKENS

    async with httpx.AsyncClient(timeout=600) as client:
        streams = [asyncio.create_task(embed()) for _ in range(EMBEDDERS if beside else 0)]
        found = []
        for _ in range(waves):
            found += await asyncio.gather(*(_chat(client, url, rng) for _ in range(CHATS)))
        rate = done / (time.perf_counter() - start)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return found, rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", help="a Python that has torch and transformers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--waves", type=int, default=2, help="chats of each client in a round")
    parser.add_argument("--only", choices=("texts", "chats"))
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks/results/cpu/embeddings.json")
    args = parser.parse_args()
    result: dict[str, Any] = {"texts": TEXTS, "tokens": TOKENS, "rounds": args.rounds}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "smollm2-bf16"
        folder.mkdir()
        write_checkpoint(folder)
        if args.only != "chats":
            rates = time_texts(folder, args.reference, args.rounds, Path(name))
            result["tokens_per_second"] = {way: [round(rate) for rate in found] for way, found in rates.items()}
            rows = [[way, f"{statistics.median(found):.0f}"] for way, found in rates.items()]
            print(format_table(["256 texts of 128 tokens", "tokens/s"], rows))
        if args.only != "texts":
            flags = ["--model", str(folder), "--runner", "generate", "--convert", "embed"]
            with serving(flags, Path(name) / "both.log", timeout=600) as server:
                rng, times, embedded = random.Random(0), {False: list[float](), True: list[float]()}, []
                for number in range(args.rounds + 1):
                    for beside in (False, True):
                        found, rate = asyncio.run(time_chats(server.url, beside=beside, rng=rng, waves=args.waves))
                        if number:
                            times[beside].append(statistics.median(found) * 1000)
                            embedded += [rate] if beside else []
            alone, beside_them = (statistics.median(times[beside]) for beside in (False, True))
            result["chats"] = {
                "clients": CHATS,
                "ms_per_token_alone": [round(each, 2) for each in times[False]],
                "ms_per_token_beside_embeddings": [round(each, 2) for each in times[True]],
                "ratio": round(beside_them / alone, 3),
                "embedded_tokens_per_second": [round(rate) for rate in embedded],
            }
            rows = [
                ["alone", f"{alone:.1f}", ""],
                ["beside embeddings", f"{beside_them:.1f}", f"{statistics.median(embedded):.0f}"],
            ]
            print(format_table(["8 chats", "ms per token", "embedded tokens/s"], rows))
            print(f"ratio {beside_them / alone:.3f}")
    args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
