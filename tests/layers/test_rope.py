"""Checks rotation against multiplication by complex numbers, and each scaling by its properties."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.batch import TokenBatch
from jaxserve.layers.rope import RopeConfig, frequencies, head_order, rotate, rotation

DIM = 32


def batch(*positions: Any, fill_lens: Any = 0) -> TokenBatch:
    """Return tokens at these positions; what else a batch has doesn't matter."""
    where = jnp.asarray(np.concatenate([np.atleast_1d(each) for each in positions]), jnp.int32)
    nothing = jnp.zeros(0, jnp.int32)
    return TokenBatch(
        tokens=where,
        positions=where,
        fill_lens=jnp.broadcast_to(jnp.asarray(fill_lens, jnp.int32), where.shape),
        page_tables=(nothing,),
        query_starts=nothing,
        kv_lens=nothing,
        num_decodes=nothing,
        num_seqs=nothing,
    )


def _inverse(theta: float = 10000.0) -> np.ndarray:
    return theta ** (-np.arange(0, DIM, 2) / DIM)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_a_pair_is_rotated_by_position_times_frequency(theta: float) -> None:
    rng = np.random.default_rng(0)
    positions = np.array([0, 1, 7, 1000], np.int32)
    x = rng.standard_normal((4, 3, DIM)).astype(np.float32)
    turned = np.asarray(rotate(x, *rotation(batch(positions), RopeConfig(theta=theta), DIM)))
    pairs = x[..., : DIM // 2] + 1j * x[..., DIM // 2 :]
    expected = pairs * np.exp(1j * positions[:, None, None] * _inverse(theta))
    np.testing.assert_allclose(turned[..., : DIM // 2], expected.real, atol=2e-4)
    np.testing.assert_allclose(turned[..., DIM // 2 :], expected.imag, atol=2e-4)
    np.testing.assert_array_equal(turned[0], x[0])


def test_products_depend_on_distance_alone() -> None:
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 1, 1, DIM)).astype(np.float32)

    def product(key_position: int, query_position: int) -> float:
        turn = [rotation(batch(p), RopeConfig(), DIM) for p in (query_position, key_position)]
        return float((np.asarray(rotate(q, *turn[0])) * np.asarray(rotate(k, *turn[1]))).sum())

    assert product(3, 10) == pytest.approx(product(103, 110), abs=1e-4)


def test_the_dtype_is_kept_and_the_angle_exact() -> None:
    x = np.ones((1, 1, DIM), np.float32).astype("bfloat16")
    turned = rotate(x, *rotation(batch(4097), RopeConfig(), DIM))
    assert turned.dtype == x.dtype
    assert float(turned[0, 0, 0]) == pytest.approx(math.cos(4097) - math.sin(4097), abs=0.01)


def test_linear_scales_every_frequency() -> None:
    found, scale = frequencies(RopeConfig(kind="linear", factor=4.0), DIM)
    np.testing.assert_allclose(found, _inverse() / 4, rtol=1e-6)
    assert (scale == 1.0).all()


def test_llama3_keeps_short_waves_and_scales_long_ones() -> None:
    rope = RopeConfig(
        theta=500000.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    )
    found, scale = frequencies(rope, DIM)
    plain = _inverse(500000.0)
    waves = 2 * np.pi / plain
    short, long = waves < 8192 / 4, waves > 8192
    np.testing.assert_allclose(found[short], plain[short], rtol=1e-6)
    np.testing.assert_allclose(found[long], plain[long] / 8, rtol=1e-6)
    between = ~short & ~long
    assert between.any()
    assert ((found < plain) & (found > plain / 8))[between].all()
    assert (scale == 1.0).all()


def test_yarn_keeps_fast_pairs_and_scales_slow_ones() -> None:
    rope = RopeConfig(kind="yarn", factor=4.0, original_max_position=2048)
    found, scale = frequencies(rope, DIM)
    plain = _inverse()
    np.testing.assert_allclose(found[0], plain[0], rtol=1e-6)
    np.testing.assert_allclose(found[-1], plain[-1] / 4, rtol=1e-6)
    assert (np.diff(found / plain) <= 1e-6).all()
    np.testing.assert_allclose(scale, 0.1 * math.log(4) + 1, rtol=1e-6)
    given = dataclasses.replace(rope, attention_factor=1.5)
    assert (frequencies(given, DIM)[1] == 1.5).all()
    both = RopeConfig(kind="yarn", factor=4.0, original_max_position=2048, mscale=1.0, mscale_all_dim=1.0)
    assert (frequencies(both, DIM)[1] == 1.0).all()


def test_longrope_chooses_by_the_length_of_the_sequence() -> None:
    short, long = tuple(np.linspace(1, 2, DIM // 2)), tuple(np.linspace(2, 9, DIM // 2))
    rope = RopeConfig(kind="longrope", factor=4.0, original_max_position=64, short_factors=short, long_factors=long)
    cos, sin = (np.asarray(x)[:, 0, 1] for x in rotation(batch(5, 5, fill_lens=(64, 65)), rope, DIM))
    scale = math.sqrt(1 + math.log(4) / math.log(64))
    for row, factors in enumerate((short, long)):
        np.testing.assert_allclose(cos[row], np.cos(5 * _inverse() / factors) * scale, rtol=1e-4)
        np.testing.assert_allclose(sin[row], np.sin(5 * _inverse() / factors) * scale, rtol=1e-4)


def test_dynamic_stretches_by_the_context_of_the_deployment() -> None:
    dynamic = RopeConfig(kind="dynamic", factor=2.0, max_position=64)
    np.testing.assert_allclose(frequencies(dynamic, DIM, 64)[0], _inverse(), rtol=1e-6)
    stretched = _inverse(10000.0 * (2 * 128 / 64 - 1) ** (DIM / (DIM - 2)))
    np.testing.assert_allclose(frequencies(dynamic, DIM, 128)[0], stretched, rtol=1e-5)


def test_proportional_rotates_the_first_pairs_of_a_whole_head() -> None:
    rope = RopeConfig(kind="proportional", rotated=8, factor=2.0)
    found, scale = frequencies(rope, DIM)
    np.testing.assert_allclose(found, np.where(np.arange(DIM // 2) < 4, _inverse() / 2, 0), rtol=1e-6)
    assert (scale == 1.0).all()
    assert head_order(rope, DIM) is None
    whole, _ = frequencies(dataclasses.replace(rope, rotated=None), DIM)
    np.testing.assert_allclose(whole, _inverse() / 2, rtol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [None, 8])
def test_reordered_heads_give_the_same_products(interleaved: bool, rotated: int | None) -> None:
    """Rotating reordered queries and keys in halves equals rotating them where the checkpoint has their pairs."""
    rope = RopeConfig(rotated=rotated, interleaved=interleaved)
    q, k = np.random.default_rng(2).standard_normal((2, 5, 1, DIM)).astype(np.float32)
    positions = np.array([0, 1, 5, 7, 40], np.int32)
    inverse, _ = frequencies(dataclasses.replace(rope, rotated=None), rotated or DIM)
    angles = positions[:, None] * inverse
    cos, sin = (np.repeat(f(angles), 2, 1) if interleaved else np.tile(f(angles), 2) for f in (np.cos, np.sin))

    def plain(x: np.ndarray) -> np.ndarray:
        turned, rest = np.split(x[:, 0], [rotated or DIM], axis=1)
        if interleaved:
            other = np.stack([-turned[:, 1::2], turned[:, ::2]], axis=2).reshape(turned.shape)
        else:
            other = np.concatenate([-turned[:, turned.shape[1] // 2 :], turned[:, : turned.shape[1] // 2]], axis=1)
        return np.concatenate([turned * cos + other * sin, rest], axis=1)

    order = head_order(rope, DIM)
    ours = [rotate(x[..., np.array(order or range(DIM))], *rotation(batch(positions), rope, DIM))[:, 0] for x in (q, k)]
    np.testing.assert_allclose(ours[0] @ ours[1].T, plain(q) @ plain(k).T, atol=1e-4)
