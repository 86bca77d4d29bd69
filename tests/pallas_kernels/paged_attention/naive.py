"""The expected result of `paged_attention` in float64 numpy: one dense softmax a query, and the pool after the step."""

from __future__ import annotations

import numpy as np

from tests.pallas_kernels.paged_attention.cases import Batch, Case, stored


def attention(case: Case, batch: Batch) -> np.ndarray:
    """Return the output of the live tokens, `[tokens, heads, value_dim]`."""
    group = case.heads // case.kv_heads
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    out = []
    for row, (length, new) in enumerate(case.rows):
        keys, values = (np.repeat(x.astype(np.float64), group, axis=1) for x in batch.rows[row])
        q = batch.q[batch.query_starts[row] : batch.query_starts[row + 1]].astype(np.float64)
        logits = np.einsum("qhd,thd->hqt", q, keys) * scale
        if case.soft_cap is not None:
            logits = case.soft_cap * np.tanh(logits / case.soft_cap)
        query, at = np.arange(length - new, length)[:, None], np.arange(length)
        seen = at <= query
        if case.window is not None:
            seen &= query - at < case.window
        weights = np.where(seen, np.exp(logits), 0.0)
        total = weights.sum(axis=-1)
        if batch.sinks is not None:
            total = total + np.exp(batch.sinks.astype(np.float64))[:, None]
        out.append(np.einsum("hqt,thd->qhd", weights / total[..., None], values))
    return np.concatenate(out) if out else np.zeros((0, case.heads, case.value_dim or case.head_dim))


def pool_after(case: Case, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Return the pool with the live new tokens in place, and nothing else changed."""
    keys, values = batch.keys.copy(), batch.values.copy()
    if batch.k is None:
        return keys, values
    num_pages = keys.shape[1] // case.num_layers
    new_keys, new_values = stored(case, np.stack([batch.k, batch.k if batch.v is None else batch.v]), batch.scales)
    new_values = new_keys[..., : case.value_dim] if batch.v is None else new_values
    for row, (length, new) in enumerate(case.rows):
        for i in range(new):
            if case.chunks_only and row < case.num_decodes:
                continue
            position, token = length - new + i, batch.query_starts[row] + i
            entry = case.layer * num_pages + batch.page_table[row, position // case.page_size]
            keys[:, entry, position % case.page_size] = new_keys[token]
            values[:, entry, position % case.page_size] = new_values[token]
    return keys, values
