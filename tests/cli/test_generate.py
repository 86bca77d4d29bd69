import io
import sys

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.cli.main import main

pytestmark = pytest.mark.slow

SAMPLING = ["--max-tokens", "8", "--ignore-eos"]


def test_it_streams_the_same_text_as_llm(tiny_flags, settings, capsys, monkeypatch) -> None:
    with LLM(**settings) as llm:
        greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        text = llm.generate("abc", greedy, use_tqdm=False)[0].outputs[0].text
    capsys.readouterr()
    assert main(["generate", "abc", *SAMPLING, *tiny_flags]) == 0
    assert capsys.readouterr().out == text + "\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc"))
    assert main(["generate", *SAMPLING, *tiny_flags]) == 0
    assert capsys.readouterr().out == text + "\n"


def test_seed_is_the_sampling_seed(tiny_flags, capsys) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        assert main(["generate", "abc", "--temperature", "1", "--seed", seed, *SAMPLING, *tiny_flags]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_a_prompt_that_does_not_fit_is_a_one_line_error(tiny_flags, capsys) -> None:
    assert main(["generate", "x" * 100, *tiny_flags]) == 2
    assert "jaxserve: error: the prompt has 100 tokens" in capsys.readouterr().err


def test_the_models_options_hold_where_no_flag_is_given(tiny_flags, settings, capsys) -> None:
    params = SamplingParams(max_tokens=6, temperature=50.0, seed=1)
    with LLM(**settings) as llm:
        text = llm.generate("abc", params, use_tqdm=False)[0].outputs[0].text
        greedy = llm.generate("abc", SamplingParams(max_tokens=6, temperature=0.0), use_tqdm=False)[0].outputs[0].text
    capsys.readouterr()
    override = ["--override-generation-config", '{"temperature": 50.0, "max_new_tokens": 6}']
    assert main(["generate", "abc", "--seed", "1", *override, *tiny_flags]) == 0
    assert capsys.readouterr().out == text + "\n"
    assert main(["generate", "abc", "--temperature", "0", *override, *tiny_flags]) == 0
    assert capsys.readouterr().out == greedy + "\n" != text + "\n"
