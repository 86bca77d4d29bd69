"""Chooses tokens from logits: each row has its own parameters, and its randomness depends on seed and position alone.

First come penalties, logit bias and forbidden stop ids. Then a row takes the likeliest token, or draws one after
temperature, top_k, top_p and min_p, which need no sort of the vocabulary. Work that no row of the batch needs is
skipped at run time. Log probabilities are those of the model, before any of this.

The vocabulary stays split over the tensor axis: shards exchange a few numbers per row, never the logits. The results of
an exchange are the same on every shard, so all shards of a rank take the same branches; another data-parallel rank may
take others.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped, UInt32

from jaxserve.api_types import MAX_LOGPROBS
from jaxserve.layers.embedding import shard_index
from jaxserve.layers.linear import TENSOR_AXIS, tensor_rank
from jaxserve.runtime.step.state import COUNT_MASK, FLOATS, INTS, SamplingRows
from pallas_kernels.cpu import kernel_or_fallback
from pallas_kernels.normalization import log_sum_exp
from pallas_kernels.sampling import draw_tokens, exponential_noise

_DIGIT_BITS = 4


@flax.struct.dataclass
class Logprobs:
    """Log probabilities of the chosen token and of the likeliest tokens, best first."""

    chosen: Float[Array, " rows"]
    top_ids: Int[Array, "rows top"]
    top: Float[Array, "rows top"]


@jax.named_scope("sample")
def greedy(logits: Float[Array, "rows vocab_shard"]) -> Int[Array, " rows"]:
    """Return the likeliest token over all shards; of equally likely ones, that with the lowest id."""
    size = logits.shape[1]
    peak = logits.max(axis=1)
    # Unlike XLA's argmax, a maximum and a minimum are vectorized: 0.3 ms instead of 3.8 for 16 rows on a CPU.
    index = jnp.arange(size, dtype=jnp.int32)
    local = jnp.min(jnp.where(logits == peak[:, None], index, size - 1), axis=1)
    best = lax.pmax(peak, TENSOR_AXIS)
    vocab = size * lax.axis_size(TENSOR_AXIS)
    return lax.pmin(jnp.where(peak == best, local + tensor_rank() * size, vocab - 1), TENSOR_AXIS)


@jax.named_scope("sample")
def sample(
    logits: Float[Array, "rows vocab_shard"],
    rows: SamplingRows,
    counts: Int[Array, "rows vocab_shard"],
    lengths: Int[Array, " rows"],
) -> tuple[Int[Array, " rows"], Logprobs]:
    """Return one token per row, and its log probabilities.

    `lengths` are the lengths of the sequences before the new token, `counts` their rows of `DeviceState.counts`.
    """
    edited = adjust_logits(logits, rows, counts, lengths)
    if _num_shards() == 1:
        token = kernel_or_fallback(_choose_by_kernel, _choose, edited, rows, lengths)
    else:
        token = _choose(edited, rows, lengths)
    wants_logprobs = jnp.any(rows.ints[:, INTS.index("logprobs")] != 0)
    return token, lax.cond(wants_logprobs, logprobs, _no_logprobs, logits, token)


def _choose(
    logits: Float[Array, "rows vocab_shard"], rows: SamplingRows, lengths: Int[Array, " rows"]
) -> Int[Array, " rows"]:
    chosen = greedy(logits)
    temperature = rows.floats[:, FLOATS.index("temperature")]
    drawn = lax.cond(
        jnp.any(temperature > 0),
        lambda: _draw(_truncated_weights(logits, rows), rows, lengths),
        lambda: jnp.zeros_like(chosen),
    )
    return jnp.where(temperature > 0, drawn, chosen)


def _choose_by_kernel(
    logits: Float[Array, "rows vocab"], rows: SamplingRows, lengths: Int[Array, " rows"]
) -> Int[Array, " rows"]:
    temperature, top_p, min_p = (rows.floats[:, FLOATS.index(name)] for name in ("temperature", "top_p", "min_p"))
    top_k = rows.ints[:, INTS.index("top_k")]
    return draw_tokens(logits, _row_keys(rows, lengths), temperature, top_k, top_p, min_p)


def _no_logprobs(logits: Float[Array, "rows vocab_shard"], token: Int[Array, " rows"]) -> Logprobs:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(logprobs, logits, token))


@jax.named_scope("logprobs")
def logprobs(logits: Float[Array, "rows vocab_shard"], token: Int[Array, " rows"]) -> Logprobs:
    """Return the log probabilities of `token` and of the `MAX_LOGPROBS` likeliest tokens."""
    normalizer = _log_sum_exp(logits)
    top, top_ids = lax.top_k(logits, min(MAX_LOGPROBS, logits.shape[1]))
    if _num_shards() == 1:
        chosen = jnp.take_along_axis(logits, token[:, None], axis=1)
    else:
        normalizer = _log_sum_exp(_gather_shards(normalizer))
        chosen = _token_logit(logits, token)
        top, top_ids = _merge_top(top, top_ids + tensor_rank() * logits.shape[1])
    return Logprobs((chosen - normalizer)[:, 0], top_ids.astype(jnp.int32), top - normalizer)


def _log_sum_exp(x: Float[Array, "rows some"]) -> Float[Array, "rows 1"]:
    return kernel_or_fallback(log_sum_exp, lambda x: jax.nn.logsumexp(x, axis=1, keepdims=True), x)


def _token_logit(logits: Float[Array, "rows vocab_shard"], token: Int[Array, " rows"]) -> Float[Array, "rows 1"]:
    """Return each row's logit of its token, from the shard that has it."""
    size = logits.shape[1]
    at = shard_index(token, size)[:, None]
    own = jnp.take_along_axis(logits, jnp.minimum(at, size - 1), axis=1)
    return lax.psum(jnp.where(at < size, own, 0.0), TENSOR_AXIS)


