"""Entry point: runs the command, turns our errors into one line and an exit code.

Nothing here imports more than argparse, so that `jaxserve --help` answers at once.
"""

from __future__ import annotations

import os
import sys

import jaxserve
from jaxserve.cli.common.dispatch import USER_ERROR, command_parser, dispatch
from jaxserve.errors import ConfigError, InvalidRequestError, JaxserveError, ModelNotFoundError

COMMANDS = {
    "serve": "serve a model over HTTP, with OpenAI's routes",
    "generate": "continue one prompt, streamed to the terminal",
    "chat": "talk with a model in the terminal",
    "plan": "say what fits a device that isn't here, and how fast it can be at best",
    "compile": "compile every program for a device that isn't here, or into a bundle for this one",
    "convert": "write a model as an Orbax checkpoint that loads fast, onto any mesh",
    "pull": "fetch a model into the cache ahead of time",
    "doctor": "watch a running server and say which settings to turn",
    "bench": "measure servers and engines: what clients see, and where the time goes",
    "config": "explain every setting: its value and where it comes from",
}

_WHAT = "A serving engine for large language models on JAX: NVIDIA GPUs, TPUs, and a plain CPU."

INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run `jaxserve` with these arguments (default: the process's) and return its exit code."""
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except (ConfigError, ModelNotFoundError, InvalidRequestError) as error:
        return _fail(error, USER_ERROR)
    except JaxserveError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(argv: list[str]) -> int:
    parser = command_parser("jaxserve", _WHAT, COMMANDS)
    parser.add_argument("--version", action="version", version=f"jaxserve {jaxserve.__version__}")
    return dispatch(parser, COMMANDS, "jaxserve.cli.", argv)


def _fail(error: JaxserveError, code: int) -> int:
    print(f"jaxserve: error: {error}", file=sys.stderr)
    return code
