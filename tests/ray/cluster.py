"""Starts a cluster in a process of its own, and waits for what it says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from jaxserve import host

ROOT = Path(__file__).parents[2]
# Far more than anything takes: every process that is started imports Ray, and other tests run beside it.
_SECONDS = 240


class RayCluster:
    """Two nodes with Serve on them. All their processes have the cluster's directory in their environment."""

    def __init__(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="r", dir="/tmp")  # sockets in it have long names
        port = host.free_port()
        self.url = f"http://127.0.0.1:{port}"
        own = {
            "RAY_TMPDIR": self._directory,
            "RAY_worker_niceness": "0",  # other tests on a busy machine would leave them nothing
            "RAY_prestart_worker_first_driver": "0",
            "PYTHONPATH": str(ROOT),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
        }
        self._log = Path(self._directory) / "driver.log"
        with self._log.open("w") as log:
            self._driver = subprocess.Popen(
                [sys.executable, "-m", "tests.ray.driver", str(port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env={**os.environ, **own},
            )

    def read(self) -> Any:
        """Return the driver's next answer; the first one says that the nodes are there."""
        assert self._driver.stdout is not None
        line = self._driver.stdout.readline()
        assert line, self._log.read_text()
        return json.loads(line)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the driver."""
        print(json.dumps([name, *arguments]), file=self._driver.stdin, flush=True)
        return self.read()

    async def deploy(
        self, settings: dict[str, Any], *, build: str = "tests.ray.driver:build_fake", **engine: Any
    ) -> None:
        """Deploy the application `llm` with options of its engine, and return when all its replicas run."""
        self.call(
            "deploy",
            {
                "name": "llm",
                "route_prefix": "/",
                "import_path": build,
                "args": settings,
                "deployments": [{"name": "engine", **engine}],
            },
        )
        await self.until_running(engine.get("num_replicas"))

    async def until_running(self, num_replicas: int | None) -> None:
        """Return when the application runs, with this many replicas."""

        def is_so() -> bool:
            found = self.call("status")
            assert found["status"] != "DEPLOY_FAILED", found
            return found["status"] == "RUNNING" and num_replicas in (None, sum(found["replicas"].values()))

        await until(is_so)

    def processes(self, named: str = "") -> list[psutil.Process]:
        """Return the processes of the cluster whose command has this in it."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                command = " ".join(process.cmdline())
                if named in command and process.environ().get("RAY_TMPDIR") == self._directory:
                    found.append(process)
        return found

    def engines(self) -> list[psutil.Process]:
        """Return the engine processes."""
        return self.processes("tests.e2e.fake_device")

    def close(self) -> None:
        """End all that is left."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._driver.wait()
        for pipe in (self._driver.stdin, self._driver.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        shutil.rmtree(self._directory, ignore_errors=True)


@contextlib.contextmanager
def running() -> Iterator[RayCluster]:
    """A cluster that is gone afterwards."""
    cluster = RayCluster()
    try:
        cluster.read()
        yield cluster
    finally:
        cluster.close()


async def until(is_so: Callable[[], bool | Awaitable[bool]]) -> None:
    """Return once it is so."""
    deadline = time.monotonic() + _SECONDS
    while True:
        result = is_so()
        if result if isinstance(result, bool) else await result:
            return
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
