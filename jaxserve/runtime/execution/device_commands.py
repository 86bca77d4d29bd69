"""The calls of programs: each process of a mesh makes the same ones in the same order, on its part of the arrays.

`DeviceCalls` owns weights, state and programs. `LeadingCalls` is process 0's: it sends a call, as the very bytes that
the program is given, before it makes it; `obey` is what a follower does with them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import msgspec
import numpy as np
from jax.sharding import Mesh

from jaxserve.runtime.execution.host_pool import HostPool
from jaxserve.runtime.execution.local_shard import LocalPart, local_part, spans_processes
from jaxserve.runtime.programs.builder import READ_KEY, UPDATE_KEY, WRITE_KEY
from jaxserve.runtime.programs.program_set import Key
from jaxserve.runtime.step.state import ArraySpec, DeviceState
from jaxserve.runtime.step.step import StepOutput

Slots = list[list[int]]


class Update(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Open slots."""

    packed: bytes


class Step(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Run a step by the program of this name."""

    program: str
    packed: bytes


class Save(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Copy pages to slots of host memory."""

    packed: bytes
    slots: Slots


class Load(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Copy slots of host memory to pages."""

    packed: bytes
    slots: Slots


Command = Update | Step | Save | Load


class Calls(Protocol):
    """What runs on the devices, in the order of the calls. `packed` is `[ranks, size]`, slots are by rank."""

    def update(self, packed: np.ndarray) -> None: ...

    def step(self, key: Key, packed: np.ndarray) -> StepOutput: ...

    def save(self, packed: np.ndarray, slots: Slots) -> None: ...

    def load(self, packed: np.ndarray, slots: Slots) -> None: ...

    def take_arrived(self) -> None: ...


class DeviceCalls:
    """The calls of this process. If a program raises, the state is gone for good.

    `mesh` is asked for where its programs span several processes; `host` is the memory for saved pages.
    """

    def __init__(
        self,
        params: Any,
        state: DeviceState,
        programs: Mapping[Key, Callable[..., Any]],
        host: HostPool | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self._params = params
        self._state = state
        self._programs = programs
        self._host = host
        self._mesh = mesh if mesh is not None and spans_processes(mesh) else None
        self._inputs: dict[tuple[int, ...], LocalPart] = {}

    def update(self, packed: np.ndarray) -> None:
        """Open slots, one of each rank at most."""
        self._state = self._programs[UPDATE_KEY](self._state, self._given(packed))

    def step(self, key: Key, packed: np.ndarray) -> StepOutput:
        """Start a step; its output is on its way to the host, where this process reads it."""
        self._state, output = self._programs[key](self._params, self._state, self._given(packed))
        return output

    def save(self, packed: np.ndarray, slots: Slots) -> None:
        """Copy pages to host memory."""
        assert self._host is not None, "pages to copy, and no memory to copy to"
        self._state, rows = self._programs[READ_KEY](self._state, self._given(packed))
        self._host.take(slots, rows)

    def load(self, packed: np.ndarray, slots: Slots) -> None:
        """Copy pages back; waits for those that are still on their way to host memory."""
        assert self._host is not None, "pages to copy, and no memory to copy from"
        self._state = self._programs[WRITE_KEY](self._state, self._given(packed), self._host.give(slots))

    def take_arrived(self) -> None:
        """Take in saved pages that are here."""
        if self._host is not None:
            self._host.take_arrived()

    def _given(self, packed: np.ndarray) -> np.ndarray | jax.Array:
        if self._mesh is None:
            return packed
        part = self._inputs.get(packed.shape)
        if part is None:
            part = local_part(self._mesh, ArraySpec(packed.shape, packed.dtype, ("ranks", None)))
            self._inputs[packed.shape] = part
        return part.put_own(packed)


class LeadingCalls:
    """Process 0's calls: `broadcast` gets each of them, encoded, before it is made."""

    def __init__(self, calls: DeviceCalls, broadcast: Callable[[bytes], None]) -> None:
        self._calls = calls
        self._broadcast = broadcast
        self._encode = msgspec.msgpack.Encoder().encode

    def update(self, packed: np.ndarray) -> None:
        self._broadcast(self._encode(Update(packed.data)))  # type: ignore[arg-type]
        self._calls.update(packed)

    def step(self, key: Key, packed: np.ndarray) -> StepOutput:
        self._broadcast(self._encode(Step(str(key), packed.data)))  # type: ignore[arg-type]
        return self._calls.step(key, packed)

    def save(self, packed: np.ndarray, slots: Slots) -> None:
        self._broadcast(self._encode(Save(packed.data, slots)))  # type: ignore[arg-type]
        self._calls.save(packed, slots)

    def load(self, packed: np.ndarray, slots: Slots) -> None:
        self._broadcast(self._encode(Load(packed.data, slots)))  # type: ignore[arg-type]
        self._calls.load(packed, slots)

    def take_arrived(self) -> None:
        self._calls.take_arrived()


class Following:
    """A follower's hands: `obey` makes the calls of process 0 here. A thread waits for each step, as nobody else does,
    and tells `on_failure` of one that failed."""

    def __init__(
        self, calls: DeviceCalls, programs: Mapping[Key, Any], num_ranks: int, on_failure: Callable[[str], None]
    ) -> None:
        self._calls = calls
        self._keys = {str(key): key for key in programs}
        self._num_ranks = num_ranks
        self._decode = msgspec.msgpack.Decoder(Command).decode
        self._steps: queue.SimpleQueue[StepOutput] = queue.SimpleQueue()
        self._on_failure = on_failure
        threading.Thread(target=self._watch, name="jaxserve-steps", daemon=True).start()

    def obey(self, command: bytes) -> None:
        """Do what process 0 did."""
        done = self._decode(command)
        packed = np.frombuffer(done.packed, np.int32).reshape(self._num_ranks, -1)
        match done:
            case Step():
                self._steps.put(self._calls.step(self._keys[done.program], packed))
                self._calls.take_arrived()
            case Update():
                self._calls.update(packed)
            case Save():
                self._calls.save(packed, done.slots)
            case Load():
                self._calls.load(packed, done.slots)

    def _watch(self) -> None:
        while True:
            output = self._steps.get()
            try:
                jax.block_until_ready(output)
            except Exception as error:  # whatever a program may raise
                self._on_failure(f"a step failed: {type(error).__name__}: {error}")
                return
