"""The folder in which XLA keeps the kernels it chose by trial runs on a GPU, beside the kept programs.

A program depends on our sources, and is compiled again when they change. What XLA chose for a matrix product depends on
the product and on XLA, so it is kept by the kind of device and the version of jaxlib, and not tried again.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxserve.runtime.programs.own_files import trusted_folder

logger = logging.getLogger("jaxserve.runtime")


def autotune_folder(device: Any, cache_dir: Path | None) -> Path | None:
    """Return the folder for a device, made if needed; None if XLA tunes nothing for it or no trusted folder exists."""
    if cache_dir is None or device.platform not in ("gpu", "cuda"):
        return None
    kind = re.sub(r"[^a-z0-9]+", "-", device.device_kind.lower()).strip("-")
    return trusted_folder(cache_dir / "autotune" / f"{kind}-jaxlib-{importlib.metadata.version('jaxlib')}")


def autotune_options(folder: Path | None) -> dict[str, str]:
    """Return the compile options with which XLA reads the folder, and adds what is missing. It writes atomically."""
    return {} if folder is None else {"xla_gpu_per_fusion_autotune_cache_dir": str(folder)}


@contextmanager
def report_tuning(folder: Path | None, num_programs: int) -> Iterator[None]:
    """Log that programs are compiled for a GPU, which may take long, and afterwards how many choices XLA has added."""
    if folder is None:
        yield
        return
    before = _num_choices(folder)
    logger.info(
        "compiling %d programs; XLA tries out matrix products on the device, %d of them are known from earlier starts",
        num_programs,
        before,
    )
    start = time.monotonic()
    yield
    added = _num_choices(folder) - before
    logger.info("compiled in %.1f s; %d matrix products were tried out for %s", time.monotonic() - start, added, folder)


def _num_choices(folder: Path) -> int:
    return sum(path.suffix in (".textproto", ".pb") for path in folder.rglob("*"))
