"""`jaxserve generate`: continues one prompt and streams the text to standard output."""

from __future__ import annotations

import contextlib
import sys

from jaxserve.cli.common import flags
from jaxserve.cli.common.parser import Parser
from jaxserve.cli.common.sampling import NUMBERS, add_sampling, sampling_params
from jaxserve.errors import ConfigError

_FALLBACKS = {"max_tokens": 128, "temperature": 0.0}


def parser() -> Parser:
    """Return the parser of `jaxserve generate`."""
    parser = Parser(prog="jaxserve generate", description=__doc__)
    parser.add_argument("prompt", nargs="?", help="the text to continue (default: read from standard input)")
    add_sampling(parser, **_FALLBACKS)
    flags.add_settings(parser, hidden=NUMBERS)
    return parser


def main(argv: list[str]) -> int:
    """Run the command and return the exit code."""
    arguments = parser().parse(argv)
    settings = flags.llm_arguments(flags.config_from_arguments(arguments))
    sampling_params(arguments, **_FALLBACKS)
    prompt = _prompt(arguments.prompt)

    from jaxserve.llm import LLM

    with LLM(**settings) as llm:
        params = sampling_params(arguments, **{**_FALLBACKS, **llm.sampling_defaults.fields})
        with contextlib.closing(llm.stream(prompt, params)) as deltas:
            for delta in deltas:
                print(delta.text, end="", flush=True)
        print()
    return 0


def _prompt(argument: str | None) -> str:
    if argument is not None:
        return argument
    if sys.stdin.isatty():
        raise ConfigError('give a prompt: jaxserve generate "Once upon a time", or pipe one in')
    return sys.stdin.read()
