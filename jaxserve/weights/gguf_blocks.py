"""Decodes those of GGUF's quantized types that `scale * q + minimum` over 32 weights represents without loss.

Works on the bytes of blocks; knows no files. The types: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType as Kind

from pallas_kernels.quantized_matmul import BLOCK

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
BlockArray = np.ndarray[Any, Any]


def decode_blocks(raw: Bytes, kind: Kind, out: BlockArray) -> None:
    """Decode stored blocks, `[rows, count, block_bytes]`, into `out`, `[rows, count * k]` of `BLOCK_DTYPE`.

    A stored block holds `k` times 32 weights. `kind` must be one of `BLOCK_KINDS`.
    """
    _DECODERS[kind](raw, out)


def _q4_0(raw: Bytes, out: BlockArray) -> None:
    out["scale"] = _half(raw, 0)
    out["minimum"] = -8 * out["scale"]
    _nibbles(raw[..., 2:], out["q"])


def _q4_1(raw: Bytes, out: BlockArray) -> None:
    out["scale"], out["minimum"] = _half(raw, 0), _half(raw, 2)
    _nibbles(raw[..., 4:], out["q"])


def _q5_0(raw: Bytes, out: BlockArray) -> None:
    out["scale"] = _half(raw, 0)
    out["minimum"] = -16 * out["scale"]
    _nibbles(raw[..., 6:], out["q"])
    out["q"] |= _fifth_bits(raw[..., 2:6])


def _q5_1(raw: Bytes, out: BlockArray) -> None:
    out["scale"], out["minimum"] = _half(raw, 0), _half(raw, 2)
    _nibbles(raw[..., 8:], out["q"])
    out["q"] |= _fifth_bits(raw[..., 4:8])


def _q8_0(raw: Bytes, out: BlockArray) -> None:
    out["scale"] = _half(raw, 0)
    out["minimum"] = -128 * out["scale"]
    np.bitwise_xor(raw[..., 2:], 0x80, out=out["q"])  # adds 128 to a two's complement number


def _q4_k(raw: Bytes, out: BlockArray) -> None:
    _k_factors(raw, out)
    _k_nibbles(raw[..., 16:], out["q"])


def _q5_k(raw: Bytes, out: BlockArray) -> None:
    _k_factors(raw, out)
    _k_nibbles(raw[..., 48:], out["q"])
    parts = np.arange(_PARTS, dtype=np.uint8)[:, None]
    fifth = (raw[..., None, 16:48] >> parts & 1) << 4
    out["q"] |= fifth.reshape(out["q"].shape)


_DECODERS: dict[Kind, Callable[[Bytes, BlockArray], None]] = {
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q5_0: _q5_0,
    Kind.Q5_1: _q5_1,
    Kind.Q8_0: _q8_0,
    Kind.Q4_K: _q4_k,
    Kind.Q5_K: _q5_k,
}
BLOCK_KINDS = frozenset(_DECODERS)
_PARTS = 8
"""Groups of 32 weights in a block of the K types."""


def _half(raw: Bytes, at: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the float16 at byte offset `at` of each block, as float32."""
    number = np.ascontiguousarray(raw[..., at : at + 2]).view("<f2")[..., 0]
    return number.astype(np.float32)


def _nibbles(raw: Bytes, q: Bytes) -> None:
    """Write the low 4 bits of 16 bytes to `q`, then the high 4 bits."""
    np.bitwise_and(raw, 15, out=q[..., : BLOCK // 2])
    np.right_shift(raw, 4, out=q[..., BLOCK // 2 :])


def _fifth_bits(raw: Bytes) -> Bytes:
    """Return each of 32 bits shifted to be the fifth bit of a number."""
    return np.unpackbits(raw, axis=-1, bitorder="little") << np.uint8(4)


def _k_nibbles(raw: Bytes, q: Bytes) -> None:
    """Write to `q`, for each group of 32 bytes, the low 4 bits and then the high 4 bits."""
    groups = raw.reshape(*raw.shape[:-1], _PARTS // 2, BLOCK)
    both = np.stack([groups & 15, groups >> 4], axis=-2)
    q[...] = both.reshape(q.shape)


def _k_factors(raw: Bytes, out: BlockArray) -> None:
    """Decode the scales and minima: 6-bit numbers, each multiplied by a float16 of the block.

    The upper 2 bits of the last four are stored with the first four.
    """
    first, second, rest = (raw[..., at : at + 4] for at in (4, 8, 12))
    scale = np.concatenate([first & 63, rest & 15 | (first >> 6) << 4], axis=-1)
    minimum = np.concatenate([second & 63, rest >> 4 | (second >> 6) << 4], axis=-1)
    out["scale"] = (_half(raw, 0)[..., None] * scale).reshape(out.shape)
    out["minimum"] = -(_half(raw, 2)[..., None] * minimum).reshape(out.shape)