def _merge_top(top: Float[Array, "rows top"], ids: Int[Array, "rows top"]) -> tuple[Array, Array]:
    """Merge the best tokens of all shards, best first. Equals stay in shard order, so the lowest id comes first."""
    top, ids = _gather_shards(top), _gather_shards(ids)
    top, at = lax.top_k(top, min(MAX_LOGPROBS, top.shape[1]))
    return top, jnp.take_along_axis(ids, at, axis=1)


def _gather_shards(x: Shaped[Array, "rows some"]) -> Shaped[Array, "rows some_of_all"]:
    return lax.all_gather(x, TENSOR_AXIS, axis=1, tiled=True)


def _num_shards() -> int:
    return int(lax.axis_size(TENSOR_AXIS))


def adjust_logits(
    logits: Float[Array, "rows vocab_shard"],
    rows: SamplingRows,
    counts: Int[Array, "rows vocab_shard"],
    lengths: Int[Array, " rows"],
) -> Float[Array, "rows vocab_shard"]:
    """Apply penalties and logit bias, and forbid stop ids before `min_tokens`.

    The repetition penalty is that of Keskar et al. 2019, frequency and presence penalties are those of OpenAI.
    """
    repetition, frequency, presence = (
        rows.floats[:, FLOATS.index(name)] for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
    )
    early = lengths < rows.ints[:, INTS.index("min_len")]
    size = logits.shape[1]
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]

    def penalize(x: Array) -> Array:
        times = (counts & COUNT_MASK).astype(jnp.float32)
        repeated = jnp.where(x > 0, x / repetition[:, None], x * repetition[:, None])
        x = jnp.where(counts != 0, repeated, x)
        return x - frequency[:, None] * times - presence[:, None] * (times > 0)

    def bias(x: Array) -> Array:
        ids = jnp.where(rows.bias_ids < 0, size, shard_index(rows.bias_ids, size))
        return x.at[row, ids].add(rows.bias_values, mode="drop")

    def forbid(x: Array) -> Array:
        ids = jnp.where(early[:, None] & (rows.stop_ids >= 0), shard_index(rows.stop_ids, size), size)
        return x.at[row, ids].set(-jnp.inf, mode="drop")

    wants_penalty = jnp.any((repetition != 1.0) | (frequency != 0.0) | (presence != 0.0))
    logits = lax.cond(wants_penalty, penalize, lambda x: x, logits)
    logits = lax.cond(jnp.any(rows.bias_ids >= 0), bias, lambda x: x, logits)
    return lax.cond(jnp.any(early), forbid, lambda x: x, logits)


def _truncated_weights(
    logits: Float[Array, "rows vocab_shard"], rows: SamplingRows
) -> Float[Array, "rows vocab_shard"]:
    """Return weights, 1 for the likeliest token and 0 for those that temperature, top_k, top_p and min_p rule out."""
    temperature, top_p, min_p = (rows.floats[:, FLOATS.index(name)] for name in ("temperature", "top_p", "min_p"))
    top_k = rows.ints[:, INTS.index("top_k")]
    below = logits - lax.pmax(logits.max(axis=1, keepdims=True), TENSOR_AXIS)
    weights = jnp.exp(below / jnp.where(temperature > 0, temperature, 1.0)[:, None])
    weights = lax.cond(jnp.any(top_k > 0), lambda w: _keep_top_k(w, top_k), lambda w: w, weights)
    weights = lax.cond(jnp.any(top_p < 1.0), lambda w: _keep_top_p(w, top_p), lambda w: w, weights)
    return jnp.where(weights >= min_p[:, None], weights, 0.0)


