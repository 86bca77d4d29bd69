"""The schemes of quantized weights: how a weight is stored, and how the inputs of its product are quantized."""

from __future__ import annotations

import dataclasses
from typing import Literal

NumberType = Literal["int4", "int8", "fp4", "fp8"]
Activations = Literal["token", "static", "group"]

BITS: dict[NumberType, int] = {"int4": 4, "int8": 8, "fp4": 4, "fp8": 8}


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How a weight `[*out, in]` is stored: each weight is `scale * (q - zero)`, and `numbers` is the type of `q`.

    `group` neighbouring inputs of an output share a scale and a zero; None if all its inputs do. Without `zeros`, every
    zero is 0. `int4` and `int8` are signed; `fp8` is float8_e4m3fn, `fp4` is float4_e2m1fn (MXFP4).

    `activations` tells how inputs are quantized to the same type before the product: `token` with a scale for each
    row, `static` with one that the checkpoint has, `group` with one for each row and `group` of inputs. If None, inputs
    are multiplied as they are.
    """

    numbers: NumberType
    group: int | None = None
    zeros: bool = False
    activations: Activations | None = None

    def __post_init__(self) -> None:
        assert not (self.zeros and self.numbers in ("fp4", "fp8")), self

    @property
    def bits(self) -> int:
        """The bits of one number."""
        return BITS[self.numbers]

    def __str__(self) -> str:
        groups = f"groups of {self.group}" if self.group else "a scale for each output"
        inputs = {None: "", "token": ", inputs by token", "static": ", static inputs", "group": ", inputs by group"}
        return f"{self.numbers}, {groups}{', zeros' * self.zeros}{inputs[self.activations]}"
