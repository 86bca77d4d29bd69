import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxserve.cli import serve
from jaxserve.cli.common import flags
from jaxserve.cli.translation.launch import launches
from jaxserve.cli.translation.translation import translate

COMMANDS: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "public_commands.yaml").read_text("utf-8"))
PARSER = serve.parser()
TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


@pytest.mark.parametrize("command", COMMANDS, ids=[f"{i}-{each['source'][:40]}" for i, each in enumerate(COMMANDS)])
def test_a_public_command_is_translated_or_refused_by_name(command: dict[str, Any]) -> None:
    made = [translate(launch) for launch in launches(command["text"])]
    lines = []
    for each in made:
        variables = [f"{name}={value}" for name, value in each.environment.items() if name not in TOKENS]
        lines.append(" ".join([*variables, shlex.join(each.arguments)]))
    assert lines == command["ours"]
    refused = [part for each in made for part in each.refused]
    assert [part.written for part in refused] == command.get("refused", [])
    assert all(part.reason for part in refused)
    for each in made:
        starts = not any(part.written == "all together" for part in each.refused)
        if starts and not any("$" in word for word in each.arguments) and "--config" not in each.arguments:
            flags.config_from_arguments(PARSER.parse(each.arguments))
