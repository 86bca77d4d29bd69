from pathlib import Path

import pytest

from jaxserve.cli import serve
from jaxserve.cli.common import flags
from jaxserve.config.load import LoadedConfig
from jaxserve.config.other_engines import ForeignFlag, foreign_flags
from jaxserve.config.settings import Setting, as_flag, settings
from jaxserve.errors import ConfigError
from jaxserve.observability import log

PARSER = serve.parser()


def loaded(*argv: str) -> LoadedConfig:
    return flags.config_from_arguments(PARSER.parse(argv))


EXAMPLES = {bool: None, int: "16", float: "0.5", str: "text"}
# Settings that need other settings.
NEEDS = {
    "calculate_kv_scales": ["--kv-cache-dtype=fp8"],
    "enable_dp_attention": ["--dp-size=16"],
    "num_speculative_tokens": ["--speculative-method=ngram"],
    "prompt_lookup_max": ["--speculative-method=ngram"],
    "prompt_lookup_min": ["--speculative-method=ngram"],
    "speculative_disable_by_batch_size": ["--speculative-method=ngram"],
    **{
        name: ["--schedule-policy=priority"]
        for name in (
            "schedule_low_priority_values_first",
            "default_priority_value",
            "disable_priority_preemption",
            "priority_scheduling_preemption_threshold",
        )
    },
    "fingerprint_value": ["--fingerprint-mode=custom"],
    "hicache_ratio": ["--enable-hierarchical-cache"],
    "hicache_size": ["--enable-hierarchical-cache"],
    "hicache_host_memory_fraction": ["--enable-hierarchical-cache"],
    "hicache_write_policy": ["--enable-hierarchical-cache"],
    "speculative_model": ["--speculative-method=draft"],
    **{
        name: ["--ssl-certfile=a.pem"]
        for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs", "ssl_ciphers", "enable_ssl_refresh")
    },
    "ssl_cert_reqs": ["--ssl-certfile=a.pem", "--ssl-ca-certs=b.pem"],
    **{name: ["--allowed-origins=*"] for name in ("allowed_methods", "allowed_headers", "allow_credentials")},
    **{name: ["--log-requests"] for name in ("log_requests_level", "log_requests_target", "max_log_len")},
    "dist_init_addr": ["--nnodes=16", "--dp-size=16"],
    "nnodes": ["--dist-init-addr=host:5000", "--dp-size=16"],
    "node_rank": ["--dist-init-addr=host:5000", "--dp-size=32", "--nnodes=32"],
}


VALUES = {
    "dist_init_addr": "host:5000",
    "pp_layer_partition": "memory",
    "prompt_lookup_max": "5",
    "prompt_lookup_min": "3",
    "kv_events_config": '{"publisher": "zmq"}',
    "hf_overrides": '{"num_labels": 1}',
    "ssl_cert_reqs": "1",
    "log_requests_level": "2",
    "root_path": "/llm",
    "access_log_exclude": "/v1",
    "extra_metric_labels": '{"zone": "a"}',
    "custom_histogram_buckets": '{"time_to_first_token_seconds": [0.1]}',
    "metrics_prefix": "vllm",
    "override_generation_config": '{"top_k": 1}',
}


def example(setting: Setting) -> list[str]:
    if setting.is_switch:
        return []
    if setting.choices:
        return [setting.choices[0]]
    return [VALUES.get(setting.name, EXAMPLES.get(setting.kind, '{"a": 1}' if setting.is_mapping else "16"))]


@pytest.mark.parametrize("name", list(settings()))
def test_every_setting_has_a_flag(name: str) -> None:
    setting = settings()[name]
    needed = NEEDS.get(name, [])
    given = [
        value.setting for value in loaded(setting.flag, *example(setting), *needed).values if value.source == "flag"
    ]
    assert setting in given
    assert len(given) == 1 + len(needed)


TAKEN = [
    (name, flag) for name, flag in foreign_flags().items() if flag.meaning.sets in settings() and name not in settings()
]


@pytest.mark.parametrize(("name", "flag"), TAKEN, ids=[name for name, _ in TAKEN])
def test_every_other_name_sets_our_setting(name: str, flag: ForeignFlag) -> None:
    setting = settings()[flag.meaning.sets]
    values = example(setting)
    is_fixed = bool(values) and values[0].lower() in flag.known
    mapping, *key = name.split(".")
    got = loaded(".".join([as_flag(mapping), *key]), *values, *NEEDS.get(setting.name, []))
    assert is_fixed or [value.alias for value in got.values if value.setting == setting] == [name]


