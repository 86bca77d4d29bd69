"""Packs weights as the tools behind quantized checkpoints store them, by each format's public rules.

A packer takes the weight of a linear layer, float32 `[out, in]`, and returns the tensors that the tool writes in its
place, by the last part of their names, and the float32 weight that they stand for. Weights are rounded to the nearest
number; nothing is calibrated. It doesn't use jaxserve, whose readers are tested against it.

The rules were read in AutoAWQ 0.2.9 (`awq/modules/linear/gemm.py`), GPTQModel 7.7 (`nn_modules/qlinear`,
`utils/model.py`), compressed-tensors 0.20 (`compressors/`, `quantization/lifecycle/initialize.py`), AutoFP8, and in
transformers' `integrations/` for FBGEMM, 128 × 128 blocks and MXFP4.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch
from torch import Tensor

FP8_MAX = 448.0
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclasses.dataclass(frozen=True)
class Packed:
    """The stored tensors of a weight, by the last part of each name, and the weight that they stand for."""

    tensors: dict[str, Tensor]
    weight: Tensor


@dataclasses.dataclass(frozen=True)
class Grouped:
    """Integers `q` in 0 … 2^bits - 1 `[out, in]`, with `scale` and `zero` `[out, groups]`."""

    q: Tensor
    scale: Tensor
    zero: Tensor
    weight: Tensor


def round_in_groups(weight: Tensor, group_of: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Grouped:
    """Round each weight with the scale and zero of its input's group; `group_of` is int `[in]`."""
    scales, zeros = scale.float()[:, group_of], zero[:, group_of]
    q = (torch.round(weight / scales) + zeros).clamp(0, 2**bits - 1)
    return Grouped(q.long(), scale, zero.long(), (q - zeros) * scales)


def in_groups(weight: Tensor, group_of: Tensor) -> Tensor:
    """Return the weights of each group side by side, `[out, groups, in / groups]`; groups are of one size."""
    return weight[:, torch.argsort(group_of, stable=True)].unflatten(1, (int(group_of.max()) + 1, -1))


def neighbours(inputs: int, group: int) -> Tensor:
    """Return the group of each input where groups are neighbouring inputs; -1 is one group."""
    size = inputs if group == -1 else group
    assert inputs % size == 0, f"groups of {size} don't divide {inputs} inputs"
    return torch.arange(inputs) // size


def words(values: Tensor, bits: int) -> Tensor:
    """Pack unsigned integers along the last dimension into int32, the first in the lowest bits."""
    per_word = 32 // bits
    shifted = values.long().unflatten(-1, (-1, per_word)) << (bits * torch.arange(per_word))
    return as_int32(shifted.sum(-1))


def as_int32(word: Tensor) -> Tensor:
    """Return the int32 with the low 32 bits of an int64."""
    word = word & 0xFFFFFFFF
    return torch.where(word >= 2**31, word - 2**32, word).int()


def awq(weight: Tensor, group: int) -> Packed:
    """Pack as AutoAWQ's `gemm`: words hold eight neighbouring outputs of one input in the order 0 2 4 6 1 3 5 7."""
    group_of = neighbours(weight.shape[1], group)
    parts = in_groups(weight, group_of)
    low, high = parts.amin(-1), parts.amax(-1)
    scale = ((high - low).clamp(min=1e-5) / 15).half()
    g = round_in_groups(weight, group_of, scale, (-torch.round(low / scale)).clamp(0, 15), 4)

    def interleaved(values: Tensor) -> Tensor:
        return words(values.T.unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1), 4)

    return Packed(
        {"qweight": interleaved(g.q), "qzeros": interleaved(g.zero), "scales": scale.T.contiguous()}, g.weight
    )


def gptq(weight: Tensor, bits: int, group_of: Tensor, *, symmetric: bool, version: Literal[1, 2] = 1) -> Packed:
    """Pack as GPTQ: words hold neighbouring inputs of one output. Version 1 subtracts one from every field of a word of
    zeros, so that a zero of 0 borrows from the next field; GPTQModel's readers add the same number."""
    parts = in_groups(weight, group_of)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    if symmetric:
        high = torch.maximum(-low, high)
        low = -high
    scale = ((high - low) / (2**bits - 1)).half()
    zero = torch.full_like(low, 2 ** (bits - 1)) if symmetric else torch.round(-low / scale).clamp(0, 2**bits - 1)
    g = round_in_groups(weight, group_of, scale, zero, bits)
    zeros = words(g.zero.T, bits)
    if version == 1:
        zeros = as_int32(zeros.long() - sum(1 << shift for shift in range(0, 32, bits)))
    tensors = {"qweight": words(g.q, bits).T, "qzeros": zeros, "scales": scale.T, "g_idx": group_of.int()}
    return Packed({name: value.contiguous() for name, value in tensors.items()}, g.weight)


