"""How the Triton kernels read stored numbers: in words, which become operands of products in registers.

Several numbers are stored in a word. A kernel takes the first numbers of all words of a step as the operand of one
product, the second numbers as the operand of another, and so on. Numbers are stored so that an operand has those of
neighbouring inputs (`Words.arrangement`). So no number moves from one thread to another.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.quantized_matmul.scheme import BITS, NumberType

# The fewest terms of a product of 16 bits on tensor cores.
MIN_TERMS = 16

NO_ZERO = np.float32(0)

_STEPS = (128, 64, 32, 16)
_WORD_BYTES = (4, 2, 1)


@dataclasses.dataclass(frozen=True)
class Words:
    """How numbers are read: `values_a_word` in each word, and `step` inputs at a time.

    `convert` returns the values at each place of the words in a type of 16 bits, less the zeros of that place: one for
    each output.
    """

    dtype: np.dtype
    values_a_word: int
    step: int
    convert: Callable[[Shaped[Array, "out words"], Any, list[Any]], list[Shaped[Array, "out words"]]]

    @property
    def arrangement(self) -> tuple[int, ...]:
        """The input that each number of a step belongs to, in stored order; empty if they are in order.

        Numbers at the same place of neighbouring words belong to neighbouring inputs.
        """
        if self.values_a_word == 1:
            return ()
        return tuple(np.arange(self.step).reshape(self.values_a_word, -1).T.ravel().tolist())


def words_of(numbers: NumberType, inputs: int, group: int | None, *, interpret: bool) -> Words | None:
    """Return how to read numbers to multiply them in 16 bits, or None if groups are too small or don't fit a step.

    It chooses the longest step of which a group is a part or a multiple, then the longest words that have enough terms
    at each place, all terms of one group.
    """
    size, convert = group or inputs, _CONVERTERS[numbers]
    if numbers == "fp4" and interpret:
        convert = _from_fp4_without_subnormals
    for step, word in itertools.product(_STEPS, _WORD_BYTES):
        values = word * 8 // BITS[numbers]
        terms = step // values
        fits = inputs % step == 0 and (size % step == 0 or (step % size == 0 and size % terms == 0))
        if fits and terms >= MIN_TERMS:
            return Words(np.dtype(f"int{8 * word}"), values, step, convert)
    return None


def whole_words(dtype: Any, inputs: int, group: int | None = None) -> Words | None:
    """Return how to read numbers to multiply them as they are, or None if groups are too small for a product."""
    size = np.dtype(dtype).itemsize
    least, most = MIN_TERMS * 2 // min(size, 2), 128 // size
    step = min((group or inputs) & -(group or inputs), most)
    return Words(np.dtype(dtype), 1, step, lambda words, *_: [words]) if step >= least else None


def _from_int4(words: Int[Array, "out words"], dtype: Any, zeros: list[Any]) -> list[Float[Array, "out words"]]:
    """Convert integers: with the exponent of 128, or of 1024 in float16, the last bits of a float count whole numbers.

    In two's complement, a nibble whose highest bit is inverted is 8 more than its number.
    """
    bits, excess = (0x4308, 136.0) if dtype == jnp.bfloat16 else (0x6408, 1032.0)
    halves = _halves(words, 4, 0xF, lambda nibble, both: nibble ^ bits * both, dtype)
    return [half - (zero + excess).astype(dtype) for half, zero in zip(halves, zeros, strict=True)]


def _from_int8(words: Int[Array, "out words"], dtype: Any, zeros: list[Any]) -> list[Float[Array, "out words"]]:
    """Convert like int4, but in float16, as a bfloat16 has too few bits."""
    halves = _halves(words, 8, 0xFF, lambda byte, both: byte ^ 0x6480 * both, jnp.float16)
    exact = _exact(dtype)
    pairs = zip(halves, zeros, strict=True)
    return [(half.astype(exact) - (zero + 1152.0).astype(exact)).astype(dtype) for half, zero in pairs]


def _from_fp8(words: Int[Array, "out words"], dtype: Any, _: list[Any]) -> list[Float[Array, "out words"]]:
    """Convert floats: float16 has the same fields, longer, and another bias of its exponent.

    A bfloat16 with the same fields would be subnormal where the number is, and some devices take such ones for zero.
    """
    halves = _halves(
        words, 8, 0xFF, lambda byte, both: ((byte & 0x7F * both) << 7) | ((byte & 0x80 * both) << 8), jnp.float16
    )
    return [(half.astype(_exact(dtype)) * 256.0).astype(dtype) for half in halves]


def _from_fp4(words: Int[Array, "out words"], dtype: Any, _: list[Any]) -> list[Float[Array, "out words"]]:
    """Convert floats: the type of 16 bits has the same fields, longer, and another bias of its exponent.

    The smallest number is subnormal before it is multiplied; GPUs multiply such ones exactly in both types.
    """
    factor = 2.0**126 if dtype == jnp.bfloat16 else 2.0**14
    return [half * jnp.asarray(factor, dtype) for half in fp4_fields(words, dtype)]


def _from_fp4_without_subnormals(
    words: Int[Array, "out words"], dtype: Any, _: list[Any]
) -> list[Float[Array, "out words"]]:
    """Convert for the interpreter: a CPU takes subnormal bfloat16 for zero."""
    halves = fp4_fields(words, jnp.float16)
    return [(half.astype(_exact(dtype)) * 2.0**14).astype(dtype) for half in halves]


def fp4_fields(words: Int[Array, "out words"], dtype: Any) -> list[Float[Array, "out words"]]:
    """Return numbers with the sign, the exponent and the mantissa of the 4-bit floats at each place of the words."""
    shift = 6 if dtype == jnp.bfloat16 else 9
    return _halves(
        words, 4, 0xF, lambda nibble, both: ((nibble & 0x7 * both) << shift) | ((nibble & 0x8 * both) << 12), dtype
    )


_CONVERTERS: dict[NumberType, Callable[..., Any]] = {
    "int4": _from_int4,
    "int8": _from_int8,
    "fp4": _from_fp4,
    "fp8": _from_fp8,
}


def _exact(dtype: Any) -> Any:
    """Return a type that holds the values of float16 on their way to `dtype`."""
    return dtype if dtype == jnp.float16 else jnp.float32


def _halves(
    words: Int[Array, "out words"], width: int, mask: int, fields: Callable[[Array, int], Array], dtype: Any
) -> list[Float[Array, "out words"]]:
    """Return the numbers at each place of the words, `width` bits each, in a type of 16 bits.

    `fields` makes the bits of the type from those of a number; `both` repeats a constant for both halves of a word of
    32 bits, as two numbers are converted at once. The bytes of a word of 16 bits become such halves.
    """
    size = words.dtype.itemsize
    both, bits = (1, 8) if size == 1 else (0x10001, 4 * size)
    if size == 2:
        wide = words.astype(jnp.int32)
        words = (wide & 0xFF) | ((wide & 0xFF00) << 8)
    elif size == 1:
        words = words.astype(jnp.int16)
    places = [fields((words >> shift) & mask * both, both) for shift in range(0, bits, width)]
    halves = [place.astype(jnp.int16) for place in places]
    halves += [(place >> 16).astype(jnp.int16) for place in places if size > 1]
    return [lax.bitcast_convert_type(half, dtype) for half in halves]
