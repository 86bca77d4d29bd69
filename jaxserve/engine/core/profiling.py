"""Controls profiles, one at a time: when one starts, after which step it ends, and where it is written.

It owns these rules, and the thread that writes a profile while steps continue. The recording itself is done by a
`Profiler` that is passed in: this module knows no device.
"""

from __future__ import annotations

import itertools
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from jaxserve.api_types import ProfileInfo
from jaxserve.errors import InvalidRequestError, RequestFailedError

logger = logging.getLogger("jaxserve.engine")


class Profiler(Protocol):
    """Records what the device and the engine's thread do."""

    def start(self, directory: Path, name: str, *, with_stack: bool) -> Path:
        """Start recording; return the folder that the files will be in. `with_stack` adds Python calls."""
        ...

    def stop(self) -> None:
        """Stop recording and write the files. This may take seconds, so it is called in a separate thread."""
        ...


class Profiling:
    """Implements `/start_profile` and `/stop_profile`. Profiles are written below `directory`; None disables them."""

    def __init__(self, profiler: Profiler | None = None, directory: str | None = None) -> None:
        self._profiler = profiler
        self._directory = directory
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="profile")
        self._folder: Path | None = None
        self._steps_left: int | None = None
        self._num_steps = 0
        self._written: Future[ProfileInfo] | None = None

    def start(
        self, output_dir: str | None = None, *, num_steps: int | None = None, with_stack: bool = False
    ) -> ProfileInfo:
        """Record from the next step on, until `stop` or for `num_steps` steps.

        `output_dir` is a folder within the directory of profiles. Raise `InvalidRequestError` if a profile is already
        running or being written, or if `output_dir` is not allowed or not usable; raise `RequestFailedError` if the
        profiler doesn't start.
        """
        if self._profiler is None or self._directory is None:
            raise InvalidRequestError("no directory for profiles is configured: start the engine with --profile-dir")
        if self._folder is not None:
            raise InvalidRequestError(f"a profile is running already, in {self._folder}; POST /stop_profile ends it")
        if self._written is not None and not self._written.done():
            raise InvalidRequestError("the last profile is still being written; try again when it is done")
        if num_steps is not None and num_steps < 1:
            raise InvalidRequestError(f"num_steps must be at least 1, got {num_steps}", param="num_steps")
        directory = _folder(Path(self._directory), output_dir)
        try:
            self._folder = self._profiler.start(directory, _name(directory), with_stack=with_stack)
        except Exception as error:  # the errors of profilers have no common base class
            raise RequestFailedError(f"the profile can't be started in {directory}: {error}") from error
        self._steps_left, self._num_steps = num_steps, 0
        logger.info("Profiling into %s%s", self._folder, f", {num_steps} steps" if num_steps else "")
        return ProfileInfo(str(self._folder))

    def stop(self) -> Future[ProfileInfo]:
        """End the running profile, or find the one that ended after its last step and is being written.

        The future resolves when the files are written. Raise `InvalidRequestError` if there is no such profile.
        """
        if self._folder is not None:
            return self._end(self._folder)
        if self._written is not None and not self._written.done():
            return self._written
        last = "" if self._written is None or self._written.exception() else f"; the last: {self._written.result()}"
        raise InvalidRequestError(f"no profile is running{last}; POST /start_profile starts one")

    def count_step(self) -> None:
        """Count a finished step; end the profile after its last one."""
        if self._folder is None:
            return
        self._num_steps += 1
        if self._num_steps == self._steps_left:
            self._end(self._folder)

    def close(self) -> None:
        """End the running profile, if any, and wait until it is written."""
        if self._folder is not None:
            self._end(self._folder)
        self._writer.shutdown()

    def _end(self, folder: Path) -> Future[ProfileInfo]:
        self._folder = None
        self._written = self._writer.submit(self._write, ProfileInfo(str(folder), self._num_steps))
        return self._written

    def _write(self, profile: ProfileInfo) -> ProfileInfo:
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
    """Create and return the folder for a profile. A client may choose a folder, but only within `directory`."""
    try:
        root = directory.resolve()
        chosen = (root / (output_dir or "")).resolve()
        if chosen.is_relative_to(root):
            chosen.mkdir(parents=True, exist_ok=True)
            return chosen
    except (OSError, ValueError, RuntimeError) as error:  # can't be created, invalid path, or a loop of links
        if output_dir is None:
            raise RequestFailedError(f"profiles can't be written to {directory}: {error}") from error
        raise InvalidRequestError(f"output_dir is {output_dir!r}: {error}", param="output_dir") from error
    raise InvalidRequestError(
        f"output_dir is {output_dir!r}, which is not within the directory of profiles, {root}", param="output_dir"
    )


def _name(directory: Path) -> str:
    """Return a name made of the current time that no profile in the directory has."""
    base = name = time.strftime("%Y_%m_%d_%H_%M_%S")
    taken = {path.name for path in directory.glob("plugins/profile/*")}
    for count in itertools.count(2):
        if name not in taken:
            break
        name = f"{base}_{count}"
    return name
