"""Runs a command that is ended together with its parent process, even when that is killed.

`python -m jaxserve.bench.processes.run_with_parent PARENT COMMAND…`, where PARENT is the parent's process id. A killed
benchmark must not leave a server running that disturbs the next one. Only Linux supports this; elsewhere the command
just runs.
"""

from __future__ import annotations

import os
import signal
import sys

from jaxserve import host


def main(argv: list[str]) -> None:
    """Replace this process by the command; never returns."""
    parent, command = int(argv[0]), argv[1:]
    host.die_with_parent(parent, signal.SIGTERM)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
