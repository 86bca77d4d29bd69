"""`jaxserve chat`: a conversation in the terminal with the model's chat template.

Ctrl-C stops the answer, not the program; the partial answer stays in the conversation.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxserve.cli.common import flags
from jaxserve.cli.common.parser import Parser
from jaxserve.cli.common.sampling import NUMBERS, add_sampling, sampling_params
from jaxserve.errors import InvalidRequestError

if TYPE_CHECKING:
    from jaxserve.api_types import SamplingParams
    from jaxserve.llm import LLM

_FALLBACKS = {"temperature": 0.7}
_HELP = "/clear starts a new conversation, /exit quits; Ctrl-C stops an answer"


def parser() -> Parser:
    """Return the parser of `jaxserve chat`."""
    parser = Parser(prog="jaxserve chat", description=__doc__, epilog=_HELP)
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    add_sampling(parser, **_FALLBACKS)
    flags.add_settings(parser, hidden=NUMBERS)
    return parser


def main(argv: list[str]) -> int:
    """Run the command and return the exit code."""
    arguments = parser().parse(argv)
    settings = flags.llm_arguments(flags.config_from_arguments(arguments))
    sampling_params(arguments, **_FALLBACKS)

    from jaxserve.llm import LLM

    with LLM(**settings) as llm:
        beginning = [{"role": "system", "content": arguments.system}] if arguments.system else []
        messages = list(beginning)
        _say(_HELP)
        for line in _lines():
            if line == "/exit":
                break
            if line == "/clear":
                messages = list(beginning)
                continue
            messages.append({"role": "user", "content": line})
            try:
                ids = llm.encode_chat(messages)
                defaults = llm.sampling_defaults
                left = max(llm.max_model_len - len(ids), 1)
                fallbacks = {**_FALLBACKS, **defaults.options, "max_tokens": defaults.limited(left)}
                params = sampling_params(arguments, **fallbacks)
                messages.append({"role": "assistant", "content": _answer(llm, ids, params)})
            except InvalidRequestError as error:
                _say(f"{error} (/clear starts a new conversation)")
                messages.pop()
    return 0


def _answer(llm: LLM, ids: list[int], params: SamplingParams) -> str:
    """Print the answer as it arrives and return the printed text, also if Ctrl-C stops it."""
    printed: list[str] = []
    try:
        with contextlib.closing(llm.stream(ids, params)) as deltas:
            for delta in deltas:
                printed.append(delta.text)
                print(delta.text, end="", flush=True)
    except KeyboardInterrupt:
        pass
    print()
    return "".join(printed)


def _lines() -> Iterator[str]:
    """Yield the user's lines until Ctrl-D; empty and interrupted lines are skipped."""
    terminal = sys.stdin.isatty()
    if terminal:
        import readline  # noqa: F401 - gives input() history and editing
    while True:
        try:
            line = input("> " if terminal else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            _say(f"\n{_HELP}")
            continue
        if line:
            yield line


def _say(text: str) -> None:
    print(text, file=sys.stderr)
