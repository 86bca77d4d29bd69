import importlib

import pytest

import jaxserve
from jaxserve.cli.main import COMMANDS, main
from jaxserve.errors import EngineDeadError


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown and what in shown for name, what in COMMANDS.items())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"jaxserve {jaxserve.__version__}\n"


def test_without_a_command_it_shows_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_own_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: jaxserve {name}")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["serv"], "'serv' is not a command; did you mean serve?"),
        (["frobnicate"], f"'frobnicate' is not a command; the commands are {', '.join(COMMANDS)}"),
        (["serve", "--max-num-seq", "8"], "--max-num-seq is not a known flag; did you mean --max-num-seqs?"),
        (["serve", "--page-sise=8"], "--page-sise is not a known flag; did you mean --page-size?"),
        (["serve", "a", "b"], "unexpected argument 'b' (see `jaxserve serve --help`)"),
        (["serve", "a", "--model", "b"], "the model is given twice, by --model and as 'a'; keep one"),
        (["serve", "--page-size"], "argument --page-size/--block-size: expected one argument "
         "(see `jaxserve serve --help`)"),
        (["serve", "--page-size", "x"], "--page-size must be a whole number, got 'x'"),
        (["serve", "--page-size", "3"], "page_size must be a power of two, got 3"),
        (["serve", "--tp-size", "0"], "tp_size must be at least 1, got 0"),
        (["generate", "hi", "--dp-size", "2", "--dp-mode", "replicas"], "dp_mode=replicas starts 2 engine processes, "
         "and LLM runs only one: leave it out for dp_mode=mesh, or use `jaxserve serve`"),
        (["generate", "--max-token", "8"], "--max-token is not a known flag; did you mean --max-tokens?"),
        (["generate", "hi", "--temperature", "-1"], "temperature must be in [0.0, 100.0], got -1.0"),
        (["config"], "usage: jaxserve config explain [flags of jaxserve serve] [--json]"),
    ],
)  # fmt: skip
def test_user_errors_are_one_line_and_exit_code_2(
    argv: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert capsys.readouterr().err == f"jaxserve: error: {line}\n"


def test_other_failures_are_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def die(argv: list[str]) -> int:
        raise EngineDeadError("engine process ended with code -9")

    monkeypatch.setattr(importlib.import_module("jaxserve.cli.config"), "main", die)
    assert main(["config"]) == 1
    assert capsys.readouterr().err == "jaxserve: error: engine process ended with code -9\n"


def test_an_interrupt_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("jaxserve.cli.config"), "main", interrupted)
    assert main(["config"]) == 130
