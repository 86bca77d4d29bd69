"""`jaxserve bench serve` against a known server: its output, files and exit codes."""

from __future__ import annotations

import json
import signal
import socket
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli.main import main
from tests.bench.known_server import ROOT, in_a_process
from tests.bench.word_tokenizer import word_tokenizer, write_folder

pytestmark = pytest.mark.process

IDS = ["--dataset-name", "random-ids", "--vocab-size", "100", "--random-input-len", "6"]


def bench(port: int, *arguments: str, known: dict[str, Any] | None = None) -> int:
    body = [] if known is None else ["--extra-body", json.dumps({"known": known})]
    return main(["bench", "serve", "--port", str(port), *body, *arguments])


@pytest.fixture
def known_port() -> Iterator[int]:
    with in_a_process() as port:
        yield port


@pytest.fixture
def result(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "result.json"


def test_the_result_has_vllms_keys_and_every_request(
    known_port: int,
    result: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench(
        known_port, *IDS, "--num-prompts", "4", "--random-output-len", "5", "--num-warmups", "1", "--goodput",
        "ttft:60000", "--metadata", "gpu=none", "--output-json", str(result), known={"itl": 0.01},
    ) == 0  # fmt: skip
    got = json.loads(result.read_text())
    latencies = {f"{name}_{metric}_ms" for metric in ("ttft", "tpot", "itl", "e2el")
                 for name in ("mean", "median", "std", "p50", "p90", "p95", "p99")}  # fmt: skip
    assert latencies | {
        "date", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness",
        "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
        "request_throughput", "request_goodput", "output_throughput", "total_token_throughput",
        "max_output_tokens_per_s", "max_concurrent_requests", "input_lens", "output_lens", "ttfts", "itls",
        "start_times", "errors", "records", "client",
    } <= set(got)  # fmt: skip
    assert "generated_texts" not in got
    assert (got["completed"], got["failed"], got["total_output_tokens"], got["model_id"]) == (4, 0, 20, "known")
    assert (got["request_rate"], got["gpu"], got["random_range_semantics"]) == ("inf", "none", "vllm")
    assert got["request_goodput"] == got["request_throughput"]
    assert [len(itls) for itls in got["itls"]] == [4] * 4
    assert got["ttfts"][0] + sum(got["itls"][0]) == pytest.approx(got["records"][0]["end"] - got["start_times"][0])
    shown = capsys.readouterr().out
    assert "4 ok, 0 failed" in shown
    assert (got["spec_decode_num_drafts"], got["accept_length"]) == (4, 2.0), "those of the warm-up don't count"
    assert "accept length 2.00, 4 of 12 tokens accepted (33.3%) in 4 drafts; by position 100%, 0%, 0%" in shown
    assert "TTFT" in shown


def test_latencies_match_the_server(known_port: int, result: Path) -> None:
    """Compares with the other process's record. A busy machine delays some streams; a wrong clock would delay all."""
    known = {"ttft": 0.15, "itl": 0.03}
    assert bench(known_port, *IDS, "--num-prompts", "6", "--max-concurrency", "3", "--random-output-len", "20",
                 "--output-json", str(result), known=known) == 0  # fmt: skip
    with urllib.request.urlopen(f"http://127.0.0.1:{known_port}/sent") as answer:
        sent = json.load(answer)
    got = json.loads(result.read_text())
    ttft, tpot = [], []
    for record in got["records"]:
        there = sent[record["id"]]
        tokens, seen = there["tokens"], record["token_times"]
        ttft.append((seen[0] - record["start"]) / (tokens[0] - there["arrived"]) - 1)
        tpot.append(abs((seen[-1] - seen[0]) / (tokens[-1] - tokens[0]) - 1))
    assert 0 < min(ttft) < 0.1
    assert min(tpot) < 0.05
    assert got["median_ttft_ms"] == pytest.approx(1e3 * statistics.median(got["ttfts"]))


def test_the_requests_sent(known_port: int) -> None:
    assert bench(
        known_port, *IDS, "--num-prompts", "2", "--max-concurrency", "1", "--random-output-len", "3", "--profile",
        "--api-key", "secret", "--header", "X-Team=a=b", "--request-id-prefix", "run7-", "--temperature", "0",
        "--logprobs", "2", "--ignore-eos", "--per-request-seed", "--seed", "5", "--ready-check-timeout-sec", "9",
        known={},
    ) == 0  # fmt: skip
    with urllib.request.urlopen(f"http://127.0.0.1:{known_port}/seen") as answer:
        seen = json.load(answer)
    completions = "/v1/completions"
    assert seen["routes"][:-1] == [
        "/v1/models", completions, "/metrics", "/start_profile", completions, completions, "/stop_profile", "/metrics"
    ]  # fmt: skip
    head, body = seen["heads"][1], seen["bodies"][1]
    assert (head["authorization"], head["x-team"], head["x-request-id"]) == ("Bearer secret", "a=b", "run7-0")
    assert len(body.pop("prompt")) == 6
    assert body == {
        "model": "known", "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0,
        "logprobs": 2, "ignore_eos": True, "seed": 5, "known": {},
    }  # fmt: skip
    assert seen["bodies"][2]["seed"] == 6


def test_null_removes_a_field(known_port: int) -> None:
    assert bench(known_port, *IDS, "--num-prompts", "1", "--extra-body", '{"stream_options": null, "user": "me"}') == 0
    with urllib.request.urlopen(f"http://127.0.0.1:{known_port}/seen") as answer:
        (body,) = json.load(answer)["bodies"]
    assert "stream_options" not in body
    assert body["user"] == "me"


def test_a_chat_in_turns_with_text_and_a_tokenizer(
    known_port: int,
    tmp_path: Path,
    result: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench(
        known_port, "--backend", "openai-chat", "--dataset-name", "multi-turn", "--num-prompts", "4",
        "--multi-turn-num-turns", "2", "--output-len", "3", "--tokenizer", write_folder(tmp_path), "--save-detailed",
        "--save-generated-texts", "--result-dir", str(result.parent), "--result-filename", result.name,
        "--multi-turn-input-len", "10", "--multi-turn-system-len", "5", known={"prompt_tokens": 100},
    ) == 0  # fmt: skip
    got = json.loads(result.read_text())
    assert (got["completed"], got["generated_texts"]) == (4, [" one two three"] * 4)
    answer = len(word_tokenizer().encode(" one two three", add_special_tokens=False))
    assert (got["dataset_input_tokens"], got["answer_input_tokens"]) == (2 * (15 + 25), 2 * answer)
    assert got["template_input_tokens"] == 400 - 80 - 2 * answer
    shown = capsys.readouterr().out
    assert (
        f"80 tokens of the dataset, {2 * answer} of earlier answers, {320 - 2 * answer} of the chat template" in shown
    )


def test_lengths_that_the_server_cant_hold_are_refused_before_the_first_request(
    known_port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def tried(*line: str) -> str:
        assert bench(known_port, "--num-prompts", "3", "--tokenizer", tokenizer, *line) == 2
        with urllib.request.urlopen(f"http://127.0.0.1:{known_port}/seen") as answer:
            assert json.load(answer)["bodies"] == []
        return capsys.readouterr().err

    tokenizer, file = write_folder(tmp_path), tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": " baba cece"}\n{"prompt": " baba cece didi fofo gugu haha jeje kiki lolo"}\n')
    custom = ("--model", "short", "--dataset-name", "custom", "--dataset-path", str(file))
    said = tried("--random-input-len", "3990", "--random-output-len", "11")
    assert "3 of 3 requests can't fit the server's context of 4000 tokens (max_model_len)" in said
    assert "the longest has 3990 prompt tokens, and asks for 11, which makes 4001" in said
    said = tried(*custom, "--output-len", "11", "--no-oversample")
    assert "1 of 2 requests can't fit the server's context of 20 tokens" in said
    assert "the longest has 10 prompt tokens, and asks for 11" in said
    said = tried(*custom, "--output-len", "12", "--no-oversample", "--backend", "openai-chat")
    assert "1 of 2 requests" in said
    assert "has 9 prompt tokens, and the chat template's, and asks for 12, which makes 21" in said
    turns = ("--model", "short", "--dataset-name", "multi-turn", "--multi-turn-num-turns", "3", "--output-len", "1")
    assert "1 of 3 requests can't fit" in tried(*turns, "--multi-turn-input-len", "7")
    fitting = ("--model", "short", "--random-input-len", "12", "--random-output-len", "8", "--num-prompts", "1")
    assert bench(known_port, *fitting, "--tokenizer", tokenizer) == 0
    for unsaid in ("silent", "unlisted"):
        longer = ("--model", unsaid, "--random-input-len", "20", "--random-output-len", "3", "--num-prompts", "1")
        assert bench(known_port, *longer, "--tokenizer", tokenizer) == 0


def test_failures_are_counted_shown_and_not_averaged(
    known_port: int,
    result: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench(known_port, *IDS, "--num-prompts", "3", "--output-json", str(result), known={"fault": "close"}) == 1
    got = json.loads(result.read_text())
    assert (got["completed"], got["failed"], got["output_lens"]) == (0, 3, [0, 0, 0])
    assert not [key for key in got if key.endswith("_ttft_ms")]
    assert {record["status"] for record in got["records"]} == {"failed"}
    assert "3 x the server closed the connection before the end of the response" in capsys.readouterr().out


def test_a_server_without_usage_is_reported(
    known_port: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = [*IDS, "--num-prompts", "1", "--random-output-len", "4"]
    assert bench(known_port, *line, known={"usage": False}) == 0
    assert "there is no tokenizer: chunks were counted" in capsys.readouterr().out
    assert bench(known_port, *line, "--tokenizer", write_folder(tmp_path), known={"usage": False}) == 0
    assert "their tokens were counted by the tokenizer" in capsys.readouterr().out


def test_warmups_that_all_fail_end_the_run(
    known_port: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench(known_port, *IDS, "--num-warmups", "2", known={"fault": "http"}) == 1
    assert "all warm-up requests failed: HTTP 503: too much" in capsys.readouterr().err


@pytest.mark.process
def test_ctrl_c_prints_what_was_measured(known_port: int, result: Path) -> None:
    command = [
        sys.executable, "-m", "jaxserve", "bench", "serve", "--port", str(known_port), *IDS, "--num-prompts", "3",
        "--random-output-len", "5", "--request-rate", "1", "--burstiness", "inf", "--output-json", str(result),
        "--extra-body", '{"known": {"itl": 0.01}}',
    ]  # fmt: skip
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while True:
            with urllib.request.urlopen(f"http://127.0.0.1:{known_port}/sent") as answer:
                # The second is sent a second after the first, which has long ended then
                if len(json.load(answer)) == 2:
                    break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == 130, err
    assert "CUT: the run was ended before all requests were done" in out
    got = json.loads(result.read_text())
    assert got["interrupted"]
    assert got["completed"] >= 1
    assert got["unfinished"] >= 1
    assert got["completed"] + got["unfinished"] == 3


def test_a_refused_connection_is_a_one_line_error(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert bench(port, *IDS) == 1
    assert capsys.readouterr().err == (
        f"jaxserve: error: no server answers at http://127.0.0.1:{port}: could not connect to 127.0.0.1:{port}: "
        "Connection refused\n"
    )


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (
            "--backend openai-chat --dataset-name random-ids",
            "random-ids sends token ids, which chat routes don't accept",
        ),
        ("--request-rate 0", "--request-rate must be above 0 (or inf), got 0"),
        ("--burstiness -1", "--burstiness must be above 0, got -1"),
        ("--max-concurrency 0", "--max-concurrency must be at least 1, got 0"),
        ("--ramp-up-strategy linear", "a ramp-up needs all of --ramp-up-strategy, --ramp-up-start-rps and"),
        ("--request-rate 3 --ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 2", "both set the rate"),
        ("--self-timed", "--self-timed: --dataset-name random has no arrival times"),
        ("--goodput ttft", "'ttft' should be one of ttft:MS, tpot:MS, e2el:MS"),
        ("--goodput itl:5", "'itl:5' should be one of ttft:MS, tpot:MS, e2el:MS"),
        ("--metric-percentiles 50,x", "'50,x' should be numbers from 0 to 100"),
        ("--percentile-metrics ttft,foo", "foo: the metrics are ttft,tpot,itl,e2el"),
        ("--extra-body [1]", "'[1]' should be a JSON object"),
        ("--header nonsense", "--header takes KEY=VALUE, got 'nonsense'"),
        ("--request-timeout 0", "--request-timeout must be above 0 seconds, got 0"),
        ("--backend nonsense", "invalid choice: 'nonsense'"),
        ("--port 0", "--port must be from 1 to 65535, got 0"),
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(line: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *line.split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith("jaxserve: error: ")
    assert error in said
    assert said.count("\n") == 1


def test_it_needs_neither_jax_nor_torch() -> None:
    code = (
        "import sys; from jaxserve.cli.main import main; main(['bench', 'serve', '--port', '1', '--dataset-name',"
        " 'random-ids', '--vocab-size', '9']); print({'jax', 'torch', 'transformers', 'httpx'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
