import pytest

from jaxserve.cli.translation.launch import launches


@pytest.mark.parametrize(
    ("text", "engine", "arguments", "before"),
    [
        ("vllm serve a --b 1", "vllm", ("a", "--b", "1"), ()),
        ("uv run vllm serve a", "vllm", ("a",), ("uv", "run")),
        ("numactl -N 0 /opt/bin/vllm serve a", "vllm", ("a",), ("numactl", "-N", "0")),
        ("python -m vllm.entrypoints.openai.api_server --model a", "vllm", ("--model", "a"), ()),
        ("python3 -u -m vllm.entrypoints.cli.main serve a", "vllm", ("a",), ("python3",)),
        ("python vllm/entrypoints/openai/api_server.py --model a", "vllm", ("--model", "a"), ()),
        ("python3 -m sglang.launch_server --model a", "sglang", ("--model", "a"), ()),
        ("sglang serve --model-path a", "sglang", ("--model-path", "a"), ()),
        ('FROM x\nENTRYPOINT ["vllm", "serve"]\nCMD ["a", "--b"]', "vllm", ("a", "--b"), ()),
        ("ssh b 'docker exec c bash -c \"vllm serve a --b\"'", "vllm", ("a", "--b"), ()),
        ("C='vllm serve a --b'\nif x; then $C & else $C; fi", "vllm", ("a", "--b"), ()),
        ("start: sh -c 'x && vllm serve a'", "vllm", ("a",), ()),
        ("cat <<'EOF' | x\nimage: y\ncommand: [vllm, serve, a]\nEOF\n", "vllm", ("a",), ()),
        ("docker run x/vllm-openai a --b", "vllm", ("a", "--b"), ()),
        ("docker run x/sglang python3 -m sglang.launch_server --model a", "sglang", ("--model", "a"), ()),
        ("docker run --entrypoint vllm x/image serve a", "vllm", ("a",), ()),
        ("docker run --entrypoint /bin/bash x/vllm -c 'cd y; vllm serve a'", "vllm", ("a",), ()),
        ("docker run x/sglang bash -c 'sglang serve --model-path a'", "sglang", ("--model-path", "a"), ()),
    ],
)
def test_a_server_is_found(text: str, engine: str, arguments: tuple[str, ...], before: tuple[str, ...]) -> None:
    [launch] = launches(text)
    assert (launch.engine, launch.arguments, launch.before) == (engine, arguments, before)


@pytest.mark.parametrize(
    "text",
    [
        "vllm bench serve",
        "docker run x/y a",
        "pip install vllm",
        "python -m http.server",
        "",
        "echo 'vllm serve a'",
        'x "it\'s a"',
        "X='$X y'\n\"$X\"",
    ],
)
def test_nothing_else_is_a_server(text: str) -> None:
    assert launches(text) == []


def test_several_servers_are_found() -> None:
    assert [launch.arguments for launch in launches("vllm serve a &\nvllm serve b")] == [("a",), ("b",)]
