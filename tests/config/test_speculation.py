"""Tests how speculation is turned on under either engine's names, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli import serve
from jaxserve.cli.common import flags
from jaxserve.config.load import from_arguments, load_config
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError

NAMES = (
    "speculative_method", "speculative_model", "num_speculative_tokens", "speculative_disable_by_batch_size",
    "prompt_lookup_max", "prompt_lookup_min",
)  # fmt: skip


def on_the_command_line(*argv: str) -> EngineConfig:
    return flags.config_from_arguments(serve.parser().parse(argv)).engine


def written(engine: EngineConfig) -> dict[str, Any]:
    """Return the settings of speculation that differ from their defaults."""
    return {name: getattr(engine, name) for name in NAMES if getattr(engine, name) != getattr(EngineConfig(), name)}


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as raised:
        on_the_command_line(*argv)
    return str(raised.value)


VLLM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 6, "prompt_lookup_min": 3}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (("--speculative-method", "ngram", "--num-speculative-tokens", "3"), {"num_speculative_tokens": 3}),
        (("--speculative-model", "[ngram]", "--num-speculative-tokens", "3", "--use-v2-block-manager"),
         {"num_speculative_tokens": 3}),
        (("--speculative-model", "[ngram]", "--speculative-method", "ngram"), {}),
        (("--speculative-model", "[ngram]", "--ngram-prompt-lookup-max", "8", "--ngram-prompt-lookup-min", "1"),
         {"prompt_lookup_max": 8, "prompt_lookup_min": 1}),
        (("--speculative-method", "ngram", "--speculative-disable-by-batch-size", "8"),
         {"speculative_disable_by_batch_size": 8}),
        (("--speculative-config", json.dumps(VLLM)),
         {"num_speculative_tokens": 5, "prompt_lookup_max": 6, "prompt_lookup_min": 3}),
        (("-sc", '{"method": "ngram_gpu", "disable_by_batch_size": 4, "model": null, "enforce_eager": false}'),
         {"speculative_disable_by_batch_size": 4}),
        (("-tp", "4", "--speculative-config", '{"method": "ngram", "draft_tensor_parallel_size": 4}'), {}),
        (("--spec-method", "ngram", "--spec-tokens", "2", "--speculative-config", '{"prompt_lookup_min": 1}'),
         {"num_speculative_tokens": 2, "prompt_lookup_min": 1}),
        (("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "16"), {"num_speculative_tokens": 15}),
        (("--speculative-algorithm", "NGRAM", "--speculative-num-steps", "3", "--speculative-num-draft-tokens", "4",
          "--speculative-eagle-topk", "1"), {"num_speculative_tokens": 3}),
        (("--speculative-algorithm", "NGRAM", "--speculative-ngram-max-match-window-size", "5",
          "--speculative-ngram-min-match-window-size", "1", "--speculative-ngram-max-bfs-breadth", "1"),
         {"prompt_lookup_max": 5, "prompt_lookup_min": 1}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_ngram_under_every_name(argv: tuple[str, ...], expected: dict[str, object]) -> None:
    assert written(on_the_command_line(*argv)) == {"speculative_method": "ngram"} | expected


@pytest.mark.parametrize(
    ("argv", "method", "tokens"),
    [
        (("--speculative-model", "small", "--num-speculative-tokens", "5"), "draft", 5),
        (("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", "small"), "draft", None),
        (("--speculative-algorithm", "EAGLE", "--speculative-draft-model", "small"), "eagle", None),
        (("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "small", "--speculative-num-steps",
          "5", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "6"), "eagle3", 5),
        (("--speculative-config", '{"model": "small", "num_speculative_tokens": 5}'), "draft", 5),
        (("--speculative-config", '{"model": "small", "method": "draft_model"}'), "draft", None),
        (("--speculative-config", '{"model": "small", "method": "eagle3", "num_speculative_tokens": 2}'), "eagle3", 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)  # fmt: skip
def test_methods_that_need_a_model(argv: tuple[str, ...], method: str, tokens: int | None) -> None:
    engine = on_the_command_line(*argv)
    assert (engine.speculative_method, engine.speculative_model) == (method, "small")
    assert engine.num_speculative_tokens == tokens


@pytest.mark.parametrize("argv", [("--speculative-algorithm", "NEXTN"), ("-sc", '{"method": "deepseek_mtp"}')])
def test_the_models_own_layers(argv: tuple[str, ...]) -> None:
    assert written(on_the_command_line(*argv)) == {"speculative_method": "mtp"}


def test_a_model_without_a_method_is_logged_as_a_draft() -> None:
    loaded = flags.config_from_arguments(serve.parser().parse(["--speculative-model", "ngram"]))
    assert loaded.notes == ("--speculative-model ngram: sets speculative_method=ngram",)
    loaded = flags.config_from_arguments(serve.parser().parse(["--speculative-model", "small"]))
    assert loaded.notes == ("--speculative-model small: sets speculative_method=draft",)


def test_a_mapping_in_yaml_and_as_an_argument(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text("speculative_config:\n  method: ngram\n  num_speculative_tokens: 5\n")
    expected = {"speculative_method": "ngram", "num_speculative_tokens": 5}
    assert written(load_config(config_file=path).engine) == expected
    path.write_text("speculative_config:\n  method: ngram\n  num_speculative_tokens: many\n")
    with pytest.raises(ConfigError, match=r"yaml:1: speculative_config: num_speculative_tokens must be a whole number"):
        load_config(config_file=path)
    assert written(from_arguments([("speculative_config", {"method": "ngram", "num_speculative_tokens": 5})]).engine) \
        == expected  # fmt: skip
    assert written(from_arguments([("speculative_config", None)]).engine) == {}


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--num-speculative-tokens", "5"), "num_speculative_tokens=5 needs a method"),
        (("--speculative-disable-by-batch-size", "5"), "speculative_disable_by_batch_size=5 needs a method"),
        (("--prompt-lookup-max", "5"), "prompt_lookup_min need speculative_method=ngram"),
        (("--speculative-method", "ngram", "--num-speculative-tokens", "17"), "at most 16, got 17"),
        (("--speculative-method", "ngram", "--prompt-lookup-max", "9"), "at most 8, got 9"),
        (("--speculative-method", "ngram", "--prompt-lookup-max", "1"), "prompt_lookup_min=2 must be at most"),
        (("--speculative-method", "ngram", "--speculative-model", "small"), "without speculative_model=small"),
        (("--speculative-method", "none", "--speculative-model", "small"), "needs speculative_method: draft, eagle"),
        (("--speculative-method", "eagle3"), "eagle3 needs speculative_model: the head that drafts. To draft"),
        (("--speculative-method", "mtp", "--speculative-model", "small"), "drafts without speculative_model=small"),
        (("--speculative-method", "medusa"), "not supported; ngram needs no other model"),
        (("--speculative-algorithm", "TREE"), "must be one of none, ngram, draft, eagle, eagle3, mtp"),
        (("--speculative-algorithm", "NGRAM", "--speculative-num-steps", "3", "--speculative-num-draft-tokens", "8"),
         "both set num_speculative_tokens"),
        (("--speculative-num-draft-tokens", "1"), "must be at least 2, got 1"),
        (("--speculative-num-draft-tokens", "x"), "must be a number, got 'x'"),
        (("--speculative-eagle-topk", "4"), "--speculative-eagle-topk 4 is refused: drafts are chains, not trees"),
        (("--speculative-accept-threshold-single", "0.8"), "answers never change"),
        (("-tp", "4", "--speculative-draft-tensor-parallel-size", "1"),
         "--speculative-draft-tensor-parallel-size must be tp_size=4, got 1"),
        (("--speculative-config", '{"method": "ngram", "draft_tensor_parallel_size": 2}'), "must be tp_size=1, got 2"),
        (("--speculative-config", '{"method": "ngram"'), "is not valid JSON"),
        (("--speculative-config", "[" * 100_000), "is not valid JSON"),
        (("--speculative-config", "5"), "must be a mapping, got 5; write it like"),
        (("--speculative-config", '{"methd": "ngram"}'), "methd is not a known key; did you mean method?"),
        (("--speculative-config", '{"method": "suffix"}'), "method suffix is refused"),
        (("--speculative-config", '{"method": ["ngram"]}'), "method must be one of"),
        (("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2.5}'), "must be a whole number"),
        (("--speculative-config", '{"method": "ngram", "speculative_token_tree": "[(0,)]"}'), "chains, not trees"),
        (("--speculative-config", '{"acceptance_method": "typical_acceptance_sampler"}'), "answers never change"),
        (("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 5}', "--num-speculative-tokens", "3"),
         "both set num_speculative_tokens, to 3 and 5"),
    ],
    ids=lambda value: " ".join(value)[:80] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_what_is_refused(argv: tuple[str, ...], says: str) -> None:
    assert says in refusal(*argv)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"speculative_method": "draft"}, "needs speculative_model: the smaller model that drafts"),
        ({"speculative_method": "eagle"}, "model's own checkpoint, set speculative_method to mtp"),
        ({"speculative_method": "mtp", "speculative_model": "small"}, "without speculative_model=small"),
        ({"speculative_method": "eagle3", "speculative_model": "small", "prompt_lookup_max": 3}, "need speculative_m"),
    ],
)
def test_settings_that_belong_to_another_method(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig(**settings)


def test_a_flag_overrides_the_method_in_yaml(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text("speculative_config: {method: ngram}\n")
    assert written(on_the_command_line("--config", str(path), "--speculative-method", "none")) == {}
