"""What not every operating system has, and what stands for it elsewhere: the one place that knows which one this is.

jaxserve is made for Linux. On macOS nothing of it is missing, on Windows `jaxserve serve` is; what a caller gets there
differs in speed at most, and in what becomes of the children of a process that is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from jaxserve.errors import ConfigError

if TYPE_CHECKING:
    import asyncio

try:
    import fcntl
    import resource
except ImportError:
    fcntl = resource = None  # type: ignore[assignment]

_PR_SET_PDEATHSIG = 1
# macOS names no limit of open files, and refuses more than these.
_OPEN_MAX = 10_240
# macOS refuses to read 2 GiB at once.
_READ_MAX = 1 << 30
_SEEKING = threading.Lock()
# Of the path of a socket, macOS takes 103 bytes, Linux 107.
_SOCKET_PATH_MAX = 103


def num_cores() -> int:
    """The CPU cores that this process may use; where the system doesn't say, all there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_info() -> str:
    """The CPU's name and features as the kernel has them; empty where it keeps no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    lines = [line for line in text.splitlines() if line.startswith(("flags", "Features", "model name"))]
    return "\n".join(sorted(set(lines)))


def die_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends, even by kill -9; on Linux only."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


def read_at(file: int, out: memoryview, at: int) -> int:
    """Read into `out` what stands from byte `at` on in a file that other threads read too; returns how many bytes, 0 at
    the end. Raises `OSError`."""
    out = out[:_READ_MAX]
    if hasattr(os, "preadv"):
        return os.preadv(file, [out], at)
    if hasattr(os, "pread"):
        read = os.pread(file, len(out), at)
    else:
        with _SEEKING:
            os.lseek(file, at, os.SEEK_SET)
            read = os.read(file, len(out))
    out[: len(read)] = read
    return len(read)


def make_socket_folder(longest_name: str) -> str:
    """A new folder that only this user may enter, whose path leaves room for sockets with names up to this one."""
    folder = tempfile.mkdtemp(prefix="jaxserve-")
    if len(os.fsencode(os.path.join(folder, longest_name))) > _SOCKET_PATH_MAX:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="jaxserve-", dir="/tmp")
    return folder


def lock_file(file: IO[Any], *, wait: bool) -> bool:
    """Lock an open file against other processes until it is closed; False where another one has it, unless `wait`.

    On Windows nothing is locked.
    """
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def limit_memory(nbytes: int) -> None:
    """Give this process no more address space than that, where the system can, and have it leave no core file."""
    if resource is not None:
        for limit, most in ((resource.RLIMIT_AS, nbytes), (resource.RLIMIT_CORE, 0)):
            with contextlib.suppress(ValueError, OSError):  # macOS knows the first, and refuses it
                resource.setrlimit(limit, (most, most))


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's, or Python's own where that isn't built."""
    try:
        import uvloop
    except ImportError:
        import asyncio

        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def allow_open_files() -> None:
    """Let this process have as many open files as the system gives one: each connection is a file."""
    if resource is not None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        except (ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_MAX, most))


def check_servers_run() -> None:
    """Raises `ConfigError` on Windows: a server and its engine share pipes and signals that it doesn't have."""
    if sys.platform == "win32":
        raise ConfigError("jaxserve serve runs on Linux and macOS; on Windows, in WSL2")
