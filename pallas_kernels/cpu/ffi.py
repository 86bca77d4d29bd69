"""The interface to XLA: a function that XLA calls with buffers, and that shares its work among XLA's threads.

This module owns the layout of XLA's structs (`xla/ffi/api/c_api.h`, which jaxlib has in its `include`; they are only
ever extended at their ends) and the distribution of items to threads. The calling thread works too, and takes items
until none is left, so that a busy thread pool delays nothing. A thread that starts too late finds no items.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from pallas_kernels.cpu.emit import Function, Module, Value
from pallas_kernels.cpu.types import I32, I64, PTR, Type

# XLA_FFI_CallFrame
_EXTENSION, _API, _CONTEXT, _ARGUMENTS, _RESULTS = 8, 16, 24, 72, 112
# XLA_FFI_Metadata_Extension, XLA_FFI_Metadata: the handler stores here which version it was written for
_METADATA, _MAJOR, _MINOR = 24, 24, 28
_VERSION = (0, 4)
# XLA_FFI_Buffer
_DATA, _DIMS = 24, 40
# XLA_FFI_Api: its functions
_DESTROY_ERROR, _SCHEDULE, _NUM_THREADS = 64, 136, 144

# A job: memory shared with threads, which may start only after the call has returned
_NEXT, _DONE, _USERS, _ITEMS, _CAPTURED = 0, 8, 16, 24, 32
_SPIN_TURNS = 50_000
_SLEEP_MICROSECONDS = 10


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array of the call: a pointer to its bytes, and one to its dimensions."""

    function: Function
    data: Value
    dims: Value

    def dim(self, axis: int) -> Value:
        """Return the length of a dimension."""
        return self.function.load(I64, self.dims, 8 * axis)


class Call:
    """A call by XLA. `arguments` and `results` are its arrays, in order; `num_threads` threads can work on it."""

    def __init__(self, function: Function, frame: Value, num_arguments: int, num_results: int) -> None:
        self.function = function
        self._api, self._context = (function.load(PTR, frame, at) for at in (_API, _CONTEXT))
        self.arguments = self._buffers(function.load(PTR, frame, _ARGUMENTS), num_arguments)
        self.results = self._buffers(function.load(PTR, frame, _RESULTS), num_results)
        self.num_threads = self._num_threads()

    def _buffers(self, pointers: Value, count: int) -> list[Buffer]:
        f = self.function
        buffers = [f.load(PTR, pointers, 8 * i) for i in range(count)]
        return [Buffer(f, f.load(PTR, buffer, _DATA), f.load(PTR, buffer, _DIMS)) for buffer in buffers]

    def parallel_for(self, num_items: Value, captured: Sequence[Value], work: Callable[..., None]) -> None:
        """Run the code that `work(function, item, *captured)` writes for each item, in any order, on any thread.

        Waits until all items are done. Only integers and pointers can be captured. A call may do this once.
        """
        f = self.function
        task = _task(f.module, f"{f.name}_task", [value.type for value in captured], work)
        helpers = f.maximum(f.minimum(self.num_threads, num_items) - 1, 0)
        job = f.call("malloc", PTR, f.constant(I64, _CAPTURED + 8 * len(captured)))
        for at, value in ((_NEXT, 0), (_DONE, 0), (_USERS, helpers + 1), (_ITEMS, num_items)):
            f.store(value if isinstance(value, Value) else f.constant(I64, value), job, at)
        for i, value in enumerate(captured):
            f.store(value, job, _CAPTURED + 8 * i)
        message = self._schedule_message(task, job)
        schedule = f.load(PTR, self._api, _SCHEDULE)

        def start_helper(_: Value) -> None:
            error = f.call_pointer(schedule, PTR, message)
            f.when(error.equals(0), lambda: None, lambda: self._remove_helper(error, job))

        f.loop(helpers, start_helper)
        f.call(f"{task}_items", None, job)
        self._wait(job, num_items)
        f.call(f"{task}_leave", None, job)

    def _num_threads(self) -> Value:
        f = self.function
        count, message = f.stack(8), f.stack(32)
        f.store(f.constant(I64, 1), count)
        for at, value in ((0, f.constant(I64, 32)), (8, f.constant(PTR, 0)), (16, self._context), (24, count)):
            f.store(value, message, at)
        error = f.call_pointer(f.load(PTR, self._api, _NUM_THREADS), PTR, message)
        f.when(error.equals(0), lambda: None, lambda: self._destroy(error))
        return f.load(I64, count)

    def _schedule_message(self, task: str, job: Value) -> Value:
        """Store an XLA_FFI_ThreadPool_Schedule_Args on the stack."""
        f = self.function
        message = f.stack(40)
        f.store(f.constant(I64, 40), message)
        f.store(f.constant(PTR, 0), message, 8)
        f.store(self._context, message, 16)
        f.store(Value(f, PTR, f"@{task}"), message, 24)
        f.store(job, message, 32)
        return message

    def _remove_helper(self, error: Value, job: Value) -> None:
        """Count one user less: XLA has no thread for this helper, and the other threads do its part."""
        self._destroy(error)
        self.function.fetch_add(self.function.at(job, _USERS), -1)

    def _destroy(self, error: Value) -> None:
        f = self.function
        message = f.stack(24)
        for at, value in ((0, f.constant(I64, 24)), (8, f.constant(PTR, 0)), (16, error)):
            f.store(value, message, at)
        f.call_pointer(f.load(PTR, self._api, _DESTROY_ERROR), None, message)

    def _wait(self, job: Value, num_items: Value) -> None:
        """Wait until all items are done: spin for about as long as an item takes, then sleep between looks.

        The thread with the last item may need our core, so spinning has an end. (With other processes on both cores,
        `sched_yield` took half as long again.)
        """
        f = self.function

        def look(turns: Value) -> list[Value]:
            f.when(turns > _SPIN_TURNS, lambda: _ignore(f.call("usleep", I32, f.constant(I32, _SLEEP_MICROSECONDS))))
            return [turns + 1]

        f.loop_while(lambda _: f.load_shared(f.at(job, _DONE)) < num_items, look, f.constant(I64, 0))


