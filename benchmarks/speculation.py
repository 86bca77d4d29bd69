"""Compares a server that speculates with one that doesn't: speed, acceptance, and whether the answers are the same.

Both servers run at once and take the same load in turn, in another order each round; `jaxserve bench serve` sends it,
and the prefix caches are emptied before each. Ratios are of medians over rounds. Prompts of the loads `editing` are
those of `editing_prompts.py`; `random` and `sampled` are random token ids, answered greedily and at temperature 1.

    python -m benchmarks.speculation --rounds 5
    python -m benchmarks.speculation --with-args "--speculative-method draft --speculative-model PATH"
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from benchmarks.editing_prompts import EditingPrompt, editing_prompts, write_prompts
from benchmarks.prompt_lookup import LookupFigures, simulate_lookup
from jaxserve.bench.processes.server_process import BENCH_SERVE, run_client, serving
from jaxserve.cli.common.table import format_records
from jaxserve.config.schema import DEFAULT_MODEL
from jaxserve.model_source import resolve
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tokenizers.tokenizer import load_tokenizer

OUTPUT = Path(__file__).parent / "results/cpu/speculation.json"
START_SECONDS, RUN_SECONDS = 600.0, 3600.0
RANDOM = ["--backend", "openai", "--dataset-name", "random-ids", "--random-input-len", "128", "--random-output-len",
          "128", "--ignore-eos"]  # fmt: skip
KINDS = {
    "editing": ["--backend", "openai-chat", "--dataset-name", "custom", "--disable-shuffle", "--temperature", "0"],
    "random": [*RANDOM, "--temperature", "0"],
    "sampled": [*RANDOM, "--temperature", "1", "--per-request-seed"],
}


@dataclasses.dataclass(frozen=True)
class SpeculationLoad:
    """`requests` requests of a kind, from `clients` clients."""

    kind: str
    clients: int
    requests: int


LOADS = {
    "editing 1": SpeculationLoad("editing", 1, 16),
    "editing 16": SpeculationLoad("editing", 16, 48),
    "random 1": SpeculationLoad("random", 1, 4),
    "random 16": SpeculationLoad("random", 16, 32),
    "sampled 1": SpeculationLoad("sampled", 1, 4),
    "sampled 16": SpeculationLoad("sampled", 16, 32),
}


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Counts of a server: the tokens it generated, its drafts, and the accepted tokens (see `EngineStats`)."""

    generated: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    by_position: tuple[int, ...] = ()

    @classmethod
    def read(cls, url: str) -> Acceptance:
        """Return the counts since the server's start, over its replicas; 0 where it has no such count."""
        replicas = [replica["stats"] for replica in httpx.get(f"{url}/server_info").json()["replicas"]]
        names = ("generation_tokens", "num_drafts", "draft_tokens", "accepted_tokens")
        generated, drafts, draft_tokens, accepted = (sum(stats.get(key, 0) for stats in replicas) for key in names)
        positions = zip(*(stats.get("accepted_by_position", ()) for stats in replicas))
        return cls(generated, drafts, draft_tokens, accepted, tuple(map(sum, positions)))

    def since(self, before: Acceptance) -> Acceptance:
        """Return the counts since an earlier reading."""
        return self._combine(before, lambda now, then: now - then)

    def plus(self, other: Acceptance) -> Acceptance:
        """Return the sum of both."""
        return self._combine(other, lambda a, b: a + b)

    def _combine(self, other: Acceptance, join: Callable[[int, int], int]) -> Acceptance:
        zeros = (0,) * max(len(self.by_position), len(other.by_position))
        positions = zip(self.by_position or zeros, other.by_position or zeros)
        return Acceptance(
            join(self.generated, other.generated),
            join(self.drafts, other.drafts),
            join(self.draft_tokens, other.draft_tokens),
            join(self.accepted, other.accepted),
            tuple(join(a, b) for a, b in positions),
        )


