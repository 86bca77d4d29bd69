"""Block sizes of the Triton backend."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantized_matmul import NumberType, Scheme
from pallas_kernels.quantized_matmul.layout import FP4_VALUES
from pallas_kernels.quantized_matmul.triton.backend import blocks_for, candidates
from pallas_kernels.quantized_matmul.triton.kernel import Blocks
from pallas_kernels.quantized_matmul.triton.words import fp4_fields, words_of
from pallas_kernels.target import KernelTarget
from pallas_kernels.tuning import Kind

A100 = KernelTarget("cuda", "NVIDIA A100", (8, 0), cores=108)
INT4 = Scheme("int4", 128)


@pytest.mark.parametrize(
    ("rows", "out_dim", "in_dim", "scheme", "expected"),
    [
        (1, 14336, 4096, INT4, Blocks(64, 16, 1, 4, 4)),
        (1, 4096, 14336, INT4, Blocks(64, 16, 6, 4, 4)),
        (64, 4096, 14336, INT4, Blocks(64, 64, 3, 4, 4)),
        (128, 14336, 4096, INT4, Blocks(64, 64, 1, 4, 4)),
        (2048, 14336, 4096, INT4, Blocks(128, 128, 1, 8, 3)),
        (2048, 14336, 4096, Scheme("int4", 128, zeros=True), Blocks(128, 64, 1, 8, 3)),
    ],
)
def test_tiles_and_splits_fill_the_device(
    rows: int, out_dim: int, in_dim: int, scheme: Scheme, expected: Blocks
) -> None:
    assert blocks_for(rows, out_dim, in_dim, scheme, A100) == expected


@pytest.mark.parametrize(("kind", "rows"), [("decode", 8), ("prefill", 512)])
def test_the_callers_sizes_precede_the_rule(kind: Kind, rows: int) -> None:
    for sizes in candidates(kind):
        target = dataclasses.replace(A100, blocks=frozenset((kind, name, size) for name, size in sizes.items()))
        chosen = dataclasses.asdict(blocks_for(rows, 4096, 4096, INT4, target))
        assert sizes.items() <= chosen.items()


@pytest.mark.parametrize("word", [np.int8, np.int16, np.int32])
@pytest.mark.parametrize(("dtype", "factor"), [(jnp.bfloat16, 2.0**126), (jnp.float16, 2.0**14)])
def test_fields_of_4_bit_floats_are_their_values_times_a_power_of_two(word: type, dtype: Any, factor: float) -> None:
    nibbles = np.random.default_rng(0).integers(0, 16, (3, 32), np.uint8)
    words = (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).view(word)
    places = np.stack([np.asarray(one).astype(np.float64) for one in fp4_fields(jnp.asarray(words), dtype)], axis=-1)
    np.testing.assert_array_equal(places.reshape(3, 32) * factor, FP4_VALUES[nibbles])


@pytest.mark.parametrize(
    ("numbers", "inputs", "group", "values", "step"),
    [
        ("int4", 4096, 128, 8, 128),
        ("int4", 4096, 32, 8, 128),
        ("fp4", 2880, 32, 4, 64),
        ("int8", 4096, 32, 4, 128),
        ("int8", 4096, 16, 4, 64),
        ("int4", 288, 96, 2, 32),
        ("fp8", 96, None, 2, 32),
    ],
)
def test_words_are_long_and_the_numbers_at_a_place_are_of_one_group(
    numbers: NumberType, inputs: int, group: int | None, values: int, step: int
) -> None:
    words = words_of(numbers, inputs, group, interpret=False)
    assert words is not None
    assert (words.values_a_word, words.step) == (values, step)
