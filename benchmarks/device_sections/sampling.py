"""The sampler's kernels on the device: the same tokens as plain XLA chooses."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from device_sections.run import SectionRun
from pallas_kernels.dispatch import has_triton
from pallas_kernels.sampling import reference
from pallas_kernels.sampling.parameters import DrawParameters, FloatColumn, IntColumn, SlotTable
from pallas_kernels.sampling.triton import TopLogits, draw_tokens, top_logits
from pallas_kernels.target import target_of

_VOCABS = (32064, 49152, 128256, 151936, 201088)
_ROWS = 64
_TOP = 20
_NORMALIZER_TOLERANCE = 1e-4


def check(run: SectionRun) -> None:
    """Compare draws under random parameters, and the largest logits, with XLA's; one draw of all may differ, where two
    sums of many probabilities round apart."""
    interpret = not has_triton(target_of(run.device))
    checks = {}
    for vocab in (100, 700) if run.tiny else _VOCABS:
        checks[f"draws of {vocab}"] = functools.partial(_draws, vocab, interpret)
        checks[f"largest of {vocab}"] = functools.partial(_largest, vocab, interpret)
    run.compare("sampling, triton", checks, 0)


def _draws(vocab: int, interpret: bool) -> str | None:
    rng = np.random.default_rng(vocab)
    keys = rng.integers(0, 2**32, (_ROWS, 2), np.uint32)
    parameters = DrawParameters(
        rng.choice([0, 0.3, 1, 1, 2], _ROWS).astype(np.float32),
        rng.choice([0, 0, 1, 7, 50, 10**6], _ROWS).astype(np.int32),
        rng.choice([1, 1, 0.1, 0.5, 0.9, 0.99], _ROWS).astype(np.float32),
        rng.choice([0, 0, 0, 0.05], _ROWS).astype(np.float32),
    )
    ints, floats = np.zeros((_ROWS, len(IntColumn)), np.int32), np.zeros((_ROWS, len(FloatColumn)), np.float32)
    ints[:, IntColumn.TOP_K] = parameters.top_k
    drawn = parameters.temperature, parameters.top_p, parameters.min_p
    floats[:, [FloatColumn.TEMPERATURE, FloatColumn.TOP_P, FloatColumn.MIN_P]] = np.stack(drawn, axis=1)
    table = SlotTable(np.arange(_ROWS, dtype=np.int32), ints, floats)

    @jax.jit
    def by_triton(logits: jax.Array, keys: jax.Array, table: SlotTable) -> jax.Array:
        return draw_tokens(logits, None, keys, jnp.ones(_ROWS, bool), table, interpret=interpret)

    logits = rng.normal(0, 3, (_ROWS, vocab)).astype(np.float32)
    found = np.asarray(by_triton(logits, keys, table))
    expected = np.asarray(jax.jit(reference.draw_tokens)(logits, keys, parameters))
    rows = np.flatnonzero(found != expected)
    return None if len(rows) <= 1 else f"other tokens in {len(rows)} of {_ROWS} rows, the first {rows[0]}"


def _largest(vocab: int, interpret: bool) -> str | None:
    logits = jax.random.normal(jax.random.key(vocab), (_ROWS, vocab))
    token = jnp.arange(_ROWS, dtype=jnp.int32)

    @jax.jit
    def by_triton(logits: jax.Array) -> TopLogits:
        return top_logits(logits, token, jnp.ones(_ROWS, bool), top=_TOP, normalize=False, interpret=interpret)

    found, (expected, ids) = by_triton(logits), jax.lax.top_k(logits, _TOP)
    error = float(jnp.abs(found.normalizer - jax.nn.logsumexp(logits, axis=1)).max())
    same = bool((found.top_ids == ids).all()) and bool((found.top == expected).all())
    return None if same and error < _NORMALIZER_TOLERANCE else f"other logits than XLA's, normalizers {error:.1e} apart"
