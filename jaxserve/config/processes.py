"""Checks the settings of a mesh over several processes: its address, and sizes that divide evenly."""

from __future__ import annotations

from jaxserve.errors import ConfigError

ALL_DEVICES = -1
"""The `ep_size` that divides experts among all devices."""


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT` or `[IPv6]:PORT`. Raise `ConfigError`."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed):
        raise ConfigError(f"dist_init_addr must be HOST:PORT, such as 10.0.0.1:5000 or [fd00::1]:5000; got {text!r}")
    if not (port.isascii() and port.isdigit()) or not 1 <= int(port) <= 65535:
        raise ConfigError(f"dist_init_addr must end in a port between 1 and 65535, got {port!r} in {text!r}")
    return host[1:-1] if bracketed else host, int(port)


def ranks_and_shards(*, tensor: int, data: int, parts: int | None, dp_attention: bool) -> tuple[int, int]:
    """Return the data-parallel ranks and the shards of each, from `tp_size`, `dp_size` and `ep_size`.

    With `enable_dp_attention`, `tp_size` counts the devices of all ranks, as SGLang's does; if neither it nor `dp_size`
    is set, each of the `parts` of the experts is a rank. Raises `ConfigError` if there are no ranks then, or if they
    don't divide the devices.
    """
    if not dp_attention:
        return data, tensor
    if (tensor, data) == (1, 1):
        data = max(parts or 1, 1)
    elif tensor > 1 and data > 1 and tensor % data == 0:
        tensor //= data
    elif tensor > 1:
        fits = " or ".join(str(size) for size in range(2, tensor + 1) if tensor % size == 0)
        raise ConfigError(
            f"with enable_dp_attention, tp_size={tensor} counts the devices of all ranks, and dp_size={data} can't "
            f"divide them into ranks; set dp_size to {fits}"
        )
    if data == 1:
        raise ConfigError("enable_dp_attention divides attention by data-parallel rank: set dp_size to their number")
    return data, tensor


def check_processes(
    *, nnodes: int, node_rank: int, address: str | None, tensor: int, data: int, stages: int, mode: str
) -> None:
    """Raise `ConfigError` if the settings contradict each other, or if the sizes can't be divided evenly."""
    if not 0 <= node_rank < nnodes:
        allowed = "it must be 0" if nnodes == 1 else f"it must be in [0, {nnodes - 1}]"
        raise ConfigError(f"node_rank={node_rank} with nnodes={nnodes}: {allowed}")
    if address is not None:
        parse_address(address)
    if nnodes == 1:
        if address is not None:
            raise ConfigError("dist_init_addr is for several processes: set nnodes to their number, or leave it out")
        return
    if address is None:
        raise ConfigError(
            f"nnodes={nnodes} needs dist_init_addr: HOST:PORT with a free port of node rank 0, the same on every node"
        )
    if mode == "replicas" and data > 1:
        raise ConfigError(f"dp_mode=replicas runs on one machine only, but nnodes={nnodes}: leave one of them out")
    if not _spreads(tensor, data, stages, nnodes):
        widths = ((nnodes * tensor, data), (tensor, nnodes * data), (nnodes, 1), (1, nnodes))
        nearest = [*((t, d, stages) for t, d in widths), (tensor, data, nnodes)]
        fits = dict.fromkeys(_sizes(*sizes) for sizes in nearest if _spreads(*sizes, nnodes))
        raise ConfigError(
            f"{_sizes(tensor, data, stages)} can't be divided over nnodes={nnodes}: each process must have whole "
            f"stages, or whole ranks of one stage, or an equal part of one rank; possible: {' or '.join(fits)}"
        )


def _sizes(tensor: int, data: int, stages: int) -> str:
    return f"tp_size={tensor} dp_size={data}" + (f" pp_size={stages}" if stages > 1 else "")


def _spreads(tensor: int, data: int, stages: int, nnodes: int) -> bool:
    if nnodes % stages:
        return stages % nnodes == 0
    each, left = divmod(tensor * data, nnodes // stages)
    return not left and (each % tensor == 0 or tensor % each == 0)
