import io
from pathlib import Path

import pytest

from jaxserve.cli.main import main


def test_the_command_is_printed_with_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "vllm serve ~/my/a --dtype half --swap-space 4"]) == 2
    assert capsys.readouterr().out == (
        "jaxserve serve ~/my/a --host 0.0.0.0\n"
        "\n# Left out, as there is no counterpart:\n"
        "#   --dtype half: the 16-bit type is bfloat16: --dtype bfloat16\n"
        "\n# Notes:\n"
        "#   --swap-space 4: a preempted request is recomputed later; no swap space is needed or reserved\n"
        "#   --host 0.0.0.0: is vLLM's default: it listens on all addresses\n"
    )


def test_words_need_no_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "vllm", "serve", "$MODEL", "--host", "x"]) == 0
    assert capsys.readouterr().out == 'jaxserve serve "$MODEL" --host x\n'
    assert main(["translate", 'HF_HOME=$A/b vllm serve /m/$B --host "$(c "$D")" --api-key a$']) == 0
    assert capsys.readouterr().out == ('HF_HOME="$A/b" jaxserve serve "/m/$B" --host "$(c "$D")" --api-key \'a$\'\n')


def test_a_file_and_standard_input(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "services:\n  a: {image: vllm/vllm-openai, command: --model a --host x}\n  b: {image: redis}\n"
    file = tmp_path / "compose.yaml"
    file.write_text(text)
    assert main(["translate", str(file)]) == 0
    first = capsys.readouterr().out
    assert first.startswith("jaxserve serve a --host x\n")
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main(["translate", "-"]) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize("argv", [["translate"], ["translate", "pip install vllm"], ["translate", "vllm serve 'a"]])
def test_a_text_without_a_server_is_an_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert capsys.readouterr().err.startswith("jaxserve: error: ")
