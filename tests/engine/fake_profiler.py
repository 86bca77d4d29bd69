"""A fake profiler that records its calls."""

from __future__ import annotations

import threading
from pathlib import Path


class FakeProfiler:
    """Records the calls in `calls`. `fail` names the method that raises. `stop` blocks while `go` is cleared."""

    def __init__(self, fail: str = "") -> None:
        self.fail = fail
        self.calls: list[tuple[str, bool]] = []
        self.go = threading.Event()
        self.go.set()

    def start(self, directory: Path, name: str, *, with_stack: bool) -> Path:
        if self.fail == "start":
            raise RuntimeError("no profiler here")
        self.calls.append((f"start {directory.name}", with_stack))
        self._folder = directory / "plugins" / "profile" / name
        return self._folder

    def stop(self) -> None:
        self.go.wait()
        self.calls.append(("stop", False))
        if self.fail == "stop":
            raise OSError("no space left on device")
        self._folder.mkdir(parents=True)
