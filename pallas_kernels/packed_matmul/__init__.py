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
    rows_of,
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
    "rows_of",
    "unpack",
]
