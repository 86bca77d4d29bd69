"""Locks a folder of kept programs: of replicas that start together, one compiles and the others load.

The kernel releases the lock when the process that holds it ends, even if it crashes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from jaxserve.host import lock_file

logger = logging.getLogger("jaxserve.runtime")

_LOCK = "lock"


@contextmanager
def exclusive(folder: Path | None) -> Iterator[None]:
    """Hold the lock of an existing folder against other engines on this machine.

    Does nothing if `folder` is None, or if this process is one of several of an engine, as these compile together.
    """
    if folder is None or jax.process_count() > 1:
        yield
        return
    with (folder / _LOCK).open("w") as file:
        if not lock_file(file, wait=False):
            logger.info("waiting for another process that compiles these programs into %s", folder)
            lock_file(file, wait=True)
        yield
