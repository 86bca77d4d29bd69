"""The programs of a deployment by key, some of which are still being loaded from disk while a server already serves.

A step always runs in its own program: a larger one of its kind would compute the same, but round differently, and a
seed would give other tokens in a server's first seconds than later. So a step waits if its program is not loaded yet,
and that program is loaded next. This module decides which programs a server needs first and in what order the others
are loaded; it neither compiles nor loads any itself.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from jaxserve.runtime.programs.table import KINDS
from jaxserve.runtime.step.program import ProgramKey
from jaxserve.step_plan import Capacity

logger = logging.getLogger("jaxserve.runtime")

# An assumed prompt length, which only the order of loading depends on.
_PROMPT_TOKENS = 64

Program = Callable[..., Any]


def needed_first(keys: Collection[ProgramKey]) -> list[ProgramKey]:
    """Return the programs without which a server is not ready.

    These are the largest of each kind of step with the sampler, as they can run any step; the smallest of each, which a
    first request runs; and all that are not steps.
    """
    steps = sorted((key for key in keys if KINDS[key.kind].is_step), key=lambda key: key.size)
    largest = {key.kind: key for key in steps if not key.greedy}
    smallest = {(key.kind, key.greedy): key for key in reversed(steps)}
    return [*dict.fromkeys([*largest.values(), *smallest.values()]), *(key for key in keys if key not in steps)]


def by_requests(keys: Collection[ProgramKey], capacity: Capacity) -> list[ProgramKey]:
    """Sort programs of steps by how many requests are likely to run when one is needed."""

    def requests(key: ProgramKey) -> float:
        return KINDS[key.kind].num_decoding(capacity, key.size) or key.size / _PROMPT_TOKENS

    return sorted(keys, key=lambda key: (requests(key), not key.greedy))


class ProgramSet(Mapping[ProgramKey, Program]):
    """Maps keys to programs: those that are `ready`, and `pending` ones that `load` reads in a thread.

    The thread loads programs that a caller waits for first, then the others in their order. It ends when all are
    loaded, when the set is collected as garbage or when the main thread ends. A program that fails to load is dropped,
    and a larger one runs its steps. Looking up a pending program waits for it; iterating waits for all.
    """

    def __init__(
        self,
        ready: Mapping[ProgramKey, Program],
        pending: Collection[ProgramKey] = (),
        load: Callable[[ProgramKey], Program] | None = None,
    ) -> None:
        self._ready = dict(ready)
        self._keys: list[ProgramKey] = [*ready, *pending]
        self._queue = list(pending)
        self._changed = threading.Condition()
        if load is not None:
            # It is no daemon thread: in the middle of a load, that would still run while the interpreter shuts down.
            threading.Thread(target=_load_pending, args=(weakref.ref(self), load), name="load-programs").start()

    def substitute(self, key: ProgramKey) -> ProgramKey:
        """Return the key itself once its program is loaded; if that failed, the key of the smallest substitute."""
        if self._wait(key):
            return key
        others = [one for one in tuple(self._ready) if one.kind == key.kind and (key.greedy or not one.greedy)]
        larger = [(one.size, not one.greedy, one) for one in others if one.size >= key.size]
        return min(larger)[-1]

    @property
    def num_pending(self) -> int:
        """The number of programs that are not loaded yet."""
        return len(self._keys) - len(self._ready)

    def take_next(self) -> ProgramKey | None:
        """Remove the key to load next from the queue and return it."""
        with self._changed:
            return self._queue.pop(0) if self._queue else None

    def put(self, key: ProgramKey, program: Program | None) -> None:
        """Add a loaded program, or drop its key if `program` is None."""
        with self._changed:
            if program is None:
                self._keys.remove(key)
            else:
                self._ready[key] = program
            self._changed.notify_all()

    def _wait(self, key: ProgramKey) -> bool:
        """Wait until the program is loaded or dropped, and return whether it is there."""
        if key not in self._ready:
            with self._changed:
                self._queue.sort(key=lambda one: one != key)
                self._changed.wait_for(lambda: key in self._ready or key not in self._keys)
        return key in self._ready

    def __getitem__(self, key: ProgramKey) -> Program:
        self._wait(key)
        return self._ready[key]

    def __iter__(self) -> Iterator[ProgramKey]:
        with self._changed:
            self._changed.wait_for(lambda: not self.num_pending)
        return iter(tuple(self._keys))

    def __len__(self) -> int:
        return len(self._keys)


def _load_pending(programs: weakref.ref[ProgramSet], load: Callable[[ProgramKey], Program]) -> None:
    start, count = time.monotonic(), 0
    # A weak reference, held as a strong one only briefly: this thread must not keep the set alive.
    while (program_set := programs()) is not None and threading.main_thread().is_alive():
        key = program_set.take_next()
        del program_set
        if key is None:
            logger.info("programs: %d more loaded, %.1f s after the first", count, time.monotonic() - start)
            return
        program = None
        try:
            program = load(key)
            count += 1
        except Exception as error:  # a damaged pickle may raise anything
            logger.warning("kept program %s can't be loaded (%r): a larger one runs its steps", key, error)
        if (program_set := programs()) is not None:
            program_set.put(key, program)
        del program_set