def pack_quantized(weight: Tensor, bits: int, group_of: Tensor, *, symmetric: bool, with_order: bool = False) -> Packed:
    """Pack as compressed-tensors' `pack-quantized`: words hold neighbouring inputs of one output, but those of zero
    points hold neighbouring outputs of one group. Numbers are signed, and stored with 2^(bits - 1) added."""
    half = 2 ** (bits - 1)
    parts = in_groups(weight, group_of)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    if symmetric:
        scale = (torch.maximum(-low, high) / ((2**bits - 1) / 2)).bfloat16()
        zero = torch.full_like(low, half)
    else:
        scale = ((high - low) / (2**bits - 1)).bfloat16()
        zero = torch.round(-low / scale.float()).clamp(0, 2**bits - 1)
    g = round_in_groups(weight, group_of, scale, zero, bits)
    tensors = {"weight_packed": words(g.q, bits), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
    if not symmetric:
        tensors["weight_zero_point"] = words(g.zero.T, bits).T.contiguous()
    if with_order:
        tensors["weight_g_idx"] = group_of.int()
    return Packed(tensors, g.weight)


def int8_channels(weight: Tensor) -> Packed:
    """Pack as compressed-tensors' `int-quantized`: int8 with a scale for each output."""
    scale = (weight.abs().amax(1, keepdim=True) / 127.5).bfloat16()
    q = torch.round(weight / scale.float()).clamp(-128, 127)
    return Packed({"weight": q.to(torch.int8), "weight_scale": scale}, q * scale.float())


def fp8(weight: Tensor, scales_name: str, scale: Tensor) -> Packed:
    """Pack in an fp8 format: float8_e4m3fn, and a scale for the tensor, for each output `[out, 1]`, or for each block
    of 128 × 128 `[ceil(out / 128), ceil(in / 128)]`."""
    spread = spread_blocks(scale.float(), weight.shape) if scale.ndim == 2 else scale.float()
    q = (weight / spread).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return Packed({"weight": q, scales_name: scale}, q.float() * spread)


def fp8_scale(weight: Tensor, over: Literal["tensor", "channel", "block"]) -> Tensor:
    """Return scales in float32 with which the largest weight of each part is the largest number: `[]`, `[out, 1]`, or
    `[ceil(out / 128), ceil(in / 128)]`."""
    size = weight.abs()
    if over == "tensor":
        return size.max() / FP8_MAX
    if over == "channel":
        return size.amax(1, keepdim=True) / FP8_MAX
    rows, columns = (math.ceil(n / 128) for n in weight.shape)
    padded = torch.zeros(rows * 128, columns * 128)
    padded[: weight.shape[0], : weight.shape[1]] = size
    return padded.reshape(rows, 128, columns, 128).amax((1, 3)) / FP8_MAX


def spread_blocks(scale: Tensor, shape: torch.Size) -> Tensor:
    """Return the scale of each weight of `shape` from those of its outputs `[out, 1]` or of 128 × 128 blocks."""
    if scale.shape == (shape[0], 1):
        return scale
    return scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return gpt-oss' `blocks` uint8 `[..., in / 32, 16]`, `scales` uint8 `[..., in / 32]`, and the weight.

    Byte j of a block has input 2j in its low four bits and input 2j + 1 in its high ones, each an index of
    `MXFP4_VALUES`; the scale is 2^(stored - 127).
    """
    parts = weight.unflatten(-1, (-1, 32))
    exponent = torch.floor(torch.log2(parts.abs().amax(-1).clamp(min=2.0**-120))) - 2
    values = torch.tensor(MXFP4_VALUES)
    q = (parts / 2.0 ** exponent[..., None]).unsqueeze(-1).sub(values).abs().argmin(-1)
    blocks = (q[..., 0::2] | q[..., 1::2] << 4).to(torch.uint8)
    stands_for = (values[q] * 2.0 ** exponent[..., None]).flatten(-2)
    return blocks, (exponent + 127).to(torch.uint8), stands_for
