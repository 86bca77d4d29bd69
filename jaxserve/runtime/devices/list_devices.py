"""Says what jax finds to run on: `python -m jaxserve.runtime.devices.list_devices DEVICE` prints `Devices` as JSON.

A server that starts replicas shares the devices out among them. It learns which there are from a process that has ended
before they start: jax never lets go of a device it has taken.
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


def main(device: str) -> None:
    """Print it for a `--device`."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # nothing will run
    logging.getLogger("jaxserve").setLevel(logging.ERROR)  # the engines will say the same of their devices
    try:
        devices = attach(msgspec.convert({"device": device}, EngineConfig))
    except ConfigError as error:
        found = Devices(problem=str(error))
    else:
        chips = {str(getattr(device, "coords", device)) for device in devices}
        found = Devices(platform=devices[0].platform, num_devices=len(devices), num_chips=len(chips))
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main(sys.argv[1])
