"""The functions that replace missing parts of Linux on other systems."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxserve import host
from jaxserve.errors import ConfigError


@pytest.mark.parametrize("missing", [(), ("preadv",), ("preadv", "pread")])
def test_a_file_is_read_at_an_offset(missing: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in missing:
        monkeypatch.delattr(os, name)
    (tmp_path / "file").write_bytes(bytes(range(10)))
    out = bytearray(4)
    file = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        assert host.read_at(file, memoryview(out), 3) == 4
        assert out == bytes((3, 4, 5, 6))
        assert host.read_at(file, memoryview(out), 8) == 2
        assert out == bytes((8, 9, 5, 6))
        assert host.read_at(file, memoryview(out), 10) == 0
        monkeypatch.setattr(host, "_MAX_READ_BYTES", 1)
        assert host.read_at(file, memoryview(out), 0) == 1
    finally:
        os.close(file)


def test_the_path_of_a_socket_is_never_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 80)))
    Path(tempfile.gettempdir()).mkdir()
    folder = Path(host.make_socket_folder("commands"))
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "commands"))
        assert folder.stat().st_mode & 0o777 == 0o700
    finally:
        shutil.rmtree(folder)
    assert list(Path(tempfile.gettempdir()).iterdir()) == []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert Path(host.make_socket_folder("s")).parent == tmp_path


def test_a_lock_is_held_against_others_until_its_file_is_closed(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as other:
        with (tmp_path / "lock").open("w") as file:
            assert host.lock_file(file, wait=False)
            assert not host.lock_file(other, wait=False)
        assert host.lock_file(other, wait=False)


def test_without_uvloop_the_loop_is_asyncios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    with asyncio.Runner(loop_factory=host.new_event_loop) as runner:
        assert type(runner.get_loop()).__module__.startswith("asyncio")


def test_cores_and_the_cpu_without_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.num_cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    assert host.num_cores() == os.cpu_count()
    monkeypatch.setattr(Path, "read_text", lambda *_: (_ for _ in ()).throw(FileNotFoundError()))
    assert host.cpu_info() == ""


def test_the_open_file_limit_is_raised_to_the_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS reports no limit, but refuses to set a large one."""
    no_limit, taken = 2**63 - 1, []

    def setrlimit(_: int, limits: tuple[int, int]) -> None:
        if limits[0] == no_limit:
            raise ValueError("current limit exceeds maximum limit")
        taken.append(limits)

    system = SimpleNamespace(RLIMIT_NOFILE=8, getrlimit=lambda _: (256, no_limit), setrlimit=setrlimit)
    monkeypatch.setattr(host, "resource", system)
    host.raise_open_file_limit()
    assert taken == [(10_240, no_limit)]
    monkeypatch.setattr(host, "resource", None)
    host.raise_open_file_limit()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel sees to it on Linux only")
def test_a_process_dies_with_its_parent() -> None:
    """Kill a process that has a child; the child's output pipe closes when the child has ended too."""
    child = "import os, signal, time; from jaxserve.host import die_with_parent as d; d(os.getppid(), signal.SIGKILL); print(1, flush=True); time.sleep(99)"  # noqa: E501
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        process.send_signal(signal.SIGKILL)
        assert process.stdout.read() == b""


def test_serve_on_windows_is_an_error_that_names_wsl(monkeypatch: pytest.MonkeyPatch) -> None:
    host.check_can_serve()
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ConfigError, match="on Windows, use WSL2"):
        host.check_can_serve()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this libc has no malloc_trim")
def test_freed_memory_is_returned_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    blocks = [libc.malloc(1 << 16) for _ in range(1000)]
    for block in blocks:
        ctypes.memset(block, 1, 1 << 16)
    *freed, last = blocks  # the last one keeps those below it from being returned by free
    for block in freed:
        libc.free(block)
    before = resident()
    monkeypatch.setattr(sys, "platform", "darwin")
    host.return_free_memory()
    assert resident() > before - (1 << 24)
    monkeypatch.undo()
    host.return_free_memory()
    assert resident() < before - (1 << 25)
    libc.free(last)