def predicted_speedup(acceptance: Acceptance, requests: int, decode: float, verify: float, draft: float) -> float:
    """Return how many times faster the tokens after the first should come with speculation, at one client.

    `decode`, `verify` and `draft` are times, in one unit: of a step without drafts, of a step that verifies drafts, and
    of making the drafts of such a step. A request's first token comes with its prompt, without a decode step.
    """
    tokens = acceptance.generated - requests
    plain = tokens - acceptance.drafts - acceptance.accepted
    return tokens * decode / (plain * decode + acceptance.drafts * (verify + draft))


def send(url: str, load: SpeculationLoad, prompts: Path, seed: int, folder: Path) -> dict[str, Any]:
    """Run `bench serve` once, without cached prompts, and return its JSON with the texts of the answers."""
    httpx.post(f"{url}/flush_cache", timeout=60).raise_for_status()
    result = folder / "result.json"
    command = [*BENCH_SERVE, "--base-url", url, *KINDS[load.kind], "--seed", str(seed)]
    command += ["--num-prompts", str(load.requests), "--max-concurrency", str(load.clients), "--disable-tqdm"]
    command += ["--dataset-path", str(prompts)] if load.kind == "editing" else []
    run_client(
        [*command, "--output-json", str(result), "--save-generated-texts"], folder / "client.log", timeout=RUN_SECONDS
    )
    measured: dict[str, Any] = json.loads(result.read_text())
    failed = [record["error"] for record in measured["records"] if record["status"] != "ok"]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed, the first with: {failed[0]}")
    return measured


def measure(urls: dict[str, str], name: str, load: SpeculationLoad, rounds: int, folder: Path) -> dict[str, Any]:
    """Load both servers in turn; return the figures of each round and the answers of the last one."""
    chosen = chosen_prompts(load)
    prompts = folder / "prompts.jsonl"
    write_prompts(prompts, chosen)
    samples: dict[str, list[dict[str, float]]] = {server: [] for server in urls}
    acceptance, different = Acceptance(), 0
    for server, url in urls.items():
        send(url, dataclasses.replace(load, requests=max(load.clients, 4)), prompts, rounds, folder)
        print(f"warmed up {server}, {name}", file=sys.stderr)
    for round_ in range(rounds):
        answers: dict[str, list[str]] = {}
        for server in list(urls)[:: -1 if round_ % 2 else 1]:
            before = Acceptance.read(urls[server])
            measured = send(urls[server], load, prompts, round_, folder)
            acceptance = (
                acceptance.plus(Acceptance.read(urls[server]).since(before)) if server == "with" else acceptance
            )
            answers[server] = measured["generated_texts"]
            figures = {"tok_s": measured["output_throughput"], "tpot_ms": measured["mean_tpot_ms"]}
            samples[server].append(figures)
            print(f"round {round_} {server}, {name}: {figures}", file=sys.stderr)
        different += sum(a != b for a, b in zip(answers["with"], answers["without"], strict=True))
    medians = {
        server: {key: statistics.median(figures[key] for figures in runs) for key in runs[0]}
        for server, runs in samples.items()
    }
    return {
        "load": dataclasses.asdict(load),
        "samples": samples,
        "medians": medians,
        "ratio": medians["with"]["tok_s"] / medians["without"]["tok_s"],
        "tpot_ratio": medians["without"]["tpot_ms"] / medians["with"]["tpot_ms"],
        "acceptance": dataclasses.asdict(acceptance),
        "answers": rounds * load.requests,
        "different_answers": different,
        "simulated": simulated(chosen, answers["without"]) if load.kind == "editing" else None,
    }


