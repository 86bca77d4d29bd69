"""`jaxserve plan` from the command line, for devices that aren't here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli.main import main
from jaxserve.observability import log
from tests.cli.model_folder import write_config
from tests.models.hub_configs import GEMMA_3_27B

GIB = 2**30


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(log, "setup", lambda *given, **named: None)
    return write_config(tmp_path / "config.json")


def _plan(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["plan", *argv, "--json"]) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    return plan


def test_an_8b_on_an_h200(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = _plan(capsys, llama, "--target", "nvidia-h200")
    assert plan["weight_bytes"] / GIB == pytest.approx(14.96, abs=0.01)
    assert plan["kv_bytes_per_token"] == 2 * 32 * 8 * 128 * 2
    assert plan["context_length"] == 131072
    assert plan["misfits"] == []
    used = plan["weight_bytes"] + plan["state_bytes"] + plan["temp_bytes"]
    room = (plan["usable_bytes"] - used) // plan["kv_bytes_per_token"]
    assert 0 <= room - plan["max_total_num_tokens"] < 16


def test_the_limits_are_those_of_bandwidth_and_peak(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = _plan(capsys, llama, "--target", "nvidia-h200")
    limits = {(row["batch"], row["context"]): row["limit"] for row in plan["decode_tokens_per_second"]}
    # All weights but the embedding, and the KV of one request, once a token.
    weights = plan["weight_bytes"] - 128256 * 4096 * 2
    assert limits[1, 1024] == pytest.approx(4.8e12 / (weights + 1024 * plan["kv_bytes_per_token"]))
    assert limits[256, 1024] > limits[128, 1024] > 128 * limits[1, 1024] / 10
    assert (256, 131072) not in limits
    [first, *_] = plan["prefill_tokens_per_second"]
    assert first["limit"] == pytest.approx(989e12 / (2 * 6.98e9 + 512 * 4 * 32 * 128 * 32), rel=0.01)


_LINEAR, _OUTPUTS = 32 * (2 * 4096 + 2 * 1024 + 3 * 14336) * 4096, 32 * (3 * 4096 + 2 * 1024 + 2 * 14336)
_OTHERS = 2 * 128256 * 4096 * 2 + 65 * 4096 * 2  # embedding, head, norms
_ACTIVATIONS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
_W8A8 = {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}, "input_activations": _ACTIVATIONS}


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, _LINEAR // 2 + _LINEAR // 128 * 4),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}, _LINEAR + _LINEAR // 128 * 4),
        (
            {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": _W8A8}}
            | {"ignore": ["lm_head"]},
            _LINEAR + _OUTPUTS * 4,
        ),
    ],
    ids=["awq", "blocks of fp8", "w8a8"],
)
def test_a_config_tells_the_bytes_of_quantized_weights(
    config: dict[str, Any], size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path / "config.json", quantization_config=config)
    plan = _plan(capsys, path, "--target", "nvidia-h200")
    assert (plan["quantization"], plan["weight_bytes"]) == (config["quant_method"], size + _OTHERS)
    assert plan["not_quantized"] == {"output": "stored as 16 bits"}


def test_what_is_not_quantized_is_told_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}
    path = write_config(tmp_path / "config.json", quantization_config=gptq)
    assert main(["plan", path, "--target", "nvidia-h200", "--tp-size", "2"]) == 0
    text = capsys.readouterr().out
    assert "gptq, 64 of 129 linear layers in 4 bits" in text
    assert "not quantized: layers.0.attention.output, layers.0.mlp.down" in text
    assert "(act-order) can't be divided among shards; output: stored as 16 bits" in text


def test_shards_leave_more(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    one, four = (_plan(capsys, llama, "--target", "tpu-v6e", "--tp-size", str(size)) for size in (1, 4))
    assert four["devices"] == 4
    assert four["kv_bytes_per_token"] * 4 == one["kv_bytes_per_token"]
    assert four["max_total_num_tokens"] > 4 * one["max_total_num_tokens"]


def test_ranks_are_as_many_pools_and_batches(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = (llama, "--target", "nvidia-h200", "--tp-size", "2")
    one, four = (_plan(capsys, *argv, "--dp-size", str(size)) for size in (1, 4))
    assert (four["devices"], four["dp_size"], four["tp_size"]) == (8, 4, 2)
    for name in ("weight_bytes", "kv_bytes_per_token", "temp_bytes", "context_length"):
        assert four[name] == one[name]
    for name in ("max_total_num_tokens", "num_pages", "max_running_requests"):
        assert four[name] == 4 * one[name]
    limits = {(row["batch"], row["context"]): row["limit"] for row in four["decode_tokens_per_second"]}
    alone = {(row["batch"], row["context"]): row["limit"] for row in one["decode_tokens_per_second"]}
    assert limits[256, 1024] == pytest.approx(4 * alone[64, 1024])
    assert limits[1, 1024] == pytest.approx(alone[1, 1024])
    assert limits[1024, 1024] == pytest.approx(4 * alone[256, 1024])
    prefill = [plan["prefill_tokens_per_second"][0]["limit"] for plan in (one, four)]
    assert prefill[1] == pytest.approx(4 * prefill[0])
    assert main(["plan", *argv, "--dp-size", "4"]) == 0
    assert "on 8 x nvidia-h200, 4 replicas x tensor parallel 2" in capsys.readouterr().out
    assert main(["plan", *argv, "--dp-size", "4", "--dp-mode", "mesh"]) == 0
    assert "on 8 x nvidia-h200, data parallel 4 x tensor parallel 2" in capsys.readouterr().out


def test_layers_with_windows_leave_room_for_more_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GEMMA_3_27B))
    argv = (str(path), "--target", "nvidia-h200", "--context-length", "32768")
    plan = _plan(capsys, *argv)
    whole = _plan(capsys, *argv, "--disable-hybrid-swa-memory")
    assert plan["max_total_num_tokens"] >= 4.5 * whole["max_total_num_tokens"]
    full, window = plan["kv_groups"]
    assert [(one["layers"], one["window"]) for one in (full, window)] == [(10, None), (52, 1024)]
    assert (full["kv_heads"], full["head_dim"]) == (16, 128)
    assert full["tokens"] == 16 * full["num_pages"] == plan["max_total_num_tokens"]
    assert full["bytes_per_token"] + window["bytes_per_token"] == plan["kv_bytes_per_token"] == 62 * 8192
    [alone] = whole["kv_groups"]
    assert (alone["layers"], alone["window"], alone["bytes_per_token"]) == (62, None, 62 * 8192)
    # A request holds 1,024 tokens of the window, which begin and end within a page, however long it is.
    most = {one["context"] for one in plan["decode_tokens_per_second"] if one["batch"] == 32}
    assert {1024, 4096, 16384} <= most
    limits = {(one["batch"], one["context"]): one["limit"] for one in plan["decode_tokens_per_second"]}
    read = plan["weight_bytes"] + 81920 * 16384 + 52 * 8192 * 1024
    assert limits[1, 16384] == pytest.approx(4.8e12 / read)
    assert main(["plan", *argv]) == 0
    text = capsys.readouterr().out
    assert (
        f"KV pool of 52 layers with a window of 1,024  {window['bytes_per_token'] * window['tokens'] / GIB:.2f}" in text
    )
    assert "a token: 80.0 KiB of 10 layers, 416.0 KiB of 52 layers with a window of 1,024" in text


def test_each_stage_has_its_own_layers_devices_and_memory(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = (llama, "--target", "nvidia-h200", "--tp-size", "2")
    whole = _plan(capsys, *argv)
    plan = _plan(capsys, *argv, "--pp-size", "3", "--pp-layer-partition", "10,10,12")
    assert (plan["devices"], plan["pp_size"], plan["tp_size"], whole["pp_size"]) == (6, 3, 2, 1)
    stages = plan["stages"]
    assert [one["layers"] for one in stages] == [[0, 9], [10, 19], [20, 31]]
    assert [one["devices"] for one in stages] == [[0, 1], [2, 3], [4, 5]]
    for name in ("weight_bytes", "kv_bytes_per_token"):
        assert sum(one[name] for one in stages) == whole[name]
    for one in stages:
        used = sum(one[name] for name in ("weight_bytes", "state_bytes", "temp_bytes", "pool_bytes"))
        assert used + one["left_bytes"] == plan["usable_bytes"]
        assert one["pool_bytes"] == one["kv_bytes_per_token"] * plan["max_total_num_tokens"]
    assert min(one["left_bytes"] for one in stages) >= 0
    assert plan["weight_bytes"] == stages[2]["weight_bytes"], "that of the fullest"
    limits = {(row["batch"], row["context"]): row for row in plan["decode_tokens_per_second"]}
    alone = {(row["batch"], row["context"]): row for row in whole["decode_tokens_per_second"]}
    assert limits[1, 1024]["limit"] == pytest.approx(alone[1, 1024]["limit"])
    assert limits[1, 1024]["step_seconds"] == pytest.approx(1 / limits[1, 1024]["limit"])
    assert limits[256, 1024]["limit"] > alone[256, 1024]["limit"]
    assert main(["plan", *argv, "--pp-size", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "on 6 x nvidia-h200, 3 stages x tensor parallel 2" in lines[0]
    start = next(number for number, line in enumerate(lines) if line.startswith("stage"))
    held = [line.split()[:3] for line in lines[start + 1 : start + 4]]
    assert held == [["0", "0-10", "0-1"], ["1", "11-21", "2-3"], ["2", "22-31", "4-5"]]
    assert any("1 of 3 parts of the batch; through all stages it takes at best" in line for line in lines)


def test_a_model_that_does_not_fit_is_told_how_many_stages_help(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", llama, "--target", "tpu-v5e", "--pp-size", "2", "--dtype", "float32"]) == 2
    error = capsys.readouterr().err
    assert "stage 0 of 2, with layers 0 to 15: no memory is left" in error
    assert "--tp-size 2 or --pp-size 3 or --dtype bfloat16 makes room" in error
    assert _plan(capsys, llama, "--target", "tpu-v5e", "--pp-size", "3", "--dtype", "float32")["max_total_num_tokens"]


@pytest.mark.parametrize("mode", ["replicas", "mesh"])
def test_ranks_in_either_form_share_one_machine(llama: str, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = (llama, "--target", "nvidia-h200", "--tp-size", "2", "--dp-mode", mode)
    assert main(["plan", *argv, "--dp-size", "8"]) == 2
    assert "tp_size=2 and dp_size=8 take 16 devices, and there are 8" in capsys.readouterr().err


def test_a_model_that_does_not_fit_is_refused_with_a_flag_that_helps(
    llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["plan", llama, "--target", "tpu-v5e"]
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert "no memory is left for the KV cache: 14.96 GiB of weights" in error
    assert "--tp-size 2 or --pp-size 2 makes room" in error
    assert _plan(capsys, *argv[1:], "--tp-size", "2")["max_total_num_tokens"] > 0


def test_a_context_that_is_cut_is_told_with_what_would_hold_it(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [llama, "--target", "nvidia-l4"]
    plan = _plan(capsys, *argv)
    [misfit] = plan["misfits"]
    assert f"cut to the {plan['context_length']:,}" in misfit["what"]
    assert misfit["fixes"][0] == "--tp-size 2"
    for fix in misfit["fixes"]:
        assert not _plan(capsys, *argv, *fix.split()[:2])["misfits"]


def test_the_text_says_it_all(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", llama, "--target", "nvidia-l40s", "--max-running-requests", "32"]) == 0
    text = capsys.readouterr().out
    for part in (
        "weights",
        "14.96",
        "estimated",
        "KV pool",
        "a token: 128.0 KiB of 32 layers",
        "32 requests",
        "362 TFLOP/s",
    ):
        assert part in text
    assert main(["plan", llama, "--target", "nvidia-l4"]) == 0
    assert "doesn't fit: a request of 131,072 tokens" in capsys.readouterr().out


def test_float32_has_no_known_peak_rate(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", llama, "--target", "nvidia-h200", "--dtype", "float32"]) == 0
    assert "the peak rate of float32 on this device is unknown" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "name the device: --target {nvidia-a100-80,"),
        (["--target", "nvidia-h20"], "target 'nvidia-h20' is not known; did you mean nvidia-h200?"),
        (["--target", "nvidia-h200", "--tp-size", "16"], "take 16 devices, and there are 8; what fits: --tp-size 8"),
        (["--target", "nvidia-h200", "--tp-size", "3"], "the nearest that can: --tp-size 2 or --tp-size 4"),
        (["--target", "tpu-v6e", "--device", "cuda"], "device=cuda and target 'tpu-v6e', which is tpu: leave one out"),
        (["--target", "nvidia-h200", "--context-length", "200000"], "context_length=200000 is longer than the model's"),
    ],
)
def test_user_errors(argv: list[str], line: str, llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", llama, *argv]) == 2
    assert line in capsys.readouterr().err
