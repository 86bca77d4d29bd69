"""Rotary position embedding (Su et al. 2021) and its scalings: linear, dynamic NTK, Llama 3's, YaRN (Peng et al. 2023),
LongRoPE (Ding et al. 2024).

Frequencies are computed on the host in float32, as Hugging Face does, so that logits are equal. Pairs of dimensions are
half a head apart; checkpoints that have them elsewhere are reordered when they are loaded (`head_order`).
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.layers.batch import TokenBatch

Rotation = tuple[Float[Array, "tokens 1 2 half"], Float[Array, "tokens 1 2 half"]]
"""Cosines and signed sines of a step's tokens, for both halves of a head."""


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """The base frequency of a rotary embedding and its scaling. `kind` is Hugging Face's `rope_type`.

    The first `rotated` dimensions of a head are rotated, all if None; `interleaved` tells whether a checkpoint has the
    two dimensions of a pair side by side. `kind` "proportional" has the frequencies and pairs of a whole head, and
    rotates the first `rotated` / 2 pairs. "longrope" has other frequencies for sequences of more than
    `original_max_position` tokens.
    """

    theta: float = 10000.0
    kind: str = "default"
    rotated: int | None = None
    interleaved: bool = False
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    max_position: int = 0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


def head_order(rope: RopeConfig, head_dim: int) -> tuple[int, ...] | None:
    """Return the order that puts the pairs of a checkpoint's heads half a head apart; None if they are there already.

    Dimensions that aren't rotated become pairs too, of frequency 0.
    """
    rotated = head_dim if rope.rotated is None else rope.rotated
    if rope.kind == "proportional" or (rotated == head_dim and not rope.interleaved):
        return None
    pairs = np.arange(rotated).reshape(-1, 2).T if rope.interleaved else np.arange(rotated).reshape(2, -1)
    others = np.arange(rotated, head_dim).reshape(2, -1)
    return tuple(np.concatenate([pairs, others], axis=1).reshape(-1).tolist())


def frequencies(rope: RopeConfig, head_dim: int, context: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return each pair's inverse frequency, `[head_dim / 2]`, and the factor on its cos and sin, in float32.

    Pairs that aren't rotated have frequency 0 and factor 1. A factor without a dimension is for all pairs. `context` is
    the context length of the deployment, by which `kind` "dynamic" chooses its frequencies once for all sequences, so
    that these can share pages.
    """
    dim = head_dim if rope.rotated is None else rope.rotated
    inverse, scale = _frequencies(rope, head_dim if rope.kind == "proportional" else dim, context)
    idle = (head_dim - dim) // 2
    if not idle:
        return inverse, np.asarray(scale, np.float32)
    scales = np.concatenate([np.full(dim // 2, scale), np.ones(idle)])
    return np.concatenate([inverse[: dim // 2], np.zeros(idle, np.float32)]), scales.astype(np.float32)


def _frequencies(rope: RopeConfig, dim: int, context: int) -> tuple[np.ndarray, float]:
    theta = np.float32(rope.theta)
    if rope.kind == "dynamic" and context > rope.max_position:
        stretch = rope.factor * context / rope.max_position - (rope.factor - 1)
        theta = np.float32(rope.theta * stretch ** (dim / (dim - 2)))
    base = theta ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))
    inverse = (1.0 / base).astype(np.float32)
    match rope.kind:
        case "linear" | "proportional":
            return inverse / np.float32(rope.factor), 1.0
        case "llama3":
            return _llama3(inverse, rope), 1.0
        case "yarn":
            return _yarn(inverse, rope, dim), _yarn_scale(rope)
        case "longrope":
            return (1.0 / (np.asarray(rope.short_factors, np.float32) * base)).astype(np.float32), _longrope_scale(rope)
        case "factors":
            return inverse / np.asarray(rope.factors, np.float32), 1.0
    return inverse, 1.0


def _llama3(inverse: np.ndarray, rope: RopeConfig) -> np.ndarray:
    wavelength = 2 * np.pi / inverse
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    blend = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * inverse / rope.factor + blend * inverse
    scaled = np.where(wavelength > longest, inverse / rope.factor, blended)
    return np.where(wavelength < shortest, inverse, scaled).astype(np.float32)


def _yarn(inverse: np.ndarray, rope: RopeConfig, dim: int) -> np.ndarray:
    def dimension(rotations: float) -> float:
        return (dim * math.log(rope.original_max_position / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return (inverse / rope.factor * ramp + inverse * (1 - ramp)).astype(np.float32)


def _yarn_scale(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def _longrope_scale(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))


def rotation(batch: TokenBatch, rope: RopeConfig, head_dim: int, context: int = 0) -> Rotation:
    """Return the rotation of the step's tokens; layers share it. `context` is as for `frequencies`."""
    inverse, scale = frequencies(rope, head_dim, context)
    inverses = jnp.asarray(inverse)
    if rope.kind == "longrope":
        long, _ = frequencies(dataclasses.replace(rope, short_factors=rope.long_factors), head_dim)
        is_long = batch.fill_lens > rope.original_max_position
        inverses = jnp.where(is_long[:, None, None], long, inverse)
    angle = batch.positions.astype(jnp.float32)[:, None, None] * inverses
    cos, sin = jnp.cos(angle) * scale, jnp.sin(angle) * scale
    return jnp.stack([cos, cos], axis=-2), jnp.stack([-sin, sin], axis=-2)


def rotate(
    x: Float[Array, "tokens heads head_dim"],
    cos: Float[Array, "tokens 1 2 half"],
    sin: Float[Array, "tokens 1 2 half"],
) -> Float[Array, "tokens heads head_dim"]:
    """Rotate each pair (i, i + head_dim / 2) by the position's angle, in float32.

    The halves are swapped by a reversal instead of a concatenation, so that everything is one elementwise kernel.
    """
    halves = x.reshape(*x.shape[:-1], 2, -1).astype(jnp.float32)
    return (halves * cos + jnp.flip(halves, axis=-2) * sin).astype(x.dtype).reshape(x.shape)


def query_scale(positions: Int[Array, " tokens"], growth: float, length: int) -> Float[Array, " tokens"]:
    """Return the factor of each token's queries, `1 + growth * log(1 + position // length)`, as in Llama 4."""
    return 1 + growth * jnp.log1p((positions // length).astype(jnp.float32))
