import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config.explain import as_rows
from jaxserve.config.load import GivenSetting, from_arguments, load_config
from jaxserve.config.schema import EngineConfig
from jaxserve.config.server_schema import ServerConfig
from jaxserve.errors import ConfigError


def flag(name: str, value: object) -> GivenSetting:
    return GivenSetting(name.removeprefix("--").replace("-", "_"), value, "flag", name)


@pytest.fixture
def yaml_file(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "profile.yaml"
        path.write_text(text)
        return path

    return write


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        load_config([], path)
    return str(raised.value)


def test_without_input_all_values_are_defaults() -> None:
    loaded = load_config()
    assert (loaded.engine, loaded.server) == (EngineConfig(), ServerConfig())


def test_yaml_overrides_defaults_and_flags_override_yaml(yaml_file) -> None:
    path = yaml_file("page_size: 32\nmax-running-requests: 8\nport: 9000\n")
    loaded = load_config([flag("--page-size", "64")], path)
    engine, server = loaded.engine, loaded.server
    assert (engine.page_size, engine.max_running_requests, server.port) == (64, 8, 9000)


def test_a_flag_under_another_name_overrides_yaml_too(yaml_file) -> None:
    engine = load_config([flag("--max-num-seqs", "4")], yaml_file("max_running_requests: 8\n")).engine
    assert engine.max_running_requests == 4


def test_yaml_may_use_other_engines_names(yaml_file) -> None:
    loaded = load_config([], yaml_file("gpu-memory-utilization: 0.5\nenable_chunked_prefill: true\n"))
    assert loaded.engine.mem_fraction_static == 0.5
    assert len(loaded.notes) == 1


def test_every_kind_of_value_in_yaml(yaml_file) -> None:
    path = yaml_file(
        "model: a/b\nmem_fraction_static: 1\ncuda_graph_bs: [1, 2]\ndisable_overlap_schedule: true\ncontext_length:\n"
    )
    engine = load_config([], path).engine
    assert engine == EngineConfig(
        model="a/b", mem_fraction_static=1.0, cuda_graph_bs=(1, 2), disable_overlap_schedule=True, context_length=None
    )


def test_fields_of_a_config_are_json_or_a_mapping(yaml_file) -> None:
    fields = {"architectures": ["LlamaModel"], "text_config": {"num_labels": 1}}
    flags = load_config([flag("--hf-overrides", json.dumps(fields))])
    path = yaml_file("hf_overrides:\n  architectures: [LlamaModel]\n  text_config: {num_labels: 1}\n")
    in_a_call = from_arguments([("hf_overrides", fields)])
    assert flags.engine.hf_overrides == fields == load_config([], path).engine.hf_overrides
    assert in_a_call.engine == flags.engine
    row = next(row for row in as_rows(flags) if row["key"] == "hf_overrides")
    assert json.loads(json.dumps(row["value"])) == fields


def test_an_empty_file_sets_nothing(yaml_file) -> None:
    assert load_config([], yaml_file("# nothing\n")) == load_config()


def test_a_wrong_key_names_file_line_and_the_nearest_right_one(yaml_file) -> None:
    path = yaml_file("port: 1\nmax_runing_requests: 8\n")
    assert refused(path) == (
        f"{path}:2: max_runing_requests is not a known setting; did you mean max_running_requests?"
    )


def test_a_wrong_type_names_file_line_and_what_it_must_be(yaml_file) -> None:
    path = yaml_file("page_size: '16'\n")
    assert refused(path) == f"{path}:1: page_size must be a whole number, got '16'"


def test_a_duplicate_key_is_refused(yaml_file) -> None:
    path = yaml_file("page_size: 16\npage-size: 32\n")
    assert "is a duplicate of" in refused(path)


@pytest.mark.parametrize("text", ["- page_size\n", "page_size", "a: [1\n", "engine:\n  page_size: 16\n"])
def test_a_file_that_is_no_flat_mapping_is_refused(yaml_file, text: str) -> None:
    path = yaml_file(text)
    assert str(path) in refused(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "can't be read" in refused(tmp_path / "none.yaml")


def test_a_value_out_of_range_is_refused_by_the_schema(yaml_file) -> None:
    assert refused(yaml_file("page_size: 3\n")) == "page_size must be a power of two, got 3"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"disable_radix_cache": True}, "that disable_radix_cache disables; keep one"),
        ({"hicache_ratio": 0.0}, "hicache_ratio must be more than 0, got 0.0"),
        ({"hicache_size": -1.0}, "hicache_size must be more than 0, got -1.0"),
        ({"hicache_host_memory_fraction": 1.1}, "hicache_host_memory_fraction must be at most 1.0, got 1.1"),
        (
            {"hicache_host_memory_fraction": 0.5, "hicache_size": 4.0},
            "hicache_host_memory_fraction=0.5 and hicache_size=4 both size the pages in host memory; keep one",
        ),
        ({"hicache_host_memory_fraction": 0.5, "hicache_ratio": 3.0}, "=0.5 and hicache_ratio=3 both size"),
        (
            {"enable_hierarchical_cache": False, "hicache_host_memory_fraction": 0.5},
            "hicache_host_memory_fraction and hicache_write_policy need enable_hierarchical_cache",
        ),
        ({"enable_hierarchical_cache": False, "hicache_size": 4.0}, "need enable_hierarchical_cache"),
        ({"enable_hierarchical_cache": False, "hicache_write_policy": "write_back"}, "need enable_hierarchical_cache"),
    ],
)
def test_a_tier_in_host_memory_needs_a_cache_and_a_size(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{"enable_hierarchical_cache": True} | given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"swa_full_tokens_ratio": 0.0}, "swa_full_tokens_ratio must be more than 0, got 0.0"),
        ({"swa_full_tokens_ratio": 1.1}, "swa_full_tokens_ratio must be at most 1.0, got 1.1"),
        (
            {"swa_full_tokens_ratio": 0.5, "disable_hybrid_swa_memory": True},
            "swa_full_tokens_ratio=0.5 .* disable_hybrid_swa_memory .* keep one",
        ),
    ],
)
def test_a_cache_is_divided_by_a_share_or_not_at_all(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**given)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_scales_are_calculated_only_for_an_fp8_cache(kv_cache_dtype: Any) -> None:
    with pytest.raises(ConfigError, match="calculate_kv_scales needs an fp8 KV cache: set kv_cache_dtype"):
        EngineConfig(calculate_kv_scales=True)
    assert EngineConfig(calculate_kv_scales=True, kv_cache_dtype=kv_cache_dtype).calculate_kv_scales
    with pytest.raises(ConfigError, match="calculate_kv_scales runs all layers at once, and pp_size=2 divides them"):
        EngineConfig(calculate_kv_scales=True, kv_cache_dtype=kv_cache_dtype, pp_size=2)


