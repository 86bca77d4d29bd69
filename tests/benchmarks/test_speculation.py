"""`bench serve` reads the prompts of `benchmarks/speculation.py`; its simulation and its prediction are right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.editing_prompts import editing_prompts, misspell, read_passages, write_prompts
from benchmarks.prompt_lookup import LookupFigures, simulate_lookup
from benchmarks.speculation import LOADS, Acceptance, chosen_prompts, predicted_speedup
from jaxserve.bench.datasets.files import custom

FORMS = {
    "replace a word": 10,
    "fix the spelling": 10,
    "quote sentences": 10,
    "summarize two texts": 6,
    "rename a variable": 6,
    "comment code": 6,
}


def test_bench_serve_reads_the_prompts(tmp_path: Path) -> None:
    prompts = editing_prompts()
    write_prompts(tmp_path / "editing.jsonl", prompts)
    rng = np.random.default_rng(0)
    read = list(custom(tmp_path / "editing.jsonl", rng, output_len=None, chat=True, shuffle=False))  # type: ignore[arg-type]
    assert [(line.prompts[0].content, line.prompts[0].output_tokens) for line in read] == [
        (prompt.prompt, prompt.output_tokens) for prompt in prompts
    ]
    forms = [prompt.form for prompt in prompts]
    assert {form: forms.count(form) for form in forms} == FORMS
    assert all(100 <= prompt.output_tokens <= 300 for prompt in prompts)
    assert len({prompt.prompt for prompt in prompts}) == len(prompts)


def test_every_text_has_the_word_to_replace() -> None:
    for passage in read_passages():
        assert passage.text.count(passage.old) >= 2, passage.old
        assert f" {passage.new} " not in passage.text


def test_a_misspelled_text_has_the_same_letters() -> None:
    text = "one two three four pieces of bread are enough today"
    assert misspell(text) == "one two three four peices of bread are enough today"


@pytest.mark.parametrize("load", ["editing 1", "editing 16"])
def test_a_load_has_prompts_of_every_form(load: str) -> None:
    chosen = chosen_prompts(LOADS[load])
    assert len(chosen) == LOADS[load].requests
    assert {prompt.form for prompt in chosen} == set(FORMS)


def test_lookup_prefers_the_longest_ngram_and_then_the_latest_place() -> None:
    # The latest 1 2 is followed by 9, and the only 5 1 2 by 3.
    prompt = [5, 1, 2, 3, 8, 1, 2, 9, 4, 5, 1]
    assert simulate_lookup(prompt, [2, 3]) == LookupFigures(steps=1, drafts=1, accepted=1)
    assert simulate_lookup(prompt, [2, 3], longest=2) == LookupFigures(steps=1, drafts=1)
    assert simulate_lookup([1, 2, 3, 8, 1, 2, 4], [1, 2, 4, 6]).accepted == 1, "the latest place"


def test_a_copy_is_accepted_up_to_the_length_of_the_draft() -> None:
    prompt = list(range(20))
    # The first two tokens come without a draft. Then steps yield 7 + 1 and 7 + 1 tokens, and the last two.
    assert simulate_lookup(prompt, prompt) == LookupFigures(steps=4, drafts=3, accepted=16, accepted_from_answer=0)
    assert simulate_lookup(prompt, prompt, num_draft_tokens=1).accepted == 9


def test_an_answer_that_repeats_itself_is_counted_apart() -> None:
    figures = simulate_lookup([1, 2, 3], [7, 8, 9] * 4)
    assert figures.accepted == figures.accepted_from_answer > 0
    assert figures.share_from_answer == 1
    assert simulate_lookup([1, 2, 3], [7, 8, 9]) == LookupFigures(steps=2)


def test_the_predicted_speedup() -> None:
    # 101 tokens, the first with the prompt: 20 drafts of which 40 tokens were accepted, and 40 plain steps.
    acceptance = Acceptance(generated=101, drafts=20, draft_tokens=80, accepted=40)
    assert predicted_speedup(acceptance, 1, decode=10, verify=15, draft=5) == pytest.approx(1000 / (400 + 20 * 20))
    assert predicted_speedup(Acceptance(generated=8), 1, decode=3, verify=9, draft=9) == 1


def test_acceptance_is_counted_between_two_readings() -> None:
    first, second = Acceptance(10, 2, 8, 4, (2, 2)), Acceptance(30, 6, 20, 9, (5, 4))
    assert second.since(first) == Acceptance(20, 4, 12, 5, (3, 2))
    assert Acceptance().plus(first) == first
