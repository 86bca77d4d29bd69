"""The engine process of a follower: no scheduler, no requests; it does what process 0 broadcasts, until told to end."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable

from jaxserve.engine.multihost.process_group import Nodes
from jaxserve.engine.process.launch_protocol import ASKED_TO_END

Obey = Callable[[bytes], None]


def follow(nodes: Nodes, obey: Obey, lifeline: int) -> None:
    """Hand on every command; never returns. `lifeline` ends when this node was told to end: so do all others then.

    Raises what `obey` does, and `EngineDeadError` when process 0 is gone.
    """
    threading.Thread(target=_leave_at_end, args=(nodes, lifeline), name="jaxserve-lifeline", daemon=True).start()
    gc.collect()
    gc.freeze()
    while True:
        obey(nodes.next_command())


def _leave_at_end(nodes: Nodes, lifeline: int) -> None:
    words = b""
    while part := os.read(lifeline, 4096):
        words += part
    asked = words == ASKED_TO_END
    why = "it was told to end" if asked else "its parent process, `jaxserve serve`, is gone"
    nodes.leave(f"{why}, and a mesh can't go on without one of its processes", failed=not asked)
    os._exit(0)
