import shlex

import pytest

from jaxserve.cli import serve
from jaxserve.cli.common import flags
from jaxserve.cli.translation.launch import launches
from jaxserve.cli.translation.translation import Translation, translate


def translated(text: str) -> Translation:
    [launch] = launches(text)
    return translate(launch)


def ours(text: str) -> str:
    return shlex.join(translated(text).arguments)


def reasons(text: str) -> dict[str, str]:
    return {part.written: part.reason for part in translated(text).parts}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("vllm serve a", "a --host 0.0.0.0"),
        ("vllm serve a --host ::1", "a --host ::1"),
        ("vllm serve --host x", "Qwen/Qwen3-0.6B --host x"),
        ("sglang serve --model-path a", "a --port 30000"),
        ("sglang serve --model-path a --tp 2 --port 1", "a --tp-size 2 --port 1"),
        ("vllm serve a --host x --max_model_len 32k -tp=2", "a --host x --context-length 32000 --tp-size 2"),
        ("vllm serve a --host x --no-enable-prefix-caching", "a --host x --disable-radix-cache"),
        ("vllm serve a --host x --enable-prefix-caching", "a --host x --no-disable-radix-cache"),
        (
            "vllm serve a --host x --cudagraph-capture-sizes 1 2 --seed 3",
            "a --host x --cuda-graph-bs 1 2 --random-seed 3",
        ),
        ("vllm serve a --host x --structured-outputs-config.enable_in_reasoning=False", "a --host x"),
        ("vllm serve a --host x --hf-overrides.b.c 1", 'a --host x --hf-overrides \'{"b": {"c": 1}}\''),
        ("vllm serve a --host x --config f.yaml", "a --host x --config f.yaml"),
        ("vllm serve --config f.yaml", "--config f.yaml"),
        (
            "docker run -v /d:/c -v /e:/c/f vllm/vllm-openai --host x --model /c/f/a --config /c/b --tokenizer /cc",
            "/e/a --host x --tokenizer-path /cc --config /d/b",
        ),
        ("vllm serve a --host x --enable-prefix-caching=false", "a --host x --disable-radix-cache"),
        (
            "vllm serve a --host x --kv-cache-memory-bytes 1G --gpu-memory-utilization 0.9",
            "a --host x --kv-cache-memory-bytes 1073741824",
        ),
        ("env VLLM_CPU_KVCACHE_SPACE=0 vllm serve a --host x", "a --host x"),
        ("env VLLM_CPU_KVCACHE_SPACE=1 vllm serve a --host x", "a --kv-cache-memory-bytes 1073741824 --host x"),
        ("sglang serve --model-path a --port 1 --speculative-algo NEXTN", "a --port 1 --speculative-method mtp"),
        (
            "docker run -p 80:8000 -v /data:/models vllm/vllm-openai --model /models/a",
            "/data/a --host 0.0.0.0 --port 80",
        ),
        ("vllm serve $M --port $PORT -tp ${N} --host x", "'$M' --port '$PORT' --tp-size '${N}' --host x"),
        (
            "sglang serve --model-path a --port 1 --speculative-algorithm EAGLE --speculative-num-steps 3",
            "a --port 1 --speculative-method mtp --num-speculative-tokens 3",
        ),
        (
            "vllm serve a --host x --speculative_model [ngram] --num_speculative_tokens 5",
            "a --host x --num-speculative-tokens 5 --speculative-method ngram",
        ),
        ("command: [vllm, serve, $(A)]\nargs: [--host, x]\nenv: [{name: A, value: b}]", "b --host x"),
        (
            "sglang serve --model-path a --port 1 --tp 8 --dp 4 --enable-dp-attention --max-running-requests 128",
            "a --port 1 --tp-size 8 --dp-size 4 --enable-dp-attention --max-running-requests 32",
        ),
        (
            "sglang serve --model-path a --port 1 --tp 2 --enable-hierarchical-cache --hicache-size 30",
            "a --port 1 --tp-size 2 --enable-hierarchical-cache --hicache-size 60",
        ),
        (
            "vllm serve a --host x --kv-cache-memory-bytes 4G --gpu-memory-utilization 0.9 --kv-offloading-size 1",
            "a --host x --kv-cache-memory-bytes 4294967296 --enable-hierarchical-cache --hicache-size 1.074",
        ),
        ("sglang serve --model-path a --port 1 --context-length 1M", "a --port 1 --context-length 1000000"),
        ("docker run -p 127.0.0.1:8000:8000 vllm/vllm-openai --model a", "a --host 127.0.0.1"),
    ],
)
def test_the_command_line_of_jaxserve(text: str, expected: str) -> None:
    assert ours(text) == expected
    assert translated(text).refused == []
    if "--config" not in expected and "$" not in expected:
        flags.config_from_arguments(serve.parser().parse(shlex.split(expected)))