def test_every_name_of_the_table_is_a_flag() -> None:
    known = set(PARSER._option_string_actions)
    for name, flag in foreign_flags().items():
        if "." not in name:
            assert as_flag(name) in known, name
            assert (f"--no-{name.replace('_', '-')}" in known) == (flag.kind == "switch"), name


FIXED = [
    (flag, value)
    for flag in {flag.key: flag for flag in foreign_flags().values()}.values()
    for value, meaning in flag.known.items()
    if meaning.answer == "taken" and "." not in flag.key
]


@pytest.mark.parametrize(("flag", "value"), FIXED, ids=[f"{flag.key}={value}" for flag, value in FIXED])
def test_every_value_of_the_table_sets_what_it_says(flag: ForeignFlag, value: str) -> None:
    expected = flag.known[value].values
    word = [f"--no-{as_flag(flag.key)[2:]}"] if value == "off" else [as_flag(flag.key), value]
    needed = [part for name in expected for part in NEEDS.get(name, []) if part.split("=")[0][2:] not in expected]
    if expected.get("speculative_method") == "draft":
        needed.append("--speculative-model=small")
    assert expected.items() <= {value.setting.name: value.value for value in loaded(*word, *needed).values}.items()


def test_switches_come_in_pairs() -> None:
    assert loaded("--disable-overlap-schedule").engine.disable_overlap_schedule is True
    assert (
        loaded("--disable-overlap-schedule", "--no-disable-overlap-schedule").engine.disable_overlap_schedule is False
    )
    assert loaded("--no-enable-chunked-prefill").engine.chunked_prefill_size == -1


def test_a_switch_on_the_command_line_goes_over_yaml(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text("disable_program_cache: true\npage_size: 32\n")
    both = loaded("--config", str(path), "--no-disable-program-cache")
    assert (both.engine.disable_program_cache, both.engine.page_size) == (False, 32)


def test_the_command_lines_of_the_guides() -> None:
    vllm = loaded(
        "folder", "--block-size", "16", "--gpu-memory-utilization", "0.9", "--max-num-seqs", "512",
        "--max-model-len=2048", "--enable-chunked-prefill", "--disable-log-requests", "-tp", "1", "--swap-space", "4",
    )  # fmt: skip
    assert vllm.engine.model == "folder"
    assert vllm.engine.max_running_requests == 512
    assert [note.split(":")[0] for note in vllm.notes] == [
        "--enable-chunked-prefill",
        "--disable-log-requests",
        "--swap-space 4",
    ]
    sglang = loaded(
        "--model-path", "folder", "--mem-fraction-static", "0.8", "--chunked-prefill-size", "-1",
        "--max-running-requests", "64", "--cuda-graph-max-bs", "512", "--schedule-policy", "fcfs", "--host", "0.0.0.0",
    )  # fmt: skip
    assert sglang.engine.chunked_prefill_size == -1
    assert sglang.server.host == "0.0.0.0"


def test_sizes_are_given_apart_or_with_commas() -> None:
    assert loaded("--cuda-graph-bs", "1", "2", "4").engine.cuda_graph_bs == (1, 2, 4)
    assert loaded("--cuda-graph-sizes", "1,2,4").engine.cuda_graph_bs == (1, 2, 4)


def test_keys_in_many_levels_are_an_error() -> None:
    with pytest.raises(ConfigError, match="--hf-overrides is nested too deeply"):
        loaded(f"--hf-overrides{'.a' * 20_000}", "1")
    assert loaded("--hf-overrides.a", "[" * 20_000).engine.hf_overrides == {"a": "[" * 20_000}


def test_llm_arguments_are_the_given_engine_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, str | None]] = []
    monkeypatch.setattr(log, "setup", lambda level, config_file: made.append((level, config_file)))
    given = loaded("folder", "--seed", "1", "--port", "9000", "--chat-template", "file", "--enable-metrics")
    assert flags.llm_arguments(given) == {"model": "folder", "random_seed": 1, "chat_template": "file"}
    assert made == [("warning", None)]
    assert flags.llm_arguments(loaded("--log-level", "debug", "--log-config-file", "f")) == {"log_level": "debug"}
    assert made[1:] == [("debug", "f")]
