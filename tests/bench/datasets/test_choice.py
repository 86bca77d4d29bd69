"""Datasets chosen by flags."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from jaxserve.bench.datasets.prompts import BenchConversation
from jaxserve.cli.bench.dataset_flags import add_datasets, chosen_dataset
from jaxserve.cli.common.parser import Parser
from jaxserve.errors import ConfigError
from tests.bench.word_tokenizer import word_tokenizer

TOKENIZER = word_tokenizer()


def made(line: str, *, chat: bool = False, warmups: int | None = None) -> list[BenchConversation]:
    parser = Parser(prog="bench")
    add_datasets(parser)
    dataset = chosen_dataset(parser.parse(line.split()), chat=chat)
    return dataset.make(dataset.vocabulary(TOKENIZER), warmups=warmups)


def texts(conversations: list[BenchConversation]) -> list[str]:
    return [str(prompt.content) for conversation in conversations for prompt in conversation.prompts]


def only(conversation: BenchConversation) -> tuple[int, int | None, int]:
    """Return the real number of prompt tokens, the declared one, and the requested output tokens."""
    (prompt,) = conversation.prompts
    content = prompt.content
    real = len(TOKENIZER.encode(content)) if isinstance(content, str) else len(content)
    return real, prompt.prompt_tokens, prompt.output_tokens


def test_random_texts_have_the_length_with_bos() -> None:
    assert {only(c) for c in made("--random-input-len 50 --random-output-len 9 --num-prompts 20")} == {(50, 50, 9)}


def test_random_texts_of_chats_have_the_length_without_bos() -> None:
    drawn = made("--random-input-len 50 --random-output-len 9 --num-prompts 20", chat=True)
    assert {only(c) for c in drawn} == {(51, 50, 9)}


def test_random_lengths_cover_their_ranges() -> None:
    drawn = [only(c) for c in made(
        '--random-input-len 41 --random-output-len 10 --num-prompts 300 --random-range-ratio {"input":0.5,"output":0}'
    )]  # fmt: skip
    assert {tokens for tokens, _, _ in drawn} == set(range(21, 62))
    assert {output for _, _, output in drawn} == {10}
    sglang = made("--random-input-len 9 --random-output-len 4 --num-prompts 300 --random-range-semantics sglang")
    assert {only(c)[0] for c in sglang} == set(range(2, 10))
    assert {only(c)[2] for c in sglang} == {1, 2, 3, 4}


def test_a_prefix_is_added_and_shared() -> None:
    drawn = made("--random-input-len 21 --random-prefix-len 30 --num-prompts 3")
    assert {only(c)[0] for c in drawn} == {51}
    shared = [TOKENIZER.encode(text)[:31] for text in texts(drawn)]
    assert shared[0] == shared[1] == shared[2]


def test_random_ids_are_sent_as_they_are() -> None:
    drawn = made("--dataset-name random-ids --random-input-len 12 --num-prompts 3 --vocab-size 50")
    assert {only(c) for c in drawn} == {(12, 12, 128)}
    assert all(token < 50 for c in drawn for token in c.prompts[0].content)  # type: ignore[operator]


def test_a_longer_dataset_starts_with_the_shorter_one_of_the_same_seed() -> None:
    short, long = (texts(made(f"--random-input-len 20 --num-prompts {n} --random-range-ratio 0.5")) for n in (4, 9))
    assert long[:4] == short
    assert texts(made("--random-input-len 20 --num-prompts 4 --random-range-ratio 0.5 --seed 1")) != short


@pytest.mark.parametrize("name", ["random", "prefix-repetition", "generated-shared-prefix", "multi-turn"])
def test_warmups_have_different_prompts(name: str) -> None:
    size = "--gsp-num-groups 2 --gsp-prompts-per-group 3" if name == "generated-shared-prefix" else "--num-prompts 10"
    line = f"--dataset-name {name} {size}"
    warmups = texts(made(line, warmups=2))
    assert len(warmups) == 2
    assert not set(warmups) & set(texts(made(line)))


@pytest.mark.parametrize("name", ["prefix-repetition", "prefix_repetition"])
def test_prefix_repetition(name: str) -> None:
    drawn = made(f"--dataset-name {name} --num-prompts 12 --prefix-repetition-num-prefixes 3 "
                 "--prefix-repetition-prefix-len 20 --prefix-repetition-suffix-len 5 --output-len 6")  # fmt: skip
    assert {only(c) for c in drawn} == {(26, 26, 6)}
    prefixes = [tuple(TOKENIZER.encode(text)[:21]) for text in texts(drawn)]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [4, 4, 4]
    assert len(set(texts(drawn))) == 12


def test_generated_shared_prefix() -> None:
    line = ("--dataset-name generated-shared-prefix --gsp-num-groups 2 --gsp-prompts-per-group 3 "
            "--gsp-system-prompt-len 15 --gsp-question-len 4 --gsp-output-len 7")  # fmt: skip
    ordered = made(f"{line} --gsp-ordered")
    assert {only(c) for c in ordered} == {(20, 20, 7)}
    groups = [tuple(TOKENIZER.encode(text)[:16]) for text in texts(ordered)]
    assert [len(list(group)) for _, group in itertools.groupby(groups)] == [3, 3]
    assert len(made(f"{line} --num-prompts 4")) == 4
    with pytest.raises(ConfigError, match="the groups have 6 prompts in all"):
        made(f"{line} --num-prompts 7")


def test_multi_turn_conversations_have_turns_and_share_a_system_prompt() -> None:
    drawn = made("--dataset-name multi-turn --num-prompts 7 --multi-turn-num-turns 3 --multi-turn-input-len 5 "
                 "--multi-turn-system-len 8 --multi-turn-delay-ms 250")  # fmt: skip
    assert [len(c.prompts) for c in drawn] == [3, 3, 1]
    assert len({c.system for c in drawn}) == 1
    assert {c.pause for c in drawn} == {0.25}


@pytest.fixture
def sharegpt(tmp_path: Path) -> Path:
    words = " baba cece didi fofo gugu haha jeje kiki lolo mumu"
    entries = [
        {"conversations": [{"from": "human", "value": words * n}, {"from": "gpt", "value": words},
                           {"from": "human", "value": " nana"}, {"from": "gpt", "value": " pepe"}]}
        for n in (1, 2, 3)
    ]  # fmt: skip
    too_long = {"conversations": [{"from": "human", "value": words * 200}, {"from": "gpt", "value": words}]}
    too_short = {"conversations": [{"from": "human", "value": " baba"}, {"from": "gpt", "value": words}]}
    one_sided = {"conversations": [{"from": "human", "value": words}]}
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps([*entries, too_long, too_short, one_sided, {"conversations": []}]))
    return file


def test_sharegpt_requests_the_length_of_the_first_answer(sharegpt: Path) -> None:
    drawn = made(f"--dataset-name sharegpt --dataset-path {sharegpt}")
    assert sorted(only(c) for c in drawn) == [(11, 11, 10), (21, 21, 10), (31, 31, 10)]
    assert {only(c)[2] for c in made(f"--dataset-name sharegpt --dataset-path {sharegpt} --output-len 5")} == {5}


def test_a_short_file_is_repeated(sharegpt: Path) -> None:
    assert len(made(f"--dataset-name sharegpt --dataset-path {sharegpt} --num-prompts 8")) == 8
    assert len(made(f"--dataset-name sharegpt --dataset-path {sharegpt} --num-prompts 8 --no-oversample")) == 3
    assert len(made(f"--dataset-name sharegpt --dataset-path {sharegpt} --num-prompts 2")) == 2


def test_sharegpt_gives_turns(sharegpt: Path) -> None:
    drawn = made(f"--dataset-name multi-turn --dataset-path {sharegpt} --num-prompts 5", chat=True)
    assert sum(len(c.prompts) for c in drawn) == 5
    assert any(c.prompts[-1].content == " nana" for c in drawn)


def test_custom_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n\n{"prompt": [5, 6], "output_tokens": 3}\n')
    line = f"--dataset-name custom --dataset-path {file} --disable-shuffle"
    drawn = made(f"{line} --custom-output-len 9")
    assert [(c.prompts[0].content, c.prompts[0].prompt_tokens, c.prompts[0].output_tokens) for c in drawn] == [
        ("one", None, 9),
        ([5, 6], 2, 3),
    ]
    file.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    assert made(line, chat=True)[0].prompts[0].content == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("content", "chat", "error"),
    [
        ('{"prompt": "a"}\n{nonsense', False, "line 2 is not JSON"),
        ("[1]", False, "line 1 should hold an object, it holds a list"),
        ('{"text": "a"}', False, 'line 1 has neither "prompt"'),
        ('{"messages": [{"role": "user", "content": "a"}]}', False, "only --backend openai-chat can send"),
        ('{"prompt": [1, 2]}', True, "only --backend openai can send"),
        ('{"prompt": "a", "output_tokens": 0}', False, "output_tokens must be a whole number above 0, got 0"),
        ("", False, "gives no requests"),
    ],
)
def test_an_invalid_line_is_named(tmp_path: Path, content: str, chat: bool, error: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=error):
        made(f"--dataset-name custom --dataset-path {file} --disable-shuffle", chat=chat)


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    rows = [
        {"timestamp": 27000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 27500, "input_length": 1030, "output_length": 6, "hash_ids": [0, 1, 9]},
        {"timestamp": 30000, "input_length": 30, "output_length": 7, "hash_ids": []},
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return file


def test_a_trace_keeps_its_times_lengths_and_shared_prefixes(mooncake: Path) -> None:
    drawn = made(f"--dataset-name timed_trace --dataset-path {mooncake}")
    assert [c.at for c in drawn] == [0.0, 0.5, 3.0]
    assert [only(c) for c in drawn] == [(1100, 1100, 5), (1030, 1030, 6), (30, 30, 7)]
    first, second = (c.prompts[0].content for c in drawn[:2])
    assert first[:1024] == second[:1024]
    assert first[1024:1030] != second[1024:1030]


def test_a_trace_with_other_units(mooncake: Path) -> None:
    drawn = made(f"--dataset-name timed-trace --dataset-path {mooncake} --timed-trace-chunk-hash-size 16 "
                 "--timed-trace-sec-multiplier 1 --num-prompts 2")  # fmt: skip
    assert [c.at for c in drawn] == [0.0, 500.0]
    first, second = (c.prompts[0].content for c in drawn)
    assert first[:32] == second[:32]
    assert first[32:48] != second[32:48]


def test_a_trace_is_text_for_a_chat(mooncake: Path) -> None:
    drawn = made(f"--dataset-name timed-trace --dataset-path {mooncake}", chat=True)
    assert [only(c)[0] for c in drawn] == [1101, 1031, 31]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("--dataset-name random --gsp-num-groups 3", "--gsp-num-groups has no effect with --dataset-name random"),
        ("--dataset-name sharegpt", "reads a file: name it with --dataset-path"),
        ("--dataset-name custom --dataset-path /nowhere/x", "can't be read"),
        ("--num-prompts 0", "--num-prompts must be at least 1, got 0"),
        ("--random-input-len 0", "--random-input-len must be at least 1, got 0"),
        ("--random-range-ratio 1.5", r"must be in \[0, 1\) by vLLM's semantics, got 1.5"),
        ("--random-range-ratio x", "'x' is neither a number nor like"),
        ("--input-len 5 --random-input-len 6", "its own flag is given too"),
        ("--dataset-name prefix-repetition --input-len 5", "has its own lengths"),
        ("--dataset-name prefix-repetition --num-prompts 3", "there must be 1 to 3"),
    ],
)
def test_invalid_flags_are_refused(line: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        made(line)
