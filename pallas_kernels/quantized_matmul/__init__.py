"""Matrix products with quantized weights: the contract, and its backends."""

from pallas_kernels.dispatch import Backend
from pallas_kernels.quantized_matmul.api import HeldWeight, quantized_matmul
from pallas_kernels.quantized_matmul.backends import BACKENDS, arrangement, make_weight
from pallas_kernels.quantized_matmul.cpu.layout import (
    BLOCK,
    FACTORS,
    STRIP,
    PackedWeight,
    gather_rows,
    pack_dense,
    pack_numbers,
    packed_shape,
    run_bytes,
    unpack,
)
from pallas_kernels.quantized_matmul.layout import (
    FP4_VALUES,
    QuantizedWeight,
    dequantize,
    num_groups,
    numbers_shape,
)
from pallas_kernels.quantized_matmul.scheme import NumberType, Scheme

__all__ = [
    "BACKENDS",
    "BLOCK",
    "FACTORS",
    "FP4_VALUES",
    "STRIP",
    "Backend",
    "HeldWeight",
    "NumberType",
    "PackedWeight",
    "QuantizedWeight",
    "Scheme",
    "arrangement",
    "dequantize",
    "gather_rows",
    "make_weight",
    "num_groups",
    "numbers_shape",
    "pack_dense",
    "pack_numbers",
    "packed_shape",
    "quantized_matmul",
    "run_bytes",
    "unpack",
]
