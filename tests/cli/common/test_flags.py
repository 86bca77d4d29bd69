from pathlib import Path

import pytest

from jaxserve.cli import serve
from jaxserve.cli.common import flags
from jaxserve.config.aliases import ALIASES, Alias, RenameAlias, SwitchAlias
from jaxserve.config.load import LoadedConfig
from jaxserve.config.schema import EngineConfig
from jaxserve.config.settings import as_flag, settings
from jaxserve.observability import log


def loaded(*argv: str) -> LoadedConfig:
    return flags.config_from_arguments(serve.parser().parse(argv))


EXAMPLES = {bool: None, int: "16", float: "0.5", str: "text"}
# Settings that need other settings.
NEEDS = {
    "calculate_kv_scales": ["--kv-cache-dtype=fp8"],
    "enable_dp_attention": ["--dp-size=16"],
    "num_speculative_tokens": ["--speculative-method=ngram"],
    "prompt_lookup_max": ["--speculative-method=ngram"],
    "prompt_lookup_min": ["--speculative-method=ngram"],
    "speculative_disable_by_batch_size": ["--speculative-method=ngram"],
    "hicache_ratio": ["--enable-hierarchical-cache"],
    "hicache_size": ["--enable-hierarchical-cache"],
    "hicache_write_policy": ["--enable-hierarchical-cache"],
    "speculative_model": ["--speculative-method=draft"],
    **{name: ["--allowed-origins=*"] for name in ("allowed_methods", "allowed_headers", "allow_credentials")},
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
    "override_generation_config": '{"top_k": 1}',
}


@pytest.mark.parametrize("name", list(settings()))
def test_every_setting_has_a_flag(name: str) -> None:
    setting = settings()[name]
    text = setting.choices[0] if setting.choices else VALUES.get(name, EXAMPLES.get(setting.kind, "16"))
    argv = [setting.flag] if text is None else [setting.flag, text]
    needed = NEEDS.get(name, [])
    given = [value.setting for value in loaded(*argv, *needed).values if value.source == "flag"]
    assert setting in given
    assert len(given) == 1 + len(needed)


def test_every_name_of_the_table_is_a_flag() -> None:
    known = set(serve.parser()._option_string_actions)
    for name, alias in ALIASES.items():
        assert as_flag(name) in known
        renames_a_switch = isinstance(alias, RenameAlias) and isinstance(getattr(EngineConfig(), alias.to, None), bool)
        is_switch = isinstance(alias, SwitchAlias) or renames_a_switch
        assert (f"--no-{name.replace('_', '-')}" in known) == is_switch
        assert isinstance(alias, Alias)


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


def test_llm_arguments_are_the_given_engine_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[str] = []
    monkeypatch.setattr(log, "setup", levels.append)
    given = loaded("folder", "--seed", "1", "--port", "9000", "--chat-template", "file", "--enable-metrics")
    assert flags.llm_arguments(given) == {"model": "folder", "random_seed": 1, "chat_template": "file"}
    assert levels == ["warning"]
    flags.llm_arguments(loaded("--log-level", "debug"))
    assert levels == ["warning", "debug"]
