"""The engine process of a follower: without scheduler or requests, it executes the commands of process 0."""

from __future__ import annotations

import gc
import itertools
import os
import threading
from collections.abc import Callable

from jaxserve.engine.multihost.process_group import ProcessGroup
from jaxserve.engine.process.launch_protocol import STOP_MESSAGE
from jaxserve.engine.process.watchdog import SoftWatchdog

Execute = Callable[[bytes], None]


def execute_commands(group: ProcessGroup, execute: Execute, parent_pipe: int, watchdog: SoftWatchdog) -> None:
    """Execute every command; never returns. When `parent_pipe` ends, this process leaves, which ends the whole group.
    `watchdog` takes each command for a step.

    Raises what `execute` does, and `EngineDeadError` when process 0 is lost.
    """
    threading.Thread(target=_leave_with_parent, args=(group, parent_pipe), name="jaxserve-parent", daemon=True).start()
    gc.collect()
    gc.freeze()
    for num_commands in itertools.count():
        command = group.next_command()
        watchdog.note(num_commands, has_work=True)
        execute(command)
        watchdog.note(num_commands, has_work=False)


def _leave_with_parent(group: ProcessGroup, parent_pipe: int) -> None:
    message = b""
    while part := os.read(parent_pipe, 4096):
        message += part
    stopped = message == STOP_MESSAGE
    reason = "it was asked to stop" if stopped else "its parent process, `jaxserve serve`, is gone"
    group.leave(f"{reason}, and a mesh can't continue without one of its processes", failed=not stopped)
    os._exit(0)
