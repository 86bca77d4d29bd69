"""Rotary position embedding (Su et al. 2021) and its scalings: linear, Llama 3's, YaRN (Peng et al. 2023).

Frequencies are computed on the host in float32, as Hugging Face does, so that logits are equal.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """The base frequency of a rotary embedding and its scaling. `kind` is Hugging Face's `rope_type`."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    factors: tuple[float, ...] = ()


def frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Return the inverse frequencies, `[head_dim / 2]` in float32, and the factor on cos and sin."""
    base = np.float32(rope.theta) ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
    inverse = (1.0 / base).astype(np.float32)
    match rope.kind:
        case "linear":
            return inverse / np.float32(rope.factor), 1.0
        case "llama3":
            return _llama3(inverse, rope), 1.0
        case "yarn":
            return _yarn(inverse, rope, head_dim), _yarn_scale(rope)
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


def _yarn(inverse: np.ndarray, rope: RopeConfig, head_dim: int) -> np.ndarray:
    def dimension(rotations: float) -> float:
        return (head_dim * math.log(rope.original_max_position / (rotations * 2 * math.pi))) / (
            2 * math.log(rope.theta)
        )

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return (inverse / rope.factor * ramp + inverse * (1 - ramp)).astype(np.float32)


def _yarn_scale(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def rotation(
    positions: Int[Array, " tokens"], rope: RopeConfig, head_dim: int
) -> tuple[Float[Array, "tokens 1 2 half"], Float[Array, "tokens 1 2 half"]]:
    """Return cosines and signed sines of the step's positions, for both halves of a head; all layers share them."""
    inverse, scale = frequencies(rope, head_dim)
    angle = positions.astype(jnp.float32)[:, None, None] * jnp.asarray(inverse)
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
