"""Decodes the quantized types of GGUF that `scale * q + minimum` over groups of weights represents without loss.

It works on the bytes of blocks and knows no files. https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
defines the types.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGMLQuantizationType as Kind

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
_PARTS = 8
"""Groups of 32 weights in a block of the K types."""


class BlockKind(NamedTuple):
    """How the blocks of a type are decoded, from bytes `[rows, count, block_bytes]`.

    `numbers` returns unsigned numbers, or 4-bit floats as their bits, uint8 `[rows, count, weights]`; `factors` the
    scale and the minimum of each `group` of weights, `[rows, count, groups]`.
    """

    group: int
    numbers: Callable[[Bytes], Any]
    factors: Callable[[Bytes], tuple[Floats, Floats]]


def _half(raw: Bytes, at: int) -> Floats:
    """Return the float16 at byte offset `at` of each block, as float32 `[rows, count, 1]`."""
    return np.ascontiguousarray(raw[..., at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(raw: Bytes) -> Bytes:
    """Return the low 4 bits of all bytes, then the high 4 bits."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _fifth_bits(raw: Bytes) -> Bytes:
    """Return each of 32 bits shifted to be the fifth bit of a number."""
    return np.unpackbits(raw, axis=-1, bitorder="little") << np.uint8(4)


def _k_nibbles(raw: Bytes) -> Bytes:
    """Return, for each group of 32 bytes, the low 4 bits and then the high 4 bits."""
    groups = raw.reshape(*raw.shape[:-1], _PARTS // 2, 32)
    return np.concatenate([groups & 15, groups >> 4], axis=-1).reshape(*raw.shape[:-1], -1)


def _q5_k_numbers(raw: Bytes) -> Any:
    low = _k_nibbles(raw[..., 48:])
    parts = np.arange(_PARTS, dtype=np.uint8)[:, None]
    fifth = (raw[..., None, 16:48] >> parts & np.uint8(1)) << np.uint8(4)
    return low | fifth.reshape(low.shape)


def _q6_k_numbers(raw: Bytes) -> Any:
    """Return the 6-bit numbers plus 96: their middle, 32, becomes 128."""
    low = raw[..., :128].reshape(*raw.shape[:-1], 2, 64)
    low = np.concatenate([low & 15, low >> 4], axis=-1).reshape(*raw.shape[:-1], 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = raw[..., 128:192].reshape(*raw.shape[:-1], 2, 1, 32) >> shifts & 3
    return (low + (high << 4) + 96).reshape(*raw.shape[:-1], -1)


def _k_factors(raw: Bytes) -> tuple[Floats, Floats]:
    """Decode the scales and minima: 6-bit numbers, each multiplied by a float16 of the block.

    The upper 2 bits of the last four are stored with the first four.
    """
    first, second, rest = (raw[..., at : at + 4] for at in (4, 8, 12))
    scale = np.concatenate([first & 63, rest & 15 | (first >> 6) << 4], axis=-1)
    minimum = np.concatenate([second & 63, rest >> 4 | (second >> 6) << 4], axis=-1)
    return _half(raw, 0) * scale, -_half(raw, 2) * minimum


def _q6_k_factors(raw: Bytes) -> tuple[Floats, Floats]:
    scale = _half(raw, 208) * raw[..., 192:208].view(np.int8)
    return scale, -128 * scale


def _around(middle: int) -> Callable[[Bytes], tuple[Floats, Floats]]:
    """Return the factors of a type whose number `middle` is zero."""

    def factors(raw: Bytes) -> tuple[Floats, Floats]:
        scale = _half(raw, 0)
        return scale, -middle * scale

    return factors


def _power_of_two(raw: Bytes) -> tuple[Floats, Floats]:
    """Return the scale whose biased exponent is the first byte; 255, which is NaN, gives infinity."""
    # 0 is 2**-127, whose only bit is one of the fraction
    scale = np.maximum(raw[..., :1].astype(np.uint32) << 23, 1 << 22).view(np.float32)
    return scale, np.zeros_like(scale)


def _scale_and_minimum(raw: Bytes) -> tuple[Floats, Floats]:
    return _half(raw, 0), _half(raw, 2)


BLOCK_KINDS: dict[Kind, BlockKind] = {
    Kind.Q4_0: BlockKind(32, lambda raw: _nibbles(raw[..., 2:]), _around(8)),
    Kind.Q4_1: BlockKind(32, lambda raw: _nibbles(raw[..., 4:]), _scale_and_minimum),
    # Adds 112: the middle of the numbers, 16, becomes 128
    Kind.Q5_0: BlockKind(32, lambda raw: (_nibbles(raw[..., 6:]) | _fifth_bits(raw[..., 2:6])) + 112, _around(128)),
    Kind.Q5_1: BlockKind(32, lambda raw: _nibbles(raw[..., 8:]) | _fifth_bits(raw[..., 4:8]), _scale_and_minimum),
    # Adds 128 to two's complement numbers
    Kind.Q8_0: BlockKind(32, lambda raw: raw[..., 2:] ^ 0x80, _around(128)),
    Kind.Q4_K: BlockKind(32, lambda raw: _k_nibbles(raw[..., 16:]), _k_factors),
    Kind.Q5_K: BlockKind(32, _q5_k_numbers, _k_factors),
    Kind.Q6_K: BlockKind(16, _q6_k_numbers, _q6_k_factors),
    Kind.MXFP4: BlockKind(32, lambda raw: _nibbles(raw[..., 1:]), _power_of_two),
}
