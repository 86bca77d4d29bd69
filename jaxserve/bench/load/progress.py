"""Progress bar of a run on standard error: requests done, open and failed, and the chunk rate."""

from __future__ import annotations

import asyncio
import sys
import time

from tqdm import tqdm

from jaxserve.bench.load.run_load import LoadRun

_INTERVAL = 0.5


async def show_progress(load: LoadRun, *, disable: bool) -> None:
    """Update the bar until cancelled. tqdm shows nothing when standard error is not a terminal."""
    with tqdm(
        total=len(load.records), unit="req", file=sys.stderr, disable=True if disable else None, dynamic_ncols=True
    ) as bar:
        chunks, then = 0, time.perf_counter()
        while not bar.disable:
            try:
                await asyncio.sleep(_INTERVAL)
            finally:
                ended = [record for record in load.records if record.status != "open"]
                now, seen = time.perf_counter(), sum(len(record.token_times) for record in load.records)
                failed = sum(record.status == "failed" for record in ended)
                bar.n = len(ended)
                bar.set_postfix_str(f"{load.open} open, {failed} failed, {(seen - chunks) / (now - then):.0f} chunks/s")
                chunks, then = seen, now
