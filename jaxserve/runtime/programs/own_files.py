"""Reads and writes files that are code, such as pickled programs: one that another user owns or may write is refused.

Files are written so that only their owner may write them. Parent folders are not checked: another user who may write
there could only replace a folder with one of their own, which is refused.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from pathlib import Path

from jaxserve.errors import JaxserveError

logger = logging.getLogger("jaxserve.runtime")

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UntrustedFileError(JaxserveError):
    """A file or folder in which another user may have put code."""


def check_owner(path: Path) -> None:
    """Raise `UntrustedFileError` unless this user or root owns a file or folder and only the owner may write it."""
    _check(path, path.stat())


def read_trusted(path: Path) -> bytes:
    """Return a file's content. Raises `UntrustedFileError` as `check_owner` does."""
    with path.open("rb") as file:
        _check(path, os.fstat(file.fileno()))
        return file.read()


def make_private_folder(folder: Path) -> None:
    """Make a folder that only this user can read, unless it exists."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def write_private(path: Path, payload: bytes) -> None:
    """Write a file atomically: no reader ever sees half of it."""
    make_private_folder(path.parent)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:  # created with mode 600
        file.write(payload)
    os.replace(file.name, path)


def trusted_folder(folder: Path) -> Path | None:
    """Make a folder if needed and return it. Log a warning and return None if that fails or others may write to it."""
    try:
        make_private_folder(folder)
        check_owner(folder)
    except (OSError, UntrustedFileError) as error:
        logger.warning("no programs are kept in %s: %s", folder, error)
        return None
    return folder


def _check(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise UntrustedFileError(
            f"{path} belongs to another user (uid {status.st_uid}), and programs are code: use a copy of your own"
        )
    if status.st_mode & _OTHERS_MAY_WRITE:
        raise UntrustedFileError(
            f"{path} may be written by others than its owner ({stat.filemode(status.st_mode)}), and programs are code: "
            f"make it again, or `chmod -R go-w` it if you trust its content"
        )
