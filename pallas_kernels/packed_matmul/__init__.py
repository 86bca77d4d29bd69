"""Products with packed weights."""

from pallas_kernels.packed_matmul.api import packed_matmul
from pallas_kernels.packed_matmul.layout import (
    BLOCK,
    BLOCK_DTYPE,
    STRIP,
    Bits,
    PackedWeight,
    pack_blocks,
    pack_dense,
    packed_shape,
    unpack,
)

__all__ = [
    "BLOCK",
    "BLOCK_DTYPE",
    "STRIP",
    "Bits",
    "PackedWeight",
    "pack_blocks",
    "pack_dense",
    "packed_matmul",
    "packed_shape",
    "unpack",
]