def test_a_repeated_flag_counts_as_last_written() -> None:
    assert load_config([flag("--page-size", "16"), flag("--page-size", "32")]).engine.page_size == 32


def test_two_names_for_one_setting_must_agree() -> None:
    same = [flag("--max-num-seqs", "8"), flag("--max-running-requests", "8")]
    assert load_config(same).engine.max_running_requests == 8
    with pytest.raises(ConfigError, match=r"--max-running-requests and --max-num-seqs both set max_running_requests"):
        load_config([flag("--max-num-seqs", "8"), flag("--max-running-requests", "16")])


def test_where_each_value_came_from(yaml_file) -> None:
    path = yaml_file("page_size: 32\nseed: 3\n")
    values = {value.setting.name: value for value in load_config([flag("--tp", "1")], path).values}
    assert (values["page_size"].source, values["page_size"].place) == ("yaml", f"{path}:1: page_size")
    assert (values["random_seed"].source, values["random_seed"].alias) == ("yaml", "seed")
    assert (values["tp_size"].source, values["tp_size"].place, values["tp_size"].alias) == ("flag", "--tp", "tp")
    assert values["port"].source == "default"


def test_arguments_of_a_call_have_their_own_types() -> None:
    loaded = from_arguments([("max_num_seqs", 8), ("enable_chunked_prefill", True), ("cuda_graph_bs", [1, 2])])
    assert (loaded.engine.max_running_requests, loaded.engine.cuda_graph_bs) == (8, (1, 2))
    with pytest.raises(ConfigError, match="page_size must be a whole number, got '16'"):
        from_arguments([("page_size", "16")])
    with pytest.raises(ConfigError, match="max_num_seq is not a known setting; did you mean max_num_seqs"):
        from_arguments([("max_num_seq", 8)])


@pytest.mark.parametrize("value", ["1" * 5000, "2026-99-99", "[" * 100_000])
def test_a_value_that_yaml_cannot_construct_is_refused(value: str, tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_text(f"page_size: {value}\n")
    with pytest.raises(ConfigError, match=str(path)):
        load_config([], path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device_ids": ()}, r"device_ids must be different numbers from 0, such as 2,3; got \[\]"),
        ({"device_ids": (2, 2)}, r"device_ids must be different numbers from 0, such as 2,3; got \[2, 2\]"),
        ({"device_ids": (-1,)}, r"got \[-1\]"),
        (
            {"device_ids": (2, 3), "gpu_id_step": 2},
            "device_ids=2,3 and base_gpu_id=0 with gpu_id_step=2 both choose devices; keep one",
        ),
        ({"base_gpu_id": -1}, "base_gpu_id must be at least 0, got -1"),
        ({"gpu_id_step": 0}, "gpu_id_step must be at least 1, got 0"),
        (
            {"long_prefill_token_threshold": 64, "chunked_prefill_size": -1},
            "long_prefill_token_threshold=64 computes prompts in parts, and chunked_prefill_size=-1 asks for none",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**given)


@pytest.mark.parametrize("token", ["", "hf_secret\n", "hf secret"])
def test_what_can_be_no_token_is_refused_and_not_repeated(token: str) -> None:
    with pytest.raises(ConfigError, match="hf_token must be a token") as caught:
        EngineConfig(hf_token=token)
    assert "secret" not in str(caught.value)


def test_a_token_is_masked_for_others() -> None:
    assert EngineConfig(hf_token="hf_secret").masked() == EngineConfig(hf_token="***")
    assert EngineConfig().masked() == EngineConfig()
