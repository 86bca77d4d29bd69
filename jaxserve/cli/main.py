"""The entry point: runs a command and turns our errors into one line and an exit code.

Nothing here imports more than argparse, so that `jaxserve --help` is fast.
"""

from __future__ import annotations

import os
import sys

import jaxserve
from jaxserve.cli.common.dispatch import INTERRUPTED, USER_ERROR, command_parser, dispatch
from jaxserve.errors import ConfigError, InvalidRequestError, JaxserveError, ModelNotFoundError

COMMANDS = {
    "serve": "serve a model over HTTP with OpenAI's routes",
    "generate": "continue one prompt, streamed to the terminal",
    "chat": "talk with a model in the terminal",
    "plan": "show whether a model fits a device that isn't here, and its highest possible speed",
    "compile": "compile all programs for a device that isn't here, or into a bundle",
    "convert": "write a model as an Orbax checkpoint that loads fast onto any mesh",
    "pull": "download a model into the cache ahead of time",
    "doctor": "watch a running server and advise which settings to change",
    "bench": "measure servers and engines: latency and throughput, and where the time goes",
    "translate": "turn a command line of vLLM or SGLang into one of jaxserve",
    "config": "show the value of every setting and where it comes from",
}

_DESCRIPTION = "A serving engine for large language models on JAX: NVIDIA GPUs, TPUs, and a plain CPU."


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
    parser = command_parser("jaxserve", _DESCRIPTION, COMMANDS)
    parser.add_argument("--version", action="version", version=f"jaxserve {jaxserve.__version__}")
    return dispatch(parser, COMMANDS, "jaxserve.cli.", argv)


def _fail(error: JaxserveError, code: int) -> int:
    print(f"jaxserve: error: {error}", file=sys.stderr)
    return code
