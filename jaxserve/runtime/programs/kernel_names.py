"""Names the kernel, ours or a library's, that an instruction of a compiled program runs."""

from __future__ import annotations

import re

from jaxserve.runtime.programs.hlo import Instruction

# Prefixes of the custom call targets of our kernels, and the language each is written in.
_KERNELS = {"__gpu$xla.gpu.triton": "triton", "mosaic_gpu": "mosaic gpu", "tpu_custom_call": "mosaic tpu"}
# jax's names of the operation that calls a kernel.
_CALLS = ("pallas_call", "mpmd_map")
# Targets of our CPU kernels hold the name of the kernel, and some a hash of what it was compiled from.
_LLVM = re.compile(r"llvm_(?P<name>\w+?)(_[0-9a-f]{16})?")
_LIBRARIES = re.compile(r"__(cublas|cudnn)[\w$.]*")


def kernel_language(one: Instruction) -> str | None:
    """Return the language of a kernel of ours for a GPU or a TPU, or None for any other instruction."""
    return next((name for prefix, name in _KERNELS.items() if one.target.startswith(prefix)), None)


def kernel_name(one: Instruction) -> str | None:
    """Return the name of the kernel, ours or a library's, that an instruction runs."""
    if language := kernel_language(one):
        # The kernel's name is the part before the call.
        parts = one.op_name.split("/")
        return f"{parts[-2]} ({language})" if len(parts) > 1 and parts[-1].startswith(_CALLS) else language
    if own_code := _LLVM.fullmatch(one.target):
        return f"{own_code['name']} (llvm)"
    return one.target.strip("_").replace("$", " ") if _LIBRARIES.fullmatch(one.target) else None
