"""Prints the devices that jax finds, as JSON of `Devices`: `python -m jaxserve.runtime.devices.list_devices SETTINGS`.

A server that starts replicas divides the devices among them. It lists them in a process that ends before the replicas
start, as jax never releases a device it has taken.
"""

from __future__ import annotations

import logging
import os
import sys

import msgspec

from jaxserve.api_types import Devices
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.runtime.devices.attach import attach


def main(settings: str) -> None:
    """Print the devices of a configuration, of which `settings` is JSON."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # this process runs no program
    logging.getLogger("jaxserve").setLevel(logging.ERROR)  # the engines log the same warnings
    try:
        devices = attach(msgspec.json.decode(settings, type=EngineConfig))
    except ConfigError as error:
        found = Devices(problem=str(error))
    else:
        chips = {str(getattr(device, "coords", device)) for device in devices}
        found = Devices(platform=devices[0].platform, num_devices=len(devices), num_chips=len(chips))
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main(sys.argv[1])
