"""Only one process holds the lock of a folder, and it is released however that process ends."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxserve.runtime.programs.file_lock import exclusive

HOLDER = """
import fcntl, sys
from pathlib import Path
with Path(sys.argv[1], "lock").open("w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print("mine", flush=True)
    sys.stdin.read()
    Path(sys.argv[1], "done").touch()
"""


class _Waiting(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.seen = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "waiting for another process" in record.getMessage():
            self.seen.set()


@pytest.mark.parametrize("killed", [False, True])
def test_a_second_process_waits_until_the_first_ends(tmp_path: Path, killed: bool) -> None:
    handler, found = _Waiting(), []

    def second() -> None:
        with exclusive(tmp_path):
            found.append((tmp_path / "done").exists())

    logger = logging.getLogger("jaxserve.runtime")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    thread = threading.Thread(target=second)
    try:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "mine\n"
            thread.start()
            assert handler.seen.wait(60)
            assert found == []
            if killed:
                holder.kill()
        thread.join(60)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert found == [not killed]


def test_without_a_folder_there_is_no_lock() -> None:
    with exclusive(None), exclusive(None):
        pass
