import ast
from pathlib import Path
from typing import get_args

import pytest

from jaxserve.config.foreign_readers import READERS
from jaxserve.config.load import GivenSetting, load_config
from jaxserve.config.other_engines import Answer, ForeignFlag, Meaning, foreign_flags
from jaxserve.config.settings import as_flag, as_key, settings
from jaxserve.errors import ConfigError


def flag(key: str, value: object) -> GivenSetting:
    return GivenSetting(key, value, "flag", as_flag(key))


FLAGS = tuple({flag.key: flag for flag in foreign_flags().values()}.values())
PEERS = Path(__file__).parents[3] / "shared" / "peers"
needs_peers = pytest.mark.skipif(not PEERS.is_dir(), reason="../shared is not here")


def meanings() -> list[tuple[ForeignFlag, Meaning]]:
    return [(flag, meaning) for flag in FLAGS for meaning in (flag.meaning, *flag.known.values())]


def test_what_is_taken_sets_something_that_exists() -> None:
    for flag, meaning in meanings():
        if meaning.answer != "taken":
            assert meaning.sets == "", flag.key
        elif meaning.values:
            for name, value in meaning.values.items():
                settings()[name].convert(value, flag.key)
        elif meaning.sets.startswith("read "):
            assert meaning.sets.removeprefix("read ") in READERS
        elif meaning.sets:
            name = meaning.sets.removeprefix("same ")
            assert name in settings() or name in foreign_flags(), flag.key
        else:
            assert flag.kind == "mapping", flag.key


def test_a_flag_of_our_own_name_is_taken_as_ours() -> None:
    for flag in FLAGS:
        for name in {*flag.names} & {*settings()}:
            assert (flag.key, flag.meaning.sets) == (name, name)


def test_a_switch_that_sets_several_things_says_what_its_contrary_is() -> None:
    for flag in FLAGS:
        if flag.kind == "switch" and any(type(value) is not bool for value in flag.meaning.values.values()):
            assert "off" in flag.known, flag.key


def test_keys_belong_to_mappings() -> None:
    for flag in FLAGS:
        if "." in flag.key:
            assert foreign_flags()[flag.key.split(".")[0]].kind == "mapping"


def test_every_other_answer_has_a_reason_of_one_line() -> None:
    for flag, meaning in meanings():
        if meaning.answer != "taken":
            assert meaning.reason, flag.key
            assert len(meaning.reason) <= 200
            assert not meaning.reason.endswith(".")


def test_a_flag_of_closed_values_names_them_all() -> None:
    says = "it must be one of "
    closed = {flag.key: flag for flag in foreign_flags().values() if flag.meaning.reason.startswith(says)}
    assert {"logprobs_mode", "grammar_backend", "model_impl"} < closed.keys()
    for flag in closed.values():
        assert set(flag.meaning.reason.removeprefix(says).replace(" or ", ", ").split(", ")) == set(flag.known)
    with pytest.raises(ConfigError, match="--logprobs-mode rare is refused: it must be one of raw_logprobs, "):
        load_config([GivenSetting("logprobs_mode", "rare", "flag", "--logprobs-mode")])


@pytest.mark.parametrize("key", ["grammar_backend", "mamba_cache_mode", "logprobs_mode", "enable_lora", "swap_space"])
def test_null_asks_for_nothing(key: str) -> None:
    assert load_config([GivenSetting(key, None, "yaml", f"a.yaml:1: {key}")]).notes == ()


def names_of(engine: str) -> list[list[str]]:
    """Return the names of each flag in the file of an engine, without `--no-`."""
    [path] = PEERS.glob(f"flags-{engine}-*.tsv")
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    flags = [[*row[0].split(","), *(ast.literal_eval(row[1]) if row[1].startswith("[") else ())] for row in rows]
    return [[as_key(name) for name in names if not name.startswith("--no-")] for names in flags]


@needs_peers
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_flag_of_another_engine_has_an_answer(engine: str) -> None:
    answers = []
    for names in names_of(engine):
        [flag] = {id(flag): flag for flag in map(foreign_flags().get, names)}.values()
        assert flag is not None, names
        assert flag.engine in (engine, "both"), names
        some = {meaning.answer for meaning in (flag.meaning, *flag.known.values())}
        answers.append("left out" if flag.meaning.answer == "left out" else min(some, key=get_args(Answer).index))
    usable = [answer for answer in answers if answer != "left out"]
    accepted = sum(answer in ("taken", "in force", "by design") for answer in usable)
    assert 2 * accepted >= len(usable)