def test_what_is_refused_is_left_out_with_the_reason() -> None:
    text = "vllm serve a b --host x --dtype half --max-num-sequences 3 --max-num-seqs"
    assert ours(text) == "a --host x"
    assert reasons(text) == {
        "b": "it belongs to no flag",
        "--dtype half": "the 16-bit type is bfloat16: --dtype bfloat16",
        "--max-num-sequences 3": "it is not known; did you mean --max-num-seqs?",
        "--max-num-seqs": "it needs a value",
    }
    assert len(translated(text).refused) == 4


def test_what_is_in_force_has_a_note() -> None:
    text = "vllm serve a --host x --enable-chunked-prefill --no-enable-chunked-prefill"
    assert ours(text) == "a --host x --chunked-prefill-size -1"
    assert translated(text).refused == []
    assert reasons("vllm serve a --host x --swap-space 4")["--swap-space 4"].startswith("a preempted request")


def test_settings_that_do_not_go_together_are_said() -> None:
    [part] = translated("sglang serve --model-path a --port 1 --page-size 3").refused
    assert (part.written, part.reason) == ("all together", "page_size must be a power of two, got 3")


def test_no_model_is_named() -> None:
    [part] = translated("sglang serve --port 1").refused
    assert part.reason == "no model is named"


def test_a_value_that_must_be_that_of_another_flag_is_refused() -> None:
    text = "vllm serve a --host x --data-parallel-size 16 --data-parallel-size-local"
    [part] = translated(f"{text} 8").refused
    assert part.written == "--data-parallel-size-local 8"
    assert part.reason.startswith("--data-parallel-size-local must be dp_size=16, got 8: replicas are all on this node")
    assert translated(f"{text} 16").refused == []


@pytest.mark.parametrize(
    ("text", "expected", "written", "reason"),
    [
        ("--served-model-name b c --model a", "a --served-model-name b", "--served-model-name c", "one is taken: b"),
        ("a --api-key b c", "a --api-key b", "--api-key c", "one is taken: b"),
        ("a --enforce-eager=2", "a", "--enforce-eager=2", "it takes no value"),
        ("--enforce-eager True --model a", "a", "True", "it belongs to no flag"),
        ("a --model=b", "a", "--model b", "the model is a, which comes first"),
        ("a --model b", "a", "--model b", "the model is a, which comes first"),
    ],
)
def test_a_value_too_many_is_refused(text: str, expected: str, written: str, reason: str) -> None:
    assert sorted(shlex.split(ours(f"vllm serve --host x {text}"))) == sorted([*shlex.split(expected), "--host", "x"])
    assert [(part.written, part.reason) for part in translated(f"vllm serve --host x {text}").refused] == [
        (written, reason)
    ]


def test_the_note_of_a_variable_is_that_of_its_value() -> None:
    assert reasons("VLLM_ALL2ALL_BACKEND=pplx vllm serve a")["VLLM_ALL2ALL_BACKEND=pplx"].startswith("XLA's")
    assert reasons("VLLM_ALL2ALL_BACKEND=auto vllm serve a")["VLLM_ALL2ALL_BACKEND=auto"] == "is --all2all-backend"


def test_pages_of_all_origins_are_the_default_of_vllm() -> None:
    assert ours("vllm serve a --host x --allow-credentials") == "a --host x --allow-credentials --allowed-origins '*'"


def test_paths_and_devices_of_variables_are_those_outside_the_container() -> None:
    text = "docker run -e HF_HOME=/c/hf -e NVIDIA_VISIBLE_DEVICES=2 -v /d:/c vllm/vllm-openai --model a"
    assert translated(text).environment == {"HF_HOME": "/d/hf", "CUDA_VISIBLE_DEVICES": "2"}


def test_devices_of_a_container_are_a_variable() -> None:
    translation = translated("docker run --gpus device=1 vllm/vllm-openai --model a")
    assert translation.environment == {"CUDA_VISIBLE_DEVICES": "1"}
