"""`jaxserve translate`: the command line of jaxserve for one of vLLM or SGLang, with a reason for each part that goes.

It reads a command with its variables, `docker run`, a compose file or a Kubernetes manifest, from the argument, a file,
or `-` for standard input. It starts nothing. The exit code is 2 if a part has no counterpart.
"""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
from pathlib import Path

from jaxserve.cli.common.dispatch import USER_ERROR
from jaxserve.cli.common.parser import Parser
from jaxserve.cli.translation.launch import launches
from jaxserve.cli.translation.shell import SUBSTITUTION
from jaxserve.cli.translation.translation import Translation, translate
from jaxserve.errors import ConfigError

_WIDTH = 120
_OPEN = re.compile(r"\$[\w{(]")


def parser() -> Parser:
    """Return the parser of `jaxserve translate`."""
    parser = Parser(prog="jaxserve translate", description=__doc__)
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="the command in quotes, the name of a file, or -")
    return parser


def main(argv: list[str]) -> int:
    """Run the command and return its exit code. Raises `ConfigError` if no server is started in the text."""
    # The words of an unquoted command are taken as they are; they may be flags of ours.
    text = _text(argv if argv[:1] not in (["-h"], ["--help"]) else parser().parse(argv).command)
    found = launches(text)
    if not found:
        raise ConfigError(
            "no server of vLLM or SGLang is started there; write the command in quotes, such as "
            "jaxserve translate 'vllm serve MODEL --max-num-seqs 64'"
        )
    translations = [translate(launch) for launch in found]
    print("\n\n".join("\n".join(_lines(each)) for each in translations))
    return USER_ERROR if any(each.refused for each in translations) else 0


def _text(words: list[str]) -> str:
    if words == ["-"]:
        return sys.stdin.read()
    if len(words) == 1 and " " not in words[0] and Path(words[0]).is_file():
        return Path(words[0]).read_text(encoding="utf-8")
    return words[0] if len(words) == 1 else shlex.join(words)


def _lines(translation: Translation) -> list[str]:
    variables = [f"{name}={_quoted(value)}" for name, value in translation.environment.items()]
    lines = [" ".join([*variables, "jaxserve serve", *map(_quoted, translation.arguments)])]
    for title, answer in (("Left out, as there is no counterpart:", "refused"), ("Notes:", "note")):
        parts = [part for part in translation.parts if part.answer == answer]
        lines += ["", f"# {title}"] if parts else []
        for part in parts:
            text = f"{part.written}: {part.reason}"
            lines += textwrap.wrap(
                text, _WIDTH, initial_indent="#   ", subsequent_indent="#     ", break_long_words=False
            )
    return lines


def _quoted(word: str) -> str:
    """Quote a word for a shell, but for variables that the text left open and the home folder."""
    if _OPEN.search(word) and not set(SUBSTITUTION.sub("", word)) & set('"`\\'):
        return f'"{word}"'
    home, slash, rest = word.partition("/")
    return f"~/{shlex.quote(rest)}" if home == "~" and slash and rest else shlex.quote(word)