def chosen_prompts(load: SpeculationLoad) -> list[EditingPrompt]:
    """Return as many editing prompts as the load has requests, some of each form."""
    prompts = editing_prompts()
    return prompts[:: len(prompts) // min(load.requests, len(prompts))]


def simulated(prompts: list[EditingPrompt], answers: list[str]) -> dict[str, dict[str, float]]:
    """Return what prompt lookup can gain on these answers, by form of the prompt."""
    tokenizer = load_tokenizer(resolve(DEFAULT_MODEL))
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    rows: dict[str, list[tuple[int, int, LookupFigures]]] = {}
    for prompt, answer in zip(prompts, answers, strict=True):
        text = template.render([{"role": "user", "content": prompt.prompt}], add_generation_prompt=True)
        prompt_ids, answer_ids = (tokenizer.encode(part, add_special_tokens=False) for part in (text, answer))
        for form in (prompt.form, "all"):
            rows.setdefault(form, []).append(
                (len(prompt_ids), len(answer_ids), simulate_lookup(prompt_ids, answer_ids))
            )
    return {form: _lookup_row(form_rows) for form, form_rows in sorted(rows.items(), key=lambda item: item[0] == "all")}


def _lookup_row(rows: list[tuple[int, int, LookupFigures]]) -> dict[str, float]:
    figures = sum((row[2] for row in rows), LookupFigures())
    return {
        "prompts": len(rows),
        "prompt_tokens": statistics.mean(row[0] for row in rows),
        "answer_tokens": statistics.mean(row[1] for row in rows),
        "accepted_per_step": figures.accepted_per_step,
        "from_the_answer": figures.share_from_answer,
    }


def row_of(name: str, result: dict[str, Any], step_ms: list[float] | None) -> dict[str, Any]:
    """Return a load's row of the table."""
    acceptance = Acceptance(**result["acceptance"])
    row = {
        "load": name,
        "tok/s without": result["medians"]["without"]["tok_s"],
        "with": result["medians"]["with"]["tok_s"],
        "ratio": result["ratio"],
        "TPOT ratio": result["tpot_ratio"],
        "accept len": acceptance.accepted / acceptance.drafts if acceptance.drafts else None,
        "accept rate": acceptance.accepted / acceptance.draft_tokens if acceptance.draft_tokens else None,
        "other answers": f"{result['different_answers']} of {result['answers']}",
    }
    if step_ms:
        alone = result["load"]["clients"] == 1
        row["predicted"] = predicted_speedup(acceptance, result["answers"], *step_ms) if alone else None
    return row


def print_report(results: dict[str, dict[str, Any]], step_ms: list[float] | None) -> None:
    """Print the loads, the acceptance by position, and the simulation."""
    print(format_records([row_of(name, result, step_ms) for name, result in results.items()], decimals=2))
    for name, result in results.items():
        if drafts := result["acceptance"]["drafts"]:
            shares = " ".join(f"{count / drafts:.2f}" for count in result["acceptance"]["by_position"])
            print(f"{name}: drafts accepted up to each position: {shares}")
    for name, result in results.items():
        if result["simulated"]:
            print(f"\n{name}: prompt lookup simulated on the answers")
            print(format_records([{"form": form, **row} for form, row in result["simulated"].items()], decimals=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load", action="append", choices=list(LOADS), help="run only this load; may be repeated")
    parser.add_argument("--with-args", default="--speculative-method ngram", help="flags of the server that speculates")
    parser.add_argument("--without-args", default="", help="flags of the other server")
    parser.add_argument("--args", default="", help="flags of both")
    parser.add_argument(
        "--step-ms", type=float, nargs=3, metavar=("DECODE", "VERIFY", "DRAFT"),
        help="times of a decode step, a verifying one, and of making its drafts: predicts the TPOT ratio at 1 client",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    flags = {"with": args.with_args, "without": args.without_args}
    report: dict[str, Any] = {
        "flags": {**flags, "both": args.args},
        "rounds": args.rounds,
        "machine_load_at_start": os.getloadavg()[0],
    }
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        urls = {}
        for server, own in flags.items():
            command = ["--model", DEFAULT_MODEL, *shlex.split(args.args), *shlex.split(own)]
            log = Path(tempfile.gettempdir()) / f"speculation-{server}.log"
            urls[server] = stack.enter_context(serving(command, log, timeout=START_SECONDS)).url
        results = report["results"] = {}
        args.output.parent.mkdir(parents=True, exist_ok=True)
        for name, load in LOADS.items():
            if not args.load or name in args.load:
                results[name] = measure(urls, name, load, args.rounds, folder)
                args.output.write_text(json.dumps(report, indent=2) + "\n")
    print_report(results, args.step_ms)


if __name__ == "__main__":
    main()