def handler(module: Module, name: str, num_arguments: int, num_results: int, body: Callable[[Call], None]) -> None:
    """Add the function `name` that XLA calls; `body` writes what it does with its arrays."""
    f = module.function(name, [PTR], PTR, public=True)
    frame = f.arguments[0]
    extension = f.load(PTR, frame, _EXTENSION)

    def store_version() -> None:
        metadata = f.load(PTR, extension, _METADATA)
        for at, number in zip((_MAJOR, _MINOR), _VERSION):
            f.store(f.constant(I32, number), metadata, at)

    f.when(extension.equals(0), lambda: body(Call(f, frame, num_arguments, num_results)), store_version)
    f.ret(f.constant(PTR, 0))


def _task(module: Module, name: str, kinds: Sequence[Type], work: Callable[..., None]) -> str:
    """Write the function that a helping thread runs, and the functions that it calls; return its name."""
    one = module.function(f"{name}_item", [I64, *kinds])
    work(one, *one.arguments)
    one.ret()

    f = module.function(f"{name}_items", [PTR])
    job = f.arguments[0]
    num_items = f.load(I64, job, _ITEMS)
    captured = [f.load(kind, job, _CAPTURED + 8 * i) for i, kind in enumerate(kinds)]

    def take(item: Value) -> list[Value]:
        f.call(one.name, None, item, *captured)
        f.fetch_add(f.at(job, _DONE), 1)
        return [f.fetch_add(job, 1)]

    f.loop_while(lambda item: item < num_items, take, f.fetch_add(job, 1))
    f.ret()

    f = module.function(f"{name}_leave", [PTR])
    job = f.arguments[0]
    f.when(f.fetch_add(f.at(job, _USERS), -1).equals(1), lambda: _ignore(f.call("free", None, job)))
    f.ret()

    f = module.function(name, [PTR])
    for part in ("items", "leave"):
        f.call(f"{name}_{part}", None, f.arguments[0])
    f.ret()
    return name


def _ignore(_: Value) -> None:
    """Drop the value of a call that is made for its effect."""
