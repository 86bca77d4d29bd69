import pytest

from jaxserve.cli.translation.shell import commands
from jaxserve.errors import ConfigError


def words(text: str) -> list[tuple[str, ...]]:
    return [command.words for command in commands(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("vllm serve a --x '{\"b\": 1}'", [("vllm", "serve", "a", "--x", '{"b": 1}')]),
        ("vllm serve a \\\n  --b 1", [("vllm", "serve", "a", "--b", "1")]),
        ("vllm serve a \\  # why\n  --b 1", [("vllm", "serve", "a", "--b", "1")]),
        ("vllm serve a \\\r\n  --b 1", [("vllm", "serve", "a", "--b", "1")]),
        ("vllm serve a\n  --b 1", [("vllm", "serve", "a", "--b", "1")]),
        ("vllm serve a # why\ncurl b", [("vllm", "serve", "a"), ("curl", "b")]),
        ("# don't\nvllm serve a", [("vllm", "serve", "a")]),
        ("vllm serve a # it's why\ncurl b", [("vllm", "serve", "a"), ("curl", "b")]),
        ("# A=1 \\\nvllm serve a \\\n  # why\n  --b 1", [("vllm", "serve", "a", "--b", "1")]),
        ("vllm serve a  # why\n  --b 1", [("vllm", "serve", "a", "--b", "1")]),
        ('x -v $(pwd):/a --b "$(c "$D" | e)"', [("x", "-v", "$(pwd):/a", "--b", '$(c "$D" | e)')]),
        ("- vllm serve a", [("vllm", "serve", "a")]),
        ("Environment=A=1\nExecStart=-/bin/vllm serve $A", [("/bin/vllm", "serve", "1")]),
        ("cd x && vllm serve a > log 2>&1 &\ncurl b", [("cd", "x"), ("vllm", "serve", "a"), ("curl", "b")]),
        ("vllm serve a --sizes 1 2 4 > log", [("vllm", "serve", "a", "--sizes", "1", "2", "4")]),
        ("vllm serve a | tee log", [("vllm", "serve", "a"), ("tee", "log")]),
        ("$ vllm serve a", [("vllm", "serve", "a")]),
        ("PS C:\\x> vllm serve a", [("vllm", "serve", "a")]),
        ("!vllm serve a", [("vllm", "serve", "a")]),
        ("vllm serve <model> --b=<x>", [("vllm", "serve", "model", "--b=x")]),
        ("vllm serve a --x '<think> it'", [("vllm", "serve", "a", "--x", "<think> it")]),
        ("vllm serve a --x '{\n \"b\": 1}'", [("vllm", "serve", "a", "--x", '{\n "b": 1}')]),
        ("bash -c 'vllm serve a --b 1'", [("vllm", "serve", "a", "--b", "1")]),
        ("", []),
    ],
)
def test_text_is_taken_apart_as_a_shell_does(text: str, expected: list[tuple[str, ...]]) -> None:
    assert words(text) == expected


def test_variables_that_the_text_sets_are_put_in() -> None:
    [command] = commands('MODEL=a/b\nexport PORT=1 OTHER="x y"\nX=2 vllm serve $MODEL --port ${PORT} --y ${Z:-3} $OPEN')
    assert command.words == ("vllm", "serve", "a/b", "--port", "1", "--y", "3", "$OPEN")
    assert command.environment == {"MODEL": "a/b", "PORT": "1", "OTHER": "x y", "X": "2"}


def test_a_quotation_must_end() -> None:
    with pytest.raises(ConfigError, match="can't be read: no closing quotation"):
        list(commands("vllm serve 'a"))