@pytest.mark.parametrize(
    ("written", "value", "ours", "expected"),
    [
        ("max_num_seqs", "8", "max_running_requests", 8),
        ("block_size", "32", "page_size", 32),
        ("gpu_memory_utilization", "0.9", "mem_fraction_static", 0.9),
        ("max_model_len", "2048", "context_length", 2048),
        ("context_len", "2048", "context_length", 2048),
        ("tensor_parallel_size", "2", "tp_size", 2),
        ("tp", "4", "tp_size", 4),
        ("data_parallel_size", "1", "dp_size", 1),
        ("dp", "2", "dp_size", 2),
        ("pipeline_parallel_size", "2", "pp_size", 2),
        ("pp", "4", "pp_size", 4),
        ("seed", "7", "random_seed", 7),
        ("model_path", "here", "model", "here"),
        ("cuda_graph_sizes", ["1,2"], "cuda_graph_bs", (1, 2)),
        ("disable_hybrid_kv_cache_manager", True, "disable_hybrid_swa_memory", True),
    ],
)
def test_a_rename_sets_our_setting(written: str, value: object, ours: str, expected: object) -> None:
    loaded = load_config([flag(written, value)])
    (changed,) = [value for value in loaded.values if value.source != "default"]
    assert (changed.setting.name, changed.value, changed.alias) == (ours, expected, written)
    assert loaded.notes == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("enable_chunked_prefill", True),
        ("enable_metrics", True),
        ("enable_torch_compile", True),
        ("enable_mixed_chunk", True),
        ("swap_space", "4"),
        ("enable_cache_report", True),
        ("priority_scheduling", False),
        ("disable_log_stats", False),
        ("pp_async_batch_depth", "0"),
        ("attention_backend", "fa3"),
        ("attention_backend", "FLASHINFER"),
        ("trust_remote_code", True),
        ("grammar_backend", "xgrammar"),
    ],
)
def test_a_flag_in_force_changes_nothing_and_makes_a_note(key: str, value: object) -> None:
    loaded = load_config([flag(key, value)])
    assert all(value.source == "default" for value in loaded.values)
    (note,) = loaded.notes
    assert note.startswith(as_flag(key))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("kv_cache_dtype", "nvfp4", "quantized types of a KV cache are fp8_e4m3 and fp8_e5m2"),
        ("quantization", "bitsandbytes", "awq, gptq, compressed-tensors, fp8 and GGUF"),
        ("pp_max_micro_batch_size", "8", "--max-running-requests"),
        ("pp_async_batch_depth", "2", "a step for each stage is in flight"),
        ("enable_dynamic_chunking", True, "--chunked-prefill-size tokens"),
        ("speculative_method", "medusa", "not supported"),
        ("dtype", "half", "bfloat16"),
    ],
)
def test_an_unsupported_flag_is_refused_with_the_reason(key: str, value: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config([flag(key, value)])


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("is_embedding", True, ("pooling", "auto", "auto")),
        ("task", "embed", ("pooling", "embed", "auto")),
        ("task", "classify", ("pooling", "classify", "auto")),
        ("task", "score", ("pooling", "auto", "auto")),
        ("task", "generate", ("generate", "auto", "auto")),
        ("task", "auto", ("auto", "auto", "auto")),
        ("pooler_config", '{"seq_pooling_type": "MEAN"}', ("auto", "auto", "mean")),
        ("override_pooler_config", {"pooling_type": "LAST", "normalize": None}, ("auto", "auto", "last")),
        ("pooler_config", "{}", ("auto", "auto", "auto")),
    ],
)
def test_what_a_model_is_for(key: str, value: object, expected: tuple[str, str, str]) -> None:
    engine = load_config([flag(key, value)]).engine
    assert (engine.runner, engine.convert, engine.pooling) == expected


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("task", "transcription", "--task transcription is refused: a model is for generate, embed"),
        (
            "pooler_config",
            '{"pooling_type": "STEP"}',
            "pooling_type STEP is refused: LAST, MEAN",
        ),
        ("pooler_config", '{"normalize": true}', "normalize is refused: a request says"),
        ("pooler_config", '{"poling_type": "LAST"}', "did you mean"),
        ("hf_overrides", "[1]", "--hf-overrides must be a mapping, got \\[1\\]"),
        ("hf_overrides", "{", "--hf-overrides is not valid JSON"),
    ],
)
def test_what_no_model_is_for(key: str, value: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config([flag(key, value)])


def test_a_foreign_switch_may_set_one_of_our_settings() -> None:
    assert load_config([flag("enable_chunked_prefill", False)]).engine.chunked_prefill_size == -1
    assert load_config([flag("async_scheduling", False)]).engine.disable_overlap_schedule is True
    assert load_config([flag("enable_prefix_caching", False)]).engine.disable_radix_cache is True
    assert load_config([flag("enable_priority_scheduling", True)]).engine.schedule_policy == "priority"
    quiet = load_config([flag("disable_log_stats", True)])
    assert quiet.engine.log_level == "warning"
    assert quiet.notes == ("--disable-log-stats: sets log_level=warning",)


def test_a_switch_must_be_true_or_false() -> None:
    with pytest.raises(ConfigError, match="must be true or false, got 'yes'"):
        load_config([GivenSetting("enable_metrics", "yes", "yaml", "x.yaml:1: enable_metrics")])


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("guided_decoding_backend", "auto"),
        ("grammar_backend", "llguidance"),
        ("structured_outputs_config", '{"backend": "guidance", "disable_fallback": false, "reasoning_parser": null}'),
        ("structured_outputs_config", {"backend": "auto"}),
    ],
)
def test_grammars_are_held_by_llguidance(written: str, value: object) -> None:
    loaded = load_config([flag(written, value)])
    assert [value for value in loaded.values if value.source != "default"] == []
    assert ["held by llguidance" in note for note in loaded.notes] == [True]


@pytest.mark.parametrize(
    ("written", "value", "says"),
    [
        ("structured_outputs_config", '{"disable_any_whitespace": true}', "a request asks for it"),
        ("structured_outputs_config", '{"backed": "auto"}', "did you mean backend"),
        ("structured_outputs_config", "auto", "is not valid JSON"),
        ("guided_decoding_disable_any_whitespace", True, "a request asks for it"),
    ],
)
def test_how_grammars_are_held_is_no_choice_of_the_server(written: str, value: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config([flag(written, value)])
