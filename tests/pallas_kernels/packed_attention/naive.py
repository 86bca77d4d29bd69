"""Attention within texts in float64 numpy, one text and one head at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    lengths: Sequence[int],
    scale: float,
    reach: int | None,
    soft_cap: float | None,
    bias: np.ndarray | None,
) -> np.ndarray:
    """Return the output of the tokens of all texts, `[sum(lengths), heads, head_dim]`."""
    live, heads, group = sum(lengths), q.shape[1], q.shape[1] // k.shape[1]
    q, k, v = (x[:live].astype(np.float64) for x in (q, k, v))
    out = np.empty((live, heads, q.shape[2]))
    start = 0
    for length in lengths:
        own = slice(start, start + length)
        distance = np.arange(length) - np.arange(length)[:, None]
        for head in range(heads):
            logits = q[own, head] @ k[own, head // group].T * scale
            if soft_cap is not None:
                logits = soft_cap * np.tanh(logits / soft_cap)
            if bias is not None:
                far = bias.shape[1] // 2
                logits = logits + bias[head, np.clip(distance, -far, far) + far]
            if reach is not None:
                logits = np.where(np.abs(distance) <= reach, logits, -np.inf)
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            out[own, head] = weights @ v[own, head // group] / weights.sum(axis=1, keepdims=True)
        start += length
    return out
