"""Files that are code, as pickled programs are: none is read that another user owns or may write.

What is written here is its owner's alone. A folder above need not be: whoever can put another one in its place owns
that one, and it is refused.
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


class ForeignFileError(JaxserveError):
    """A file or folder in which another user may have put code."""


def check_own(path: Path) -> None:
    """Raises `ForeignFileError` unless a file or folder is this user's or root's, and only its owner may write it."""
    _check(path, path.stat())


def read_own(path: Path) -> bytes:
    """A file's content. Raises as `check_own` does."""
    with path.open("rb") as file:
        _check(path, os.fstat(file.fileno()))
        return file.read()


def make_own(folder: Path) -> None:
    """Make a folder that only this user can look into, if there is none."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def write_own(path: Path, payload: bytes) -> None:
    """Write a file so that no reader ever sees half of it."""
    make_own(path.parent)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:  # which makes it with mode 600
        file.write(payload)
    os.replace(file.name, path)


def own_folder(folder: Path) -> Path | None:
    """The folder, made if need be; None, with a warning, where that can't be, or nothing in it can be trusted."""
    try:
        make_own(folder)
        check_own(folder)
    except (OSError, ForeignFileError) as error:
        logger.warning("no programs are kept in %s: %s", folder, error)
        return None
    return folder


def _check(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise ForeignFileError(
            f"{path} belongs to another user (uid {status.st_uid}), and programs are code: use a copy of your own"
        )
    if status.st_mode & _OTHERS_MAY_WRITE:
        raise ForeignFileError(
            f"{path} may be written by others than its owner ({stat.filemode(status.st_mode)}), and programs are code: "
            f"make it anew, or `chmod -R go-w` it if you trust what is there"
        )
