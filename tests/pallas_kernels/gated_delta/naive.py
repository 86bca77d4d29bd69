"""A gated delta net in float64 numpy, one token at a time: all that a sequence has computed up to its last token."""

from __future__ import annotations

import dataclasses

import numpy as np

from pallas_kernels.gated_delta import BLOCK, DeltaLayout


@dataclasses.dataclass(frozen=True)
class History:
    """What each token of a sequence adds, and the states at borders of blocks: `states[b]` is that after `b` blocks.

    `sums` are those of the logarithms of the decays of a token's block up to it.
    """

    inputs: np.ndarray
    keys: np.ndarray
    deltas: np.ndarray
    sums: np.ndarray
    outputs: np.ndarray
    states: list[np.ndarray]

    def state(self, border: int) -> np.ndarray:
        """Return the state after `border` tokens, `[value_heads, key_dim, value_dim]`."""
        assert border % BLOCK == 0
        return self.states[border // BLOCK]

    def tail(self, border: int, taps: int) -> np.ndarray:
        """Return the last inputs of the convolution before a border, `[key_heads, taps - 1, width]`."""
        padded = np.concatenate([np.zeros_like(self.inputs[:1])] * (taps - 1) + [self.inputs[:border]])
        return np.moveaxis(padded[border:], 0, 1)


def history(
    products: np.ndarray, gates: np.ndarray, conv: np.ndarray, rate: np.ndarray, bias: np.ndarray, layout: DeltaLayout
) -> History:
    """Compute a whole sequence of products `[tokens, key_heads, width]` and gates `[tokens, key_heads, 2, group]`."""
    tokens, key_dim, group = len(products), layout.key_dim, layout.group
    padded = np.concatenate([np.zeros((layout.taps - 1, *products.shape[1:])), products.astype(np.float64)])
    mixed = sum(padded[tap : tap + tokens] * conv[:, :, tap].astype(np.float64) for tap in range(layout.taps))
    x = (mixed / (1 + np.exp(-mixed))).astype(np.float32).astype(products.dtype).astype(np.float64)
    q, k, v = np.split(x, [key_dim, 2 * key_dim], axis=2)
    q, k = (part / np.sqrt((part * part).sum(axis=2, keepdims=True) + 1e-6) for part in (q, k))
    v = v.reshape(tokens, layout.value_heads, layout.value_dim)
    queries, keys = np.repeat(q * key_dim**-0.5, group, axis=1), np.repeat(k, group, axis=1)
    gate, decay = (gates[:, :, i].astype(np.float64).reshape(tokens, -1) for i in range(2))
    betas = 1 / (1 + np.exp(-gate))
    logs = -np.exp(rate.astype(np.float64)) * np.logaddexp(0, decay + bias)
    state = np.zeros((layout.value_heads, key_dim, layout.value_dim))
    states, deltas, outputs = [state], np.empty_like(v), np.empty_like(v)
    for t in range(tokens):
        state = np.exp(logs[t])[:, None, None] * state
        deltas[t] = betas[t][:, None] * (v[t] - np.einsum("hdv,hd->hv", state, keys[t]))
        state = state + keys[t][:, :, None] * deltas[t][:, None]
        outputs[t] = np.einsum("hdv,hd->hv", state, queries[t])
        if (t + 1) % BLOCK == 0:
            states.append(state)
    blocks = range(0, tokens, BLOCK)
    sums = np.concatenate([np.cumsum(logs[at : at + BLOCK], axis=0) for at in blocks]) if tokens else logs
    return History(products, k, deltas, sums, outputs, states)