def _keep_top_k(
    weights: Float[Array, "rows vocab_shard"], top_k: Int[Array, " rows"]
) -> Float[Array, "rows vocab_shard"]:
    wanted = jnp.where(top_k > 0, top_k, weights.shape[1] * _num_shards())
    threshold = _largest_threshold(weights, lambda kept, _: jnp.sum(kept, axis=-1, dtype=jnp.int32), wanted)
    return jnp.where(weights >= threshold[:, None], weights, 0.0)


def _keep_top_p(
    weights: Float[Array, "rows vocab_shard"], top_p: Float[Array, " rows"]
) -> Float[Array, "rows vocab_shard"]:
    # A top_p that rounds to 0 in float32 would keep no token.
    wanted = jnp.maximum(top_p, np.finfo(np.float32).tiny) * lax.psum(weights.sum(axis=1), TENSOR_AXIS)
    enough = _largest_threshold(weights, lambda kept, w: jnp.sum(jnp.where(kept, w, 0.0), axis=-1), wanted)
    return jnp.where((weights >= enough[:, None]) | (top_p >= 1.0)[:, None], weights, 0.0)


def _largest_threshold(
    weights: Float[Array, "rows vocab_shard"], measure: Callable[[Array, Array], Array], wanted: Shaped[Array, " rows"]
) -> Float[Array, " rows"]:
    """Return the largest threshold t per row for which `measure(weights >= t, weights)` is at least `wanted`.

    `measure` sums over the last axis, and its results are summed over shards. The threshold is found bit by bit: floats
    of one sign are ordered as their bits are, so 31 passes find it exactly. All ties are kept. With several shards each
    pass ends with an exchange, so there are only 8 passes, of 15 candidates each.
    """
    if _num_shards() > 1:
        return _largest_threshold_of_shards(weights, measure, wanted)
    bits = lax.bitcast_convert_type(weights, jnp.int32)

    def refine(i: Array, found: Array) -> Array:
        candidate = found | (1 << (30 - i))
        return jnp.where(measure(bits >= candidate[:, None], weights) >= wanted, candidate, found)

    found = lax.fori_loop(0, 31, refine, jnp.zeros(weights.shape[0], jnp.int32))
    return lax.bitcast_convert_type(found, jnp.float32)


def _largest_threshold_of_shards(
    weights: Float[Array, "rows vocab_shard"], measure: Callable[[Array, Array], Array], wanted: Shaped[Array, " rows"]
) -> Float[Array, " rows"]:
    bits, each = lax.bitcast_convert_type(weights, jnp.uint32)[:, None], weights[:, None]
    digits = jnp.arange(1, 1 << _DIGIT_BITS, dtype=jnp.uint32)

    def refine(i: Array, found: Array) -> Array:
        shift = jnp.uint32(32 - _DIGIT_BITS) - i.astype(jnp.uint32) * _DIGIT_BITS
        candidates = found[:, None] | (digits << shift)
        measured = lax.psum(measure(bits >= candidates[:, :, None], each), TENSOR_AXIS)
        # The larger a candidate, the smaller its measure: those that measure enough come first.
        return found | (jnp.sum(measured >= wanted[:, None], axis=1, dtype=jnp.uint32) << shift)

    found = lax.fori_loop(0, 32 // _DIGIT_BITS, refine, jnp.zeros(weights.shape[0], jnp.uint32))
    return lax.bitcast_convert_type(found, jnp.float32)


def _row_keys(rows: SamplingRows, lengths: Int[Array, " rows"]) -> UInt32[Array, "rows 2"]:
    """Return 64 random bits per row, from its seed, sample and position: no other row has an influence."""
    low, high, index = (rows.ints[:, INTS.index(name)] for name in ("seed_low", "seed_high", "sample"))

    def one(low: Array, high: Array, index: Array, position: Array) -> Array:
        key = jax.random.wrap_key_data(jnp.stack([low, high]).astype(jnp.uint32))
        return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, index), position))

    return jax.vmap(one)(low, high, index, lengths)


def _draw(
    weights: Float[Array, "rows vocab_shard"], rows: SamplingRows, lengths: Int[Array, " rows"]
) -> Int[Array, " rows"]:
    """Draw one token per row over all shards, by Gumbel-max (see `pallas_kernels.sampling.noise`)."""
    size = weights.shape[1]
    ids = tensor_rank().astype(jnp.uint32) * size + jnp.arange(size, dtype=jnp.uint32)
    # Without the barrier, each of the two passes of `greedy` would compute the noise.
    return greedy(lax.optimization_barrier(weights / exponential_noise(_row_keys(rows, lengths), ids)))
