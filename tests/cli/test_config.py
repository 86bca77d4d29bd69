import json
from pathlib import Path

import pytest

from jaxserve.cli.main import main
from jaxserve.config.settings import settings


def test_explain_takes_the_command_line_of_serve(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text("port: 9000\n")
    argv = ["config", "explain", "folder", "--config", str(path), "--max-num-seqs", "8", "--enable-metrics"]
    assert main(argv) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "model = folder  [flag MODEL]" in shown
    assert "max_running_requests = 8  [flag --max-num-seqs, alias max_num_seqs]" in shown
    assert f"port = 9000  [yaml {path}:1: port]" in shown
    assert shown[-1].startswith("--enable-metrics: ")


def test_explain_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", "--json", "--page-size", "32"]) == 0
    shown = json.loads(capsys.readouterr().out)
    by_key = {row["key"]: row for row in shown["settings"]}
    assert list(by_key) == list(settings())
    assert by_key["page_size"]["value"] == 32
    assert by_key["page_size"]["source"] == "flag"
    assert shown["notes"] == []
