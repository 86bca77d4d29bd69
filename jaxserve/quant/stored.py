"""How checkpoints store weights: the scheme of each type, and the scheme that fits all tensors of a parameter."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import ml_dtypes
import numpy as np

from pallas_kernels.quantized_matmul import Scheme

Packing = Literal["dense", "gguf", "awq", "gptq", "gptq_v2", "packed", "plain", "mxfp4", "converted"]
MXFP4_GROUP = 32

_F16, _BF16, _F32 = map(np.dtype, (np.float16, ml_dtypes.bfloat16, np.float32))


@dataclasses.dataclass(frozen=True)
class StoredWeight:
    """How a checkpoint stores one tensor.

    `type` is its name in messages. `scheme` is how a product can use it as it is stored, None if it isn't quantized or
    can only be dequantized. `packing` says which tensors of the file it is made of (`weights/quantized`), or that
    `jaxserve convert` has written it. `factors` is a type that holds its scales without loss. Tensors with equal
    `order` have their inputs in the same order; it is empty if that is the order of the model.
    """

    type: str
    scheme: Scheme | None = None
    packing: Packing = "dense"
    factors: np.dtype = _F32
    order: str = ""

    @property
    def zeros(self) -> np.dtype:
        """A type that holds its zeros without loss: int16, as zeros are whole numbers, except in GGUF files."""
        return self.factors if self.packing == "gguf" else np.dtype(np.int16)

    @property
    def quantized(self) -> bool:
        """Whether the tensor has less than 16 bits a weight."""
        return self.packing != "dense"


Stored = Mapping[str, StoredWeight]
"""How the tensors of a checkpoint are stored, by Hugging Face's names; empty if none can be quantized."""


def _gguf(type: str, scheme: Scheme, factors: np.dtype = _F32) -> StoredWeight:
    return StoredWeight(type, scheme, "gguf", factors)


# Types of 5 and 6 bits are held in 8. The factors of K types are products, which need float32.
GGUF_TYPES: Mapping[str, StoredWeight] = {
    stored.type: stored
    for stored in (
        _gguf("Q4_0", Scheme("int4", 32), _F16),
        _gguf("Q4_1", Scheme("int4", 32, zeros=True)),
        _gguf("Q5_0", Scheme("int8", 32), _F16),
        _gguf("Q5_1", Scheme("int8", 32, zeros=True)),
        _gguf("Q8_0", Scheme("int8", 32), _F16),
        _gguf("Q4_K", Scheme("int4", 32, zeros=True)),
        _gguf("Q5_K", Scheme("int8", 32, zeros=True)),
        _gguf("Q6_K", Scheme("int8", 16)),
        _gguf("MXFP4", Scheme("fp4", MXFP4_GROUP), _BF16),
    )
}
"""The quantized types of GGUF that `scale * (q - zero)` represents."""


def join(tensors: Sequence[StoredWeight]) -> StoredWeight | str:
    """Return how one product can use all tensors of a parameter, or why it can't.

    4-bit numbers are held in 8 bits beside 8-bit ones, and large groups are split like small ones.
    """
    first = tensors[0]
    schemes = [tensor.scheme for tensor in tensors if tensor.scheme is not None]
    if len(schemes) < len(tensors):
        others = sorted({tensor.type for tensor in tensors if tensor.scheme is None})
        return f"{'partly ' if schemes else ''}stored as {' and '.join(others)}"
    if len({tensor.order for tensor in tensors}) > 1:
        return "its tensors have their inputs in different orders"
    if len({(scheme.numbers.startswith("fp"), scheme.activations) for scheme in schemes}) > 1:
        return f"its tensors are stored differently: {' and '.join(sorted({tensor.type for tensor in tensors}))}"
    groups = [scheme.group for scheme in schemes if scheme.group is not None]
    scheme = Scheme(
        numbers=max((scheme.numbers for scheme in schemes), key=("int4", "int8", "fp4", "fp8").index),
        group=int(np.gcd.reduce(groups)) if groups else None,
        # The middle of 4 bits isn't that of 8
        zeros=any(scheme.zeros for scheme in schemes) or len({scheme.numbers for scheme in schemes}) > 1,
        activations=schemes[0].activations,
    )
    factors = np.result_type(*(tensor.factors for tensor in tensors)) if len(tensors) > 1 else first.factors
    return StoredWeight(first.type, scheme, first.packing, factors, first.order)
