"""Which backend runs where: what each can do, and the choice among them, made once before anything is compiled."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any, Literal, Protocol, cast, get_args

from pallas_kernels.paged_attention.layout import KVLayout
from pallas_kernels.paged_attention.problem import CPU, Problem, Target

BackendName = Literal["reference", "cpu", "triton", "mosaic_tpu", "mosaic_gpu"]

# What `auto` tries, best first; the last one does everything everywhere.
_PREFERRED: dict[str, tuple[BackendName, ...]] = {
    "cuda": ("triton", "reference"),
    "gpu": ("triton", "reference"),
    "tpu": ("mosaic_tpu", "reference"),
}
_ON_A_CPU: tuple[BackendName, ...] = ("cpu", "reference")


@dataclasses.dataclass(frozen=True)
class Backend:
    """A backend, the device it compiles for, and why it was chosen; the reason is for the log."""

    name: BackendName
    reason: str = dataclasses.field(default="", compare=False)
    target: Target = CPU

    @property
    def interpret(self) -> bool:
        """Whether its kernels are interpreted: on a CPU, GPUs' and TPUs' can't be compiled."""
        return self.target.platform == "cpu" and self.name not in ("reference", "cpu")

    @property
    def kv_platform(self) -> str:
        """For `kv_layout`: a TPU's kernel reads a TPU's pool, also where it is interpreted."""
        return "tpu" if self.name == "mosaic_tpu" else self.target.platform

    def addressable_pages(self, layout: KVLayout, shards: int) -> int:
        """Of the layout's pages of a layer, as many as its kernels can reach on one of `shards` of its heads."""
        if self.name != "triton":
            return layout.num_pages
        # Imported when needed, as in `backend_module`.
        from pallas_kernels.paged_attention.triton.backend import addressable

        page = layout.num_layers * layout.num_kv_heads // shards * layout.page_size * layout.lanes
        return addressable(layout.num_pages * page, layout.dtype) // page


class BackendModule(Protocol):
    """What a backend's file has."""

    def refusal(self, problem: Problem, target: Target) -> str | None:
        """Why the backend can't do this here, or None."""

    def paged_attention(self, *args: Any, **kwargs: Any) -> Any:
        """`api.paged_attention`, plus `target` and `interpret`."""


def backend_module(name: BackendName) -> BackendModule:
    """The file of a backend; imported when asked for, as each brings another compiler's front end."""
    file = name if name == "reference" else f"{name}.backend"
    return cast(BackendModule, importlib.import_module(f"pallas_kernels.paged_attention.{file}"))


def choose_backend(target: Target, problem: Problem, requested: str = "auto") -> Backend:
    """The backend for a deployment. Raises ValueError where the one asked for can't do it, with the reason."""
    if requested == "auto":
        refused: list[str] = []
        for name in _PREFERRED.get(target.platform, _ON_A_CPU):
            refusal = backend_module(name).refusal(problem, target)
            if refusal is None:
                reason = "; ".join([f"the best for {target.kind or target.platform}", *refused])
                return Backend(name, reason, target)
            refused.append(f"not {name}: {refusal}")
        raise ValueError("no attention backend can do this: " + "; ".join(refused))
    names = get_args(BackendName)
    if requested not in names:
        raise ValueError(f"attention backend {requested!r} is not built; available: {', '.join(names)}")
    name = cast(BackendName, requested)
    if refusal := backend_module(name).refusal(problem, target):
        raise ValueError(f"attention backend {requested!r} can't be used here: {refusal}")
    return Backend(name, "asked for", target)


REFERENCE = Backend("reference", "the default of this function")
