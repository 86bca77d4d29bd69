"""Matrix products with quantized weights: the contract, and its backends."""

from pallas_kernels.quantized_matmul.api import packed_matmul, quantized_matmul
from pallas_kernels.quantized_matmul.backends import Backend, choose_backend
from pallas_kernels.quantized_matmul.cpu.layout import (
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
from pallas_kernels.quantized_matmul.layout import QuantizedWeight, dequantize, num_groups, numbers_shape
from pallas_kernels.quantized_matmul.scheme import Scheme

__all__ = [
    "BLOCK",
    "BLOCK_DTYPE",
    "STRIP",
    "Backend",
    "Bits",
    "PackedWeight",
    "QuantizedWeight",
    "Scheme",
    "choose_backend",
    "dequantize",
    "gather_rows",
    "num_groups",
    "numbers_shape",
    "pack_blocks",
    "pack_dense",
    "packed_matmul",
    "packed_shape",
    "quantized_matmul",
    "unpack",
]
