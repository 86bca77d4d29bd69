"""One process at a time for what is kept on disk: replicas that start together compile once, and the others load.

It owns a lock on a folder, which the kernel lets go when its holder ends, however that comes about.
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
def alone(folder: Path | None) -> Iterator[None]:
    """Hold the lock of a folder, which is there, against other engines on this machine.

    Nobody waits where nothing is kept (None), nor among processes of one engine, which compile together.
    """
    if folder is None or jax.process_count() > 1:
        yield
        return
    with (folder / _LOCK).open("w") as file:
        if not lock_file(file, wait=False):
            logger.info("waiting for another process that compiles these programs into %s", folder)
            lock_file(file, wait=True)
        yield
