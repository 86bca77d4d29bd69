"""The choice of a backend: what each supports, and which is used, decided once before anything is compiled."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any, Literal, Protocol, cast, get_args

from pallas_kernels.paged_attention.layout import KVLayout
from pallas_kernels.paged_attention.problem import Problem
from pallas_kernels.target import CPU, KernelTarget

BackendName = Literal["reference", "cpu", "triton", "mosaic_tpu", "mosaic_gpu"]

# What `auto` tries, best first; the last one supports everything.
#
# On Hopper that is triton before mosaic_gpu, by what an H100 measured with the heads of Llama-3.1-8B:
# - Decode: both read keys and values at 0.9 to 1.0 of a copy's speed from 4,096 tokens on; at 1,024, triton at 0.71 to
#   0.90 and mosaic_gpu at 0.63 to 0.83. mosaic_gpu has one program a core and dead ones where few rows decode, and XLA
#   writes the tokens and combines the parts.
# - Prefill: 213 and 145 TFLOP/s at 2,048 tokens, 270 and 258 at 4,096, 303 and 380 at 8,192, 317 and 475 at 16,384. In
#   triton both warpgroups wait for QK and meet at barriers; in mosaic_gpu they run apart, but XLA packs its queries and
#   unpacks its output. So it wins only for long prompts.
_PREFERRED: dict[str, tuple[BackendName, ...]] = {
    "cuda": ("triton", "reference"),
    "gpu": ("triton", "reference"),
    "tpu": ("mosaic_tpu", "reference"),
}
_ON_A_CPU: tuple[BackendName, ...] = ("cpu", "reference")


@dataclasses.dataclass(frozen=True)
class Backend:
    """A backend, the device it compiles for, and the reason of the choice, for the log."""

    name: BackendName
    reason: str = dataclasses.field(default="", compare=False)
    target: KernelTarget = CPU

    @property
    def interpret(self) -> bool:
        """Whether its kernels are interpreted: a CPU can't run kernels of GPUs and TPUs."""
        return self.target.platform == "cpu" and self.name not in ("reference", "cpu")

    @property
    def kv_platform(self) -> str:
        """The platform for `kv_layout`: a TPU's kernel reads a TPU's pool, also if it is interpreted."""
        return "tpu" if self.name == "mosaic_tpu" else self.target.platform

    @property
    def takes_qkv(self) -> bool:
        """Whether it has `qkv_attention`, which takes the product of the projections as it is."""
        return self.name in ("triton", "mosaic_gpu")

    def addressable_pages(self, layout: KVLayout, shards: int) -> int:
        """Return how many of a layer's pages the kernels can address, the heads being split among `shards`."""
        module: Any = backend_module(self.name)
        return module.addressable_pages(layout, shards) if hasattr(module, "addressable_pages") else layout.num_pages


class BackendModule(Protocol):
    """The functions that every backend's module has."""

    def refusal(self, problem: Problem, target: KernelTarget) -> str | None:
        """Return why the backend doesn't support this problem on this target, or None."""

    def paged_attention(self, *args: Any, **kwargs: Any) -> Any:
        """Compute `api.paged_attention`; takes `target` and `interpret` besides."""


def backend_module(name: BackendName) -> BackendModule:
    """Return a backend's module; imported when needed, as each imports another compiler's front end."""
    file = name if name == "reference" else f"{name}.backend"
    return cast(BackendModule, importlib.import_module(f"pallas_kernels.paged_attention.{file}"))


def choose_backend(target: KernelTarget, problem: Problem | Sequence[Problem], requested: str = "auto") -> Backend:
    """Return the backend for a deployment, which supports each of its problems.

    Raises ValueError, with the reason, if the requested one doesn't fit.
    """
    problems = [problem] if isinstance(problem, Problem) else problem
    if requested == "auto":
        refused: list[str] = []
        for name in _PREFERRED.get(target.platform, _ON_A_CPU):
            refusal = _refusal(name, problems, target)
            if refusal is None:
                reason = "; ".join([f"the best for {target.kind or target.platform}", *refused])
                return Backend(name, reason, target)
            refused.append(f"not {name}: {refusal}")
        raise ValueError("no attention backend supports this: " + "; ".join(refused))
    names = get_args(BackendName)
    if requested not in names:
        raise ValueError(f"attention backend {requested!r} is not built; available: {', '.join(names)}")
    name = cast(BackendName, requested)
    if refusal := _refusal(name, problems, target):
        raise ValueError(f"attention backend {requested!r} can't be used here: {refusal}")
    return Backend(name, "requested", target)


def _refusal(name: BackendName, problems: Sequence[Problem], target: KernelTarget) -> str | None:
    """Return why a backend doesn't support all of the problems, or None."""
    refusals = (backend_module(name).refusal(problem, target) for problem in problems)
    return next((why for why in refusals if why is not None), None)


REFERENCE = Backend("reference", "the default of this function")
