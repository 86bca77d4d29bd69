"""The arithmetic of GGUF's quantized types, as far as `scale * q + minimum` over 32 weights says it without loss.

Knows bytes of blocks alone, no files. The types: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType as Kind

from pallas_kernels.packed_matmul import BLOCK

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Blocks = np.ndarray[Any, Any]


def as_blocks(raw: Bytes, kind: Kind, out: Blocks) -> None:
    """Writes stored blocks, `[rows, count, bytes of one]`, into `out`, `BLOCK_DTYPE` `[rows, count * k]`: each holds
    `k` times 32 weights. `kind` must be one of `BLOCK_KINDS`."""
    _READERS[kind](raw, out)


def _q4_0(raw: Bytes, out: Blocks) -> None:
    out["scale"] = _half(raw, 0)
    out["minimum"] = -8 * out["scale"]
    _nibbles(raw[..., 2:], out["q"])


def _q4_1(raw: Bytes, out: Blocks) -> None:
    out["scale"], out["minimum"] = _half(raw, 0), _half(raw, 2)
    _nibbles(raw[..., 4:], out["q"])


def _q5_0(raw: Bytes, out: Blocks) -> None:
    out["scale"] = _half(raw, 0)
    out["minimum"] = -16 * out["scale"]
    _nibbles(raw[..., 6:], out["q"])
    out["q"] |= _fifth_bits(raw[..., 2:6])


def _q5_1(raw: Bytes, out: Blocks) -> None:
    out["scale"], out["minimum"] = _half(raw, 0), _half(raw, 2)
    _nibbles(raw[..., 8:], out["q"])
    out["q"] |= _fifth_bits(raw[..., 4:8])


def _q8_0(raw: Bytes, out: Blocks) -> None:
    out["scale"] = _half(raw, 0)
    out["minimum"] = -128 * out["scale"]
    np.bitwise_xor(raw[..., 2:], 0x80, out=out["q"])  # of a two's complement: 128 more


def _q4_k(raw: Bytes, out: Blocks) -> None:
    _k_factors(raw, out)
    _k_nibbles(raw[..., 16:], out["q"])


def _q5_k(raw: Bytes, out: Blocks) -> None:
    _k_factors(raw, out)
    _k_nibbles(raw[..., 48:], out["q"])
    parts = np.arange(_PARTS, dtype=np.uint8)[:, None]
    fifth = (raw[..., None, 16:48] >> parts & 1) << 4
    out["q"] |= fifth.reshape(out["q"].shape)


_READERS: dict[Kind, Callable[[Bytes, Blocks], None]] = {
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q5_0: _q5_0,
    Kind.Q5_1: _q5_1,
    Kind.Q8_0: _q8_0,
    Kind.Q4_K: _q4_k,
    Kind.Q5_K: _q5_k,
}
BLOCK_KINDS = frozenset(_READERS)
_PARTS = 8
"""Times 32 weights in a block of the K types."""


def _half(raw: Bytes, at: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The float16 at a byte of each block."""
    number = np.ascontiguousarray(raw[..., at : at + 2]).view("<f2")[..., 0]
    return number.astype(np.float32)


def _nibbles(raw: Bytes, q: Bytes) -> None:
    """The low halves of 16 bytes, then the high ones."""
    np.bitwise_and(raw, 15, out=q[..., : BLOCK // 2])
    np.right_shift(raw, 4, out=q[..., BLOCK // 2 :])


def _fifth_bits(raw: Bytes) -> Bytes:
    """32 bits, each as the fifth of a number."""
    return np.unpackbits(raw, axis=-1, bitorder="little") << np.uint8(4)


def _k_nibbles(raw: Bytes, q: Bytes) -> None:
    """Of each 32 bytes the low halves, then the high ones."""
    groups = raw.reshape(*raw.shape[:-1], _PARTS // 2, BLOCK)
    both = np.stack([groups & 15, groups >> 4], axis=-2)
    q[...] = both.reshape(q.shape)


def _k_factors(raw: Bytes, out: Blocks) -> None:
    """Scales and minima of 6 bits, times a float16 each; of the last four parts the upper 2 bits lie with the first."""
    first, second, rest = (raw[..., at : at + 4] for at in (4, 8, 12))
    scale = np.concatenate([first & 63, rest & 15 | (first >> 6) << 4], axis=-1)
    minimum = np.concatenate([second & 63, rest >> 4 | (second >> 6) << 4], axis=-1)
    out["scale"] = (_half(raw, 0)[..., None] * scale).reshape(out.shape)
    out["minimum"] = -(_half(raw, 2)[..., None] * minimum).reshape(out.shape)
