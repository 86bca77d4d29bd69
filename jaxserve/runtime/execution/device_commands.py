"""Runs programs on the devices. All processes of a mesh run the same ones in the same order, each on its own shards.

`LocalCommands` owns the weights, the state and the programs of a process. Process 0 wraps it in `BroadcastCommands`,
which sends each command, with the very bytes that the program takes as input, before running it. Every other process
runs what it receives in a `FollowerExecutor`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import msgspec
import numpy as np
from jax.sharding import Mesh

from jaxserve.api_types import StageTimes
from jaxserve.runtime.execution.host_pool import HostPool
from jaxserve.runtime.execution.local_shard import LocalShard, local_shard, spans_processes
from jaxserve.runtime.programs.builder import leaves_of
from jaxserve.runtime.programs.table import KINDS
from jaxserve.runtime.step.page_copies import pack_pages, read_key, write_key
from jaxserve.runtime.step.program import ProgramKey
from jaxserve.runtime.step.state import ArraySpec, DeviceState

Pages = list[list[int]]
"""Pages of the devices or slots of host memory, by rank."""


class RunCommand(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Run the program of this name, after step `after`."""

    program: str
    packed: bytes
    after: int


class StepCommand(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Start a step, in the program of this name, after step `after`."""

    program: str
    packed: bytes
    after: int


class FinishCommand(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Have all pipeline stages start a step."""

    number: int


class SaveCommand(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Copy pages of a KV group to slots of host memory."""

    group: int
    pages: Pages
    slots: Pages


class LoadCommand(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Copy slots of host memory to pages of a KV group."""

    group: int
    pages: Pages
    slots: Pages


Command = RunCommand | StepCommand | FinishCommand | SaveCommand | LoadCommand


Receive = Callable[[Any], None]
"""Gets the output of a step as soon as all of its programs have started."""


class DeviceCommands(Protocol):
    """The commands that devices run, in the order of the calls. `packed` is `[ranks, size]`.

    Steps are numbered. `after` is the last step that drew a token which a program needs, -1 if there is none: with
    pipeline stages, it may be in one of them yet.
    """

    def run(self, key: ProgramKey, packed: np.ndarray, after: int = -1) -> Any:
        """Run a program that is no step and return its output without waiting for it."""
        ...

    def start(self, key: ProgramKey, packed: np.ndarray, after: int, receive: Receive) -> int:
        """Start the next step and return its number."""
        ...

    def finish(self, number: int) -> None:
        """Have all pipeline stages start a step, so that its output is received."""
        ...

    def stage_times(self) -> Mapping[int, StageTimes]:
        """Return the times of the pipeline stages of this process, by number."""
        ...

    def save(self, group: int, pages: Pages, slots: Pages) -> None: ...

    def load(self, group: int, pages: Pages, slots: Pages) -> None: ...

    def store_arrived(self) -> None: ...


class LocalCommands:
    """Runs commands on the devices of this process. If a program raises, the state is lost.

    `host` is the memory for saved pages of each KV group. `mesh` is needed only if it spans several processes.
    """

    def __init__(
        self,
        params: Any,
        state: DeviceState,
        programs: Mapping[ProgramKey, Callable[..., Any]],
        host: Sequence[HostPool] = (),
        mesh: Mesh | None = None,
    ) -> None:
        self._params = leaves_of(params)
        self._state = leaves_of(state)
        self._programs = programs
        self._host = host
        self._mesh = mesh if mesh is not None and spans_processes(mesh) else None
        self._inputs: dict[tuple[int, ...], LocalShard] = {}

    def run(self, key: ProgramKey, packed: np.ndarray, after: int = -1) -> Any:
        return self.call(key, packed)

    def start(self, key: ProgramKey, packed: np.ndarray, after: int, receive: Receive) -> int:
        receive(self.call(key, packed))
        return 0

    def finish(self, number: int) -> None:
        """Do nothing: there is one stage."""

    def is_started(self, number: int) -> bool:
        """Return True: there is one stage."""
        return True

    def stage_times(self) -> Mapping[int, StageTimes]:
        return {}

    def call(self, key: ProgramKey, packed: np.ndarray, *rows: Any) -> Any:
        """Start a program and return its output without waiting for it."""
        params = self._params if KINDS[key.kind].takes_weights else ()
        self._state, output = self._programs[key](params, self._state, self._input(packed), *rows)
        return output

    def save(self, group: int, pages: Pages, slots: Pages) -> None:
        """Copy pages to host memory."""
        self._host[group].store(slots, self.call(read_key(group), self._pages(group, pages)))

    def load(self, group: int, pages: Pages, slots: Pages) -> None:
        """Copy pages back. Waits for pages that are still being copied to host memory."""
        self.call(write_key(group), self._pages(group, pages), *self._host[group].fetch(slots))

    def _pages(self, group: int, pages: Pages) -> np.ndarray:
        return pack_pages(pages, self._host[group].pages_per_copy)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that saved pages take once every slot was used."""
        return sum(pool.nbytes for pool in self._host)

    def store_arrived(self) -> None:
        """Store the saved pages whose copies to the host are complete."""
        for pool in self._host:
            pool.store_arrived()

    def _input(self, packed: np.ndarray) -> np.ndarray | jax.Array:
        if self._mesh is None:
            return packed
        shard = self._inputs.get(packed.shape)
        if shard is None:
            shard = local_shard(self._mesh, ArraySpec(packed.shape, packed.dtype, ("ranks", None)))
            self._inputs[packed.shape] = shard
        return shard.put_from_whole(packed)


class LeadingCommands(DeviceCommands, Protocol):
    """The commands of a process that leads others."""

    def is_started(self, number: int) -> bool:
        """Return whether all pipeline stages have started a step."""
        ...


class BroadcastCommands:
    """Runs the commands of process 0; `broadcast` is called with each one, encoded, before it runs."""

    def __init__(self, commands: LeadingCommands, broadcast: Callable[[bytes], None]) -> None:
        self._commands = commands
        self._broadcast = broadcast
        self._encode = msgspec.msgpack.Encoder().encode

    def run(self, key: ProgramKey, packed: np.ndarray, after: int = -1) -> Any:
        self._broadcast(self._encode(RunCommand(str(key), packed.data, after)))  # type: ignore[arg-type]
        return self._commands.run(key, packed, after)

    def start(self, key: ProgramKey, packed: np.ndarray, after: int, receive: Receive) -> int:
        self._broadcast(self._encode(StepCommand(str(key), packed.data, after)))  # type: ignore[arg-type]
        return self._commands.start(key, packed, after, receive)

    def finish(self, number: int) -> None:
        if not self._commands.is_started(number):
            self._broadcast(self._encode(FinishCommand(number)))
            self._commands.finish(number)

    def stage_times(self) -> Mapping[int, StageTimes]:
        return self._commands.stage_times()

    def save(self, group: int, pages: Pages, slots: Pages) -> None:
        self._broadcast(self._encode(SaveCommand(group, pages, slots)))
        self._commands.save(group, pages, slots)

    def load(self, group: int, pages: Pages, slots: Pages) -> None:
        self._broadcast(self._encode(LoadCommand(group, pages, slots)))
        self._commands.load(group, pages, slots)

    def store_arrived(self) -> None:
        self._commands.store_arrived()


class FollowerExecutor:
    """Runs on a follower the commands that process 0 broadcasts.

    No other code of a follower waits for steps, so a thread waits for them, and calls `on_failure` with the reason if
    one fails.
    """

    def __init__(
        self,
        commands: DeviceCommands,
        keys: Iterable[ProgramKey],
        num_ranks: int,
        on_failure: Callable[[str], None],
    ) -> None:
        self._commands = commands
        self._keys = {str(key): key for key in keys}
        self._num_ranks = num_ranks
        self._decode = msgspec.msgpack.Decoder(Command).decode
        self._steps: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._on_failure = on_failure
        threading.Thread(target=self._watch, name="jaxserve-steps", daemon=True).start()

    def execute(self, command: bytes) -> None:
        """Run one encoded command."""
        match self._decode(command):
            case RunCommand(program, packed, after):
                self._steps.put(self._commands.run(self._keys[program], self._unpacked(packed), after))
                self._commands.store_arrived()
            case StepCommand(program, packed, after):
                self._commands.start(self._keys[program], self._unpacked(packed), after, self._steps.put)
                self._commands.store_arrived()
            case FinishCommand(number):
                self._commands.finish(number)
            case SaveCommand(group, pages, slots):
                self._commands.save(group, pages, slots)
            case LoadCommand(group, pages, slots):
                self._commands.load(group, pages, slots)

    def _unpacked(self, packed: bytes) -> np.ndarray:
        return np.frombuffer(packed, np.int32).reshape(self._num_ranks, -1)

    def _watch(self) -> None:
        while True:
            output = self._steps.get()
            try:
                jax.block_until_ready(output)
            except Exception as error:  # a program may raise anything
                self._on_failure(f"a step failed: {type(error).__name__}: {error}")
                return
