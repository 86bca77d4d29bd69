"""How many threads XLA computes with on a CPU: it takes that from the environment, else one for each core it may use.

It also cuts a program's loops into as many parts when it compiles, so that a program is made for a number of threads.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxserve import host

XLA_THREADS = "NPROC"
"""The variable that XLA reads when a process makes its first device."""


def xla_threads(environment: Mapping[str, str]) -> int:
    """Threads of XLA in a process that has this environment."""
    return int(environment.get(XLA_THREADS) or host.num_cores())


def threads_of_each(environment: Mapping[str, str], num_processes: int) -> dict[str, str]:
    """What gives each of so many processes its part of them.

    Threads, not cores: a machine may have other work, and the kernel sees where there is room.
    """
    return {XLA_THREADS: str(max(xla_threads(environment) // num_processes, 1))}
