"""What kernels of ours take of a GPU that isn't here."""

from __future__ import annotations

import re
from typing import Any

from jaxserve.runtime.devices.target import load_target
from jaxserve.runtime.programs.inspection import KernelReport, instructions, own_kernels_of


def fitting_kernels(compiled: Any, target: str) -> tuple[KernelReport, ...]:
    """The kernels of a program, none of which spills or takes more shared memory than a block can have there."""
    found, unread = own_kernels_of(compiled, instructions(compiled.as_text()))
    assert unread is None
    [limit] = re.findall(r"shared_memory_per_block_optin: (\d+)", load_target(target).target_config or "")
    for one in found:
        assert one.registers
        assert one.stack_bytes == 0, f"{one.kernel} spills"
        assert one.shared_bytes is not None
        assert one.shared_bytes <= int(limit), one.kernel
    return found
