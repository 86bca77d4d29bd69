"""Runs a command that ends when the process that started it does, however that one ends.

`python -m jaxserve.bench.processes.run_with_parent PARENT COMMAND…`, where PARENT is the id of that process. A
benchmark that is killed must not leave a server behind that disturbs the next one. On Linux the kernel sees to it;
elsewhere the command just runs.
"""

from __future__ import annotations

import os
import signal
import sys

from jaxserve import host


def main(argv: list[str]) -> None:
    """Become the command; never returns."""
    parent, command = int(argv[0]), argv[1:]
    host.die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the kernel was asked
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
