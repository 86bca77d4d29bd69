"""`jaxserve chat`: a conversation in the terminal, through the model's chat template.

Ctrl-C stops the answer, not the program; what was said so far stays in the conversation.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxserve.cli.common import flags
from jaxserve.cli.common.parser import HelpFormatter, Parser
from jaxserve.cli.common.sampling import NUMBERS, add_sampling, sampling_params
from jaxserve.errors import InvalidRequestError

if TYPE_CHECKING:
    from jaxserve.api_types import SamplingParams
    from jaxserve.llm import LLM

_HELP = "/clear forgets the conversation, /exit ends; Ctrl-C stops an answer"


def parser() -> Parser:
    """The flags of `jaxserve chat`."""
    parser = Parser(prog="jaxserve chat", description=__doc__, formatter_class=HelpFormatter, epilog=_HELP)
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    add_sampling(parser, temperature=0.7)
    flags.add_settings(parser, hidden=NUMBERS)
    return parser


def main(argv: list[str]) -> int:
    """Run it; returns the exit code."""
    arguments = parser().parse(argv)
    settings = flags.arguments(flags.loaded(arguments))
    sampling_params(arguments)

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
                params = sampling_params(arguments, max_tokens=max(llm.max_model_len - len(ids), 1))
                messages.append({"role": "assistant", "content": _answer(llm, ids, params)})
            except InvalidRequestError as error:
                _say(f"{error} (/clear starts anew)")
                messages.pop()
    return 0


def _answer(llm: LLM, ids: list[int], params: SamplingParams) -> str:
    """Print the answer as it comes; what was printed is what was said, also when Ctrl-C stopped it."""
    said: list[str] = []
    try:
        with contextlib.closing(llm.stream(ids, params)) as deltas:
            for delta in deltas:
                said.append(delta.text)
                print(delta.text, end="", flush=True)
    except KeyboardInterrupt:
        pass
    print()
    return "".join(said)


def _lines() -> Iterator[str]:
    """What a person writes, line by line, until Ctrl-D; an interrupted or empty line is asked for again."""
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
