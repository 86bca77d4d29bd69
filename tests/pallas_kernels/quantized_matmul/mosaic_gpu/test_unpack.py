"""Which number stands in which register of an operand, by the layouts that the GPU's compiler uses."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic import gpu as mgpu

from pallas_kernels.quantized_matmul.layout import FP4_VALUES
from pallas_kernels.quantized_matmul.mosaic_gpu.unpack import TILE_ROWS, Unpacking

UNPACKINGS = [
    *(Unpacking(numbers, group) for numbers in ("int4", "fp4") for group in (128, 64, 32)),
    *(Unpacking(numbers, group) for numbers in ("int8", "fp8") for group in (128, 32)),
]


def registers(values: np.ndarray, layout: Any) -> np.ndarray:
    """Return what each thread of a warpgroup has of a matrix, `[warps, lanes, *registers, vector]`."""
    tiled = values
    for tile in layout.tiling.tiles:
        lead, rank = tiled.ndim - len(tile), len(tile)
        split = [part for size, by in zip(tiled.shape[lead:], tile, strict=True) for part in (size // by, by)]
        tiled = tiled.reshape(*tiled.shape[:lead], *split)
        order = [*range(lead), *range(lead, lead + 2 * rank, 2), *range(lead + 1, lead + 2 * rank, 2)]
        tiled = tiled.transpose(order)
    threads = [*layout.warp_dims, *layout.lane_dims]
    rest = [dim - tiled.ndim for dim in range(tiled.ndim - 1) if dim - tiled.ndim not in threads]
    return tiled.transpose([dim % tiled.ndim for dim in (*threads, *rest, -1)]).reshape(4, 32, -1, tiled.shape[-1])


@pytest.mark.parametrize("unpacking", UNPACKINGS, ids=str)
def test_a_thread_keeps_numbers_at_the_places_of_their_inputs(unpacking: Unpacking) -> None:
    inputs, pairs, words = unpacking.inputs, unpacking.pairs, unpacking.words
    numbers = np.arange(TILE_ROWS * inputs).reshape(TILE_ROWS, inputs)
    in_words = numbers[:, unpacking.arrangement].reshape(TILE_ROWS, -1, 2 * pairs)
    stored = np.stack(
        [registers(in_words[..., i], unpacking.layout.to_mgpu()) for i in range(2 * pairs)], axis=-1
    )  # [warps, lanes, halves, words, numbers of a word]
    assert stored.shape == (4, 32, 2, words, 2 * pairs)
    expected = registers(numbers, mgpu.WGMMA_LAYOUT)
    expected = expected.reshape(4, 32, -1, 2, 2)  # [warps, lanes, columns, halves, pair]
    for word, i in np.ndindex(words, pairs):
        pair = stored[..., word, [i, i + pairs]]
        np.testing.assert_array_equal(pair, expected[:, :, unpacking.column(word, i)])


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("unpacking", UNPACKINGS, ids=str)
def test_every_number_less_its_zero_is_unpacked_exactly(unpacking: Unpacking, zeros: bool) -> None:
    rng, bits, shape = np.random.default_rng(unpacking.group), unpacking.bits, (TILE_ROWS, unpacking.inputs)
    stored = rng.integers(0, 2**bits, shape).astype(np.uint8)
    if unpacking.numbers == "fp8":
        stored[stored & 0x7F == 0x7F] = 0  # NaN
        numbers = stored.view(jnp.float8_e4m3fn).astype(np.float32)
    elif unpacking.numbers == "fp4":
        numbers = FP4_VALUES[stored]
    else:
        numbers = np.where(stored < 2 ** (bits - 1), stored, stored - 2.0**bits)
    zero = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) + 1, TILE_ROWS) * (
        unpacking.numbers.startswith("int") and zeros
    )
    stored = stored[:, unpacking.arrangement]
    if bits == 4:
        stored = stored[:, ::2] | stored[:, 1::2] << 4
    words = jnp.asarray(np.ascontiguousarray(stored).view(np.uint32))
    column = jnp.asarray(zero, jnp.int16) if zeros else None
    out = unpacking.unpack(words, jnp.asarray(unpacking.constant[0]), column, interpret=True)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(out, np.float64), numbers - zero[:, None])
