"""Functions that differ between operating systems: the only module that checks which one this is.

jaxserve is made for Linux. On macOS everything works; on Windows `jaxserve serve` does not. Elsewhere than on Linux,
these functions may be slower, and children of a killed process may survive it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
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
# macOS reports no limit of open files, but refuses more than these.
_MAX_OPEN_FILES = 10_240
# macOS refuses to read 2 GiB at once.
_MAX_READ_BYTES = 1 << 30
_SEEK_LOCK = threading.Lock()
# The path of a socket may have 103 bytes on macOS, 107 on Linux.
_MAX_SOCKET_PATH = 103


def num_cores() -> int:
    """Return the number of CPU cores that this process may use; all cores if the system doesn't report it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_info() -> str:
    """Return the CPU's name and features from /proc/cpuinfo; an empty string if there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    lines = [line for line in text.splitlines() if line.startswith(("flags", "Features", "model name"))]
    return "\n".join(sorted(set(lines)))


def die_with_parent(parent_pid: int, number: signal.Signals) -> None:
    """Let the kernel send this process a signal when its parent ends, even by kill -9; only on Linux.

    Raise `SystemExit` if the parent has ended already.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:
        sys.exit(f"the parent process {parent_pid} has ended already")


def free_port() -> int:
    """Return a port of the loopback on which nothing listens now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def read_at(file: int, out: memoryview, at: int) -> int:
    """Read from byte `at` of a file into `out`; return the number of bytes, 0 at the end of the file.

    Other threads may read the file at the same time. Raise `OSError`.
    """
    out = out[:_MAX_READ_BYTES]
    if hasattr(os, "preadv"):
        return os.preadv(file, [out], at)
    if hasattr(os, "pread"):
        read = os.pread(file, len(out), at)
    else:
        with _SEEK_LOCK:
            os.lseek(file, at, os.SEEK_SET)
            read = os.read(file, len(out))
    out[: len(read)] = read
    return len(read)


def make_socket_folder(longest_name: str) -> str:
    """Create a folder that only this user may enter, with a path short enough for a socket named `longest_name`."""
    folder = tempfile.mkdtemp(prefix="jaxserve-")
    if len(os.fsencode(os.path.join(folder, longest_name))) > _MAX_SOCKET_PATH:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="jaxserve-", dir="/tmp")
    return folder


def lock_file(file: IO[Any], *, wait: bool) -> bool:
    """Lock an open file against other processes until it is closed.

    If another process has the lock, wait for it, or return False without `wait`. On Windows nothing is locked.
    """
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def limit_memory(nbytes: int) -> None:
    """Limit the address space of this process, if the system can, and disable core files."""
    if resource is not None:
        for limit, most in ((resource.RLIMIT_AS, nbytes), (resource.RLIMIT_CORE, 0)):
            with contextlib.suppress(ValueError, OSError):  # macOS has RLIMIT_AS, but refuses to set it
                resource.setrlimit(limit, (most, most))


def return_free_memory() -> None:
    """Return freed memory to the system: glibc would keep it, up to gigabytes; other allocators don't."""
    if sys.platform == "linux":
        import ctypes

        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop of uvloop, or of asyncio if uvloop is not installed."""
    try:
        import uvloop
    except ImportError:
        import asyncio

        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def raise_open_file_limit() -> None:
    """Raise the limit of open files to the system's maximum, because each connection is a file."""
    if resource is not None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        except (ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_OPEN_FILES, most))


def check_can_serve() -> None:
    """Raise `ConfigError` on Windows, which lacks pipes and signals that a server and its engine need."""
    if sys.platform == "win32":
        raise ConfigError("jaxserve serve runs on Linux and macOS only; on Windows, use WSL2")
