"""Matrix products with packed weights on a CPU."""

from pallas_kernels.packed_matmul.api import packed_matmul
from pallas_kernels.packed_matmul.layout import (
    BLOCK,
    BLOCK_DTYPE,
    STRIP,
    Bits,
    PackedWeight,
    gather_rows,
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
    "gather_rows",
    "pack_blocks",
    "pack_dense",
    "packed_matmul",
    "packed_shape",
    "unpack",
]
