"""Tensors that hold a projection of all experts of a layer, as one tensor for each expert: Qwen3.5 is stored so, and
its quantized checkpoints otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.params import Window

_EXPERTS = ".mlp.experts."
_UP, _DOWN = "gate_up_proj", "down_proj"

OpenTensor = Callable[[], Any]
"""Returns a tensor of a safetensors file, of which windows can be read."""


@dataclasses.dataclass(frozen=True)
class ExpertSlice:
    """`rows` rows of one expert's matrix in a tensor `[experts, out, in]`, from row `first` on."""

    stacked: OpenTensor
    expert: int
    first: int
    rows: int

    def get_shape(self) -> list[int]:
        """Return the shape of the matrix."""
        return [self.rows, self.stacked().get_shape()[2]]

    def get_dtype(self) -> str:
        """Return the name of the stored type."""
        kind: str = self.stacked().get_dtype()
        return kind

    def __getitem__(self, window: Window) -> Any:
        rows, columns = window
        return self.stacked()[self.expert, slice(self.first + rows.start, self.first + rows.stop), columns]


def split_experts(tensors: Mapping[str, OpenTensor]) -> dict[str, OpenTensor]:
    """Return the tensors with those of all experts replaced by one for each expert and projection.

    Tensors that have inputs before outputs (gpt-oss) stay as they are.
    """
    found: dict[str, OpenTensor] = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(_EXPERTS)
        up, down = (tensors.get(f"{layer}{_EXPERTS}{each}") for each in (_UP, _DOWN))
        if kind not in (_UP, _DOWN) or up is None or down is None or not _has_inputs_last(up, down):
            found[name] = tensor
            continue
        count, rows, _ = tensor().get_shape()
        projections = ("gate_proj", "up_proj") if kind == _UP else (kind,)
        each = rows // len(projections)
        for expert in range(count):
            for i, projection in enumerate(projections):
                matrix = functools.partial(ExpertSlice, tensor, expert, i * each, each)
                found[f"{layer}{_EXPERTS}{expert}.{projection}.weight"] = matrix
    return found


def _has_inputs_last(up: OpenTensor, down: OpenTensor) -> bool:
    of_up, of_down = up().get_shape(), down().get_shape()
    return len(of_down) == 3 and of_up == [of_down[0], 2 * of_down[2], of_down[1]]
