"""The programs of a deployment by key, some of which may still be on their way from disk while others serve.

A step always runs in its own program: another of its kind would do, but round otherwise, and a seed would give other
tokens in a server's first seconds than later. So a step whose program is on its way waits for it, and it comes next. It
decides which programs a server must not be without, and in what order the others come. It makes and loads none itself.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from jaxserve.runtime.step.batch import ProgramKey

logger = logging.getLogger("jaxserve.runtime")

# Of a request, to tell which of two programs is needed sooner; nothing else depends on it.
_PROMPT_TOKENS = 64

Key = ProgramKey | str
Program = Callable[..., Any]


def needed_first(keys: Collection[Key]) -> list[Key]:
    """Those without which a server is not ready: what can run any step (of each kind the largest, with the sampler),
    what a first request runs (the smallest of each kind), and all that are no steps."""
    steps = sorted((key for key in keys if isinstance(key, ProgramKey)), key=lambda key: key.size)
    largest = {key.kind: key for key in steps if not key.greedy}
    smallest = {(key.kind, key.greedy): key for key in reversed(steps)}
    return [*dict.fromkeys([*largest.values(), *smallest.values()]), *(key for key in keys if isinstance(key, str))]


class ProgramSet(Mapping[Key, Program]):
    """`ready` programs, and `coming` ones that `load` fetches in a thread until all are here or the set is gone: those
    that somebody waits for, then those of few requests. One that can't be loaded is left out, and larger ones run its
    steps. Whoever asks for a program that is coming, or for all, waits."""

    def __init__(
        self,
        ready: Mapping[Key, Program],
        coming: Collection[ProgramKey] = (),
        load: Callable[[Key], Program] | None = None,
    ) -> None:
        self._ready = dict(ready)
        self._keys: list[Key] = [*ready, *coming]
        self._queue = sorted(coming, key=lambda key: (_num_requests(key), not key.greedy))
        self._arrived = threading.Condition()
        if load is not None:
            # Not a daemon: one of those in the middle of a load would be there while the process takes itself apart.
            threading.Thread(target=_fetch, args=(weakref.ref(self), load), name="load-programs").start()

    def fitting(self, key: ProgramKey) -> ProgramKey:
        """The program itself as soon as it is here; where it was left out, the smallest that does the same."""
        if self._wait(key):
            return key
        others = [
            one
            for one in tuple(self._ready)
            if isinstance(one, ProgramKey)
            and one.kind == key.kind
            and one.size >= key.size
            and (key.greedy or not one.greedy)
        ]
        return min(others, key=lambda one: (one.size, not one.greedy))

    @property
    def num_coming(self) -> int:
        """How many are still on their way."""
        return len(self._keys) - len(self._ready)

    def next(self) -> ProgramKey | None:
        """The next one to load."""
        with self._arrived:
            return self._queue.pop(0) if self._queue else None

    def put(self, key: Key, program: Program | None) -> None:
        """One has arrived, or never will."""
        with self._arrived:
            if program is None:
                self._keys.remove(key)
            else:
                self._ready[key] = program
            self._arrived.notify_all()

    def _wait(self, key: Key) -> bool:
        """Whether there is such a program, once that is known."""
        if key not in self._ready:
            with self._arrived:
                self._queue.sort(key=lambda one: one != key)
                self._arrived.wait_for(lambda: key in self._ready or key not in self._keys)
        return key in self._ready

    def __getitem__(self, key: Key) -> Program:
        self._wait(key)
        return self._ready[key]

    def __iter__(self) -> Iterator[Key]:
        with self._arrived:
            self._arrived.wait_for(lambda: not self.num_coming)
        return iter(tuple(self._keys))

    def __len__(self) -> int:
        return len(self._keys)


def _num_requests(key: ProgramKey) -> float:
    """That are likely to run when the program is asked for."""
    return key.size if key.kind == "decode" else key.size / _PROMPT_TOKENS


def _fetch(programs: weakref.ref[ProgramSet], load: Callable[[Key], Program]) -> None:
    start, count = time.monotonic(), 0
    # Whoever held the set, or the whole process, may be done with it.
    while (there := programs()) is not None and threading.main_thread().is_alive():
        key = there.next()
        del there
        if key is None:
            logger.info("programs: %d more are here, %.1f s after the first", count, time.monotonic() - start)
            return
        program = None
        try:
            program = load(key)
            count += 1
        except Exception as error:  # a damaged pickle may raise anything
            logger.warning("kept program %s can't be loaded (%r): a larger one runs its steps", key, error)
        if (there := programs()) is not None:
            there.put(key, program)
        del there
