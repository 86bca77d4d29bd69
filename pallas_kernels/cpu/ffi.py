"""The border to XLA: a function that XLA calls with buffers, and that shares its work among XLA's threads.

Owns the layout of XLA's structs (`xla/ffi/api/c_api.h`, which jaxlib has in its `include`; only ever extended at their
ends) and the hand-over of items to threads. Whoever calls takes part, and takes items until none is left, so that a
busy pool delays nothing; what a thread finds that comes too late is an empty list.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from pallas_kernels.cpu.emit import Function, Module, Value
from pallas_kernels.cpu.types import I32, I64, PTR, Type

# XLA_FFI_CallFrame
_EXTENSION, _API, _CONTEXT, _ARGUMENTS, _RESULTS = 8, 16, 24, 72, 112
# XLA_FFI_Metadata_Extension, XLA_FFI_Metadata: where the handler says which version it was written for
_METADATA, _MAJOR, _MINOR = 24, 24, 28
_VERSION = (0, 4)
# XLA_FFI_Buffer
_DATA, _DIMS = 24, 40
# XLA_FFI_Api: its functions
_DESTROY_ERROR, _SCHEDULE, _NUM_THREADS = 64, 136, 144

# A job: what is shared with threads that may come when the call is over
_NEXT, _DONE, _USERS, _ITEMS, _CAPTURED = 0, 8, 16, 24, 32
_TURNS_AWAKE = 50_000
_NAP_MICROSECONDS = 10


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array of the call: where its bytes are, and its dimensions."""

    function: Function
    data: Value
    dims: Value

    def dim(self, axis: int) -> Value:
        """The length of a dimension."""
        return self.function.load(I64, self.dims, 8 * axis)


class Call:
    """A call in progress. `arguments` and `results` are its arrays, in their order; `num_threads` can work on it."""

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

    def share(self, num_items: Value, captured: Sequence[Value], work: Callable[..., None]) -> None:
        """`work(function, item, *captured)` writes what is done for each item, in whatever order, by whatever thread;
        the call goes on when all are done. Only integers and pointers can be captured. Once in a call."""
        f = self.function
        task = _task(f.module, f"{f.name}_task", [value.type for value in captured], work)
        helpers = f.most(f.least(self.num_threads, num_items) - 1, 0)
        job = f.call("malloc", PTR, f.constant(I64, _CAPTURED + 8 * len(captured)))
        for at, value in ((_NEXT, 0), (_DONE, 0), (_USERS, helpers + 1), (_ITEMS, num_items)):
            f.store(value if isinstance(value, Value) else f.constant(I64, value), job, at)
        for i, value in enumerate(captured):
            f.store(value, job, _CAPTURED + 8 * i)
        asked = self._message(task, job)
        schedule = f.load(PTR, self._api, _SCHEDULE)

        def ask(_: Value) -> None:
            error = f.call_pointer(schedule, PTR, asked)
            f.when(error.same(0), lambda: None, lambda: self._forgive(error, job))

        f.loop(helpers, ask)
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
        f.when(error.same(0), lambda: None, lambda: self._destroy(error))
        return f.load(I64, count)

    def _message(self, task: str, job: Value) -> Value:
        """XLA_FFI_ThreadPool_Schedule_Args."""
        f = self.function
        message = f.stack(40)
        f.store(f.constant(I64, 40), message)
        f.store(f.constant(PTR, 0), message, 8)
        f.store(self._context, message, 16)
        f.store(Value(f, PTR, f"@{task}"), message, 24)
        f.store(job, message, 32)
        return message

    def _forgive(self, error: Value, job: Value) -> None:
        """There is no such thread: the others do its part."""
        self._destroy(error)
        self.function.fetch_add(self.function.at(job, _USERS), -1)

    def _destroy(self, error: Value) -> None:
        f = self.function
        message = f.stack(24)
        for at, value in ((0, f.constant(I64, 24)), (8, f.constant(PTR, 0)), (16, error)):
            f.store(value, message, at)
        f.call_pointer(f.load(PTR, self._api, _DESTROY_ERROR), None, message)

    def _wait(self, job: Value, num_items: Value) -> None:
        """Until all are done: awake for as long as an item takes, then in naps, as whoever has the last one may need
        our core. (Where two neighbours kept both cores busy, giving way with `sched_yield` took half as long again.)"""
        f = self.function

        def look(turns: Value) -> list[Value]:
            f.when(turns > _TURNS_AWAKE, lambda: _drop(f.call("usleep", I32, f.constant(I32, _NAP_MICROSECONDS))))
            return [turns + 1]

        f.loop_while(lambda _: f.load_shared(f.at(job, _DONE)) < num_items, look, f.constant(I64, 0))


def handler(module: Module, name: str, num_arguments: int, num_results: int, body: Callable[[Call], None]) -> None:
    """The function `name` that XLA calls; `body` writes what it does with its arrays."""
    f = module.function(name, [PTR], PTR, public=True)
    frame = f.arguments[0]
    extension = f.load(PTR, frame, _EXTENSION)

    def introduce() -> None:
        metadata = f.load(PTR, extension, _METADATA)
        for at, number in zip((_MAJOR, _MINOR), _VERSION):
            f.store(f.constant(I32, number), metadata, at)

    f.when(extension.same(0), lambda: body(Call(f, frame, num_arguments, num_results)), introduce)
    f.ret(f.constant(PTR, 0))


def _task(module: Module, name: str, kinds: Sequence[Type], work: Callable[..., None]) -> str:
    """What a thread does that was asked for help."""
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
    f.when(f.fetch_add(f.at(job, _USERS), -1).same(1), lambda: _drop(f.call("free", None, job)))
    f.ret()

    f = module.function(name, [PTR])
    for part in ("items", "leave"):
        f.call(f"{name}_{part}", None, f.arguments[0])
    f.ret()
    return name


def _drop(_: Value) -> None:
    """Of a call that matters for what it does."""
