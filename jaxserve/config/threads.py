"""The number of threads that XLA uses on a CPU: from the environment, by default one for each core it may use.

XLA also splits a program's loops into that many parts when it compiles, so a program is made for one number of threads.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxserve import host

XLA_THREADS = "NPROC"
"""The environment variable that XLA reads when a process creates its first device."""


def xla_threads(environment: Mapping[str, str]) -> int:
    """Return XLA's number of threads in a process with this environment."""
    return int(environment.get(XLA_THREADS) or host.num_cores())


def divide_threads(environment: Mapping[str, str], num_processes: int) -> dict[str, str]:
    """Return the environment that gives each of `num_processes` processes an equal part of the threads.

    Processes are not pinned to cores: a machine may have other work, and the kernel finds free cores.
    """
    return {XLA_THREADS: str(max(xla_threads(environment) // num_processes, 1))}
