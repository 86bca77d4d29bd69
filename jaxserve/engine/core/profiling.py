"""One profile at a time: when it starts, after which step it ends, where it goes.

It owns these rules and the thread that writes a profile out, so that steps go on meanwhile. What is recorded, and how,
is the profiler's, which comes from outside: nothing here knows a device.
"""

from __future__ import annotations

import itertools
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from jaxserve.api_types import Profile
from jaxserve.errors import InvalidRequestError, RequestFailedError

logger = logging.getLogger("jaxserve.engine")


class Profiler(Protocol):
    """Records what the device and the engine's thread do."""

    def start(self, directory: Path, name: str, *, with_stack: bool) -> Path:
        """Record from now on; returns the folder that the files will be in. `with_stack` adds Python's calls."""
        ...

    def stop(self) -> None:
        """Record no more and write the files. Called in a thread of its own: that may take seconds."""
        ...


class Profiling:
    """What `/start_profile` and `/stop_profile` do. `directory` is where profiles may go, None when nowhere."""

    def __init__(self, profiler: Profiler | None = None, directory: str | None = None) -> None:
        self._profiler = profiler
        self._directory = directory
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="profile")
        self._folder: Path | None = None
        self._steps_left: int | None = None
        self._num_steps = 0
        self._written: Future[Profile] | None = None

    def start(
        self, output_dir: str | None = None, *, num_steps: int | None = None, with_stack: bool = False
    ) -> Profile:
        """Record from the next step on, until `stop` or for `num_steps` steps.

        `output_dir` is a folder within the directory of profiles. Raises `InvalidRequestError` when one runs already or
        may not or can't go there, `RequestFailedError` when the profiler doesn't start.
        """
        if self._profiler is None or self._directory is None:
            raise InvalidRequestError("no directory for profiles is configured: start the engine with --profile-dir")
        if self._folder is not None:
            raise InvalidRequestError(f"a profile is running already, into {self._folder}; POST /stop_profile ends it")
        if self._written is not None and not self._written.done():
            raise InvalidRequestError("the last profile is still being written; try again when it is there")
        if num_steps is not None and num_steps < 1:
            raise InvalidRequestError(f"num_steps must be at least 1, got {num_steps}", param="num_steps")
        directory = _folder(Path(self._directory), output_dir)
        try:
            self._folder = self._profiler.start(directory, _name(directory), with_stack=with_stack)
        except Exception as error:  # what a profiler may raise has no common base
            raise RequestFailedError(f"the profile can't be started in {directory}: {error}") from error
        self._steps_left, self._num_steps = num_steps, 0
        logger.info("Profiling into %s%s", self._folder, f", {num_steps} steps" if num_steps else "")
        return Profile(str(self._folder))

    def stop(self) -> Future[Profile]:
        """End the profile that runs, or find the one that ended by itself and is being written; the future resolves
        when its files are there. Raises `InvalidRequestError` when there is none."""
        if self._folder is not None:
            return self._end(self._folder)
        if self._written is not None and not self._written.done():
            return self._written
        last = "" if self._written is None or self._written.exception() else f"; the last: {self._written.result()}"
        raise InvalidRequestError(f"no profile is running{last}; POST /start_profile starts one")

    def stepped(self) -> None:
        """A step has ended."""
        if self._folder is None:
            return
        self._num_steps += 1
        if self._num_steps == self._steps_left:
            self._end(self._folder)

    def close(self) -> None:
        """End what runs and wait until it is written."""
        if self._folder is not None:
            self._end(self._folder)
        self._writer.shutdown()

    def _end(self, folder: Path) -> Future[Profile]:
        self._folder = None
        self._written = self._writer.submit(self._write, Profile(str(folder), self._num_steps))
        return self._written

    def _write(self, profile: Profile) -> Profile:
        assert self._profiler is not None
        start = time.monotonic()
        try:
            self._profiler.stop()
        except Exception as error:
            logger.exception("the profile can't be written")
            raise RequestFailedError(f"the profile can't be written to {profile.directory}: {error}") from error
        seconds = time.monotonic() - start
        logger.info("Profile of %d steps written to %s in %.1f s", profile.num_steps, profile.directory, seconds)
        return profile


def _folder(directory: Path, output_dir: str | None) -> Path:
    """A folder that is there now. A client may choose one of its own, but not where on the machine."""
    try:
        root = directory.resolve()
        chosen = (root / (output_dir or "")).resolve()
        if chosen.is_relative_to(root):
            chosen.mkdir(parents=True, exist_ok=True)
            return chosen
    except (OSError, ValueError, RuntimeError) as error:  # no folder may be there, no path, or a loop of links
        if output_dir is None:
            raise RequestFailedError(f"profiles can't go to {directory}: {error}") from error
        raise InvalidRequestError(f"output_dir is {output_dir!r}: {error}", param="output_dir") from error
    raise InvalidRequestError(
        f"output_dir is {output_dir!r}, which is not within the directory of profiles, {root}", param="output_dir"
    )


def _name(directory: Path) -> str:
    """A name by the time that no profile in the directory has."""
    base = name = time.strftime("%Y_%m_%d_%H_%M_%S")
    taken = {path.name for path in directory.glob("plugins/profile/*")}
    for count in itertools.count(2):
        if name not in taken:
            break
        name = f"{base}_{count}"
    return name
