"""The program that opens a slot, before the first step of its request.

An update has a fixed size; a slot with many cached pages, or with a long prompt under penalties, takes several updates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.api_types import MAX_LOGIT_BIAS, MAX_STOP_IDS
from jaxserve.layers.embedding import shard_index
from jaxserve.runtime.step.input_packing import InputPacking, PackedField
from jaxserve.runtime.step.state import FLOATS, INTS, SEEN_IN_PROMPT, DeviceState, SamplingRows, all_ranks, one_rank
from jaxserve.step_plan import SlotOpen

# Cached pages, and tokens to count for penalties, that one update holds.
PAGES = 64
TOKENS = 512

UPDATE = InputPacking(
    [
        PackedField("slot"),
        PackedField("reset"),
        PackedField("seq_len"),
        PackedField("ints", len(INTS)),
        PackedField("floats", len(FLOATS), is_float=True),
        PackedField("stop_ids", MAX_STOP_IDS, fill=-1),
        PackedField("bias_ids", MAX_LOGIT_BIAS, fill=-1),
        PackedField("bias_values", MAX_LOGIT_BIAS, is_float=True),
        PackedField("first_page"),
        PackedField("pages", PAGES, fill=-1),
        PackedField("counted_as_output"),
        PackedField("counted", TOKENS, fill=-1),
    ]
)


def pack_open(opened: SlotOpen) -> Iterator[np.ndarray]:
    """Yield the updates that open a slot, in order, each as a packed vector."""
    sampling = opened.sampling
    assert sampling.seed is not None
    seed = sampling.seed & (2**64 - 1)
    prompt_len = len(opened.prompt_ids)
    row = {
        "ints": [
            max(sampling.top_k, 0),
            _signed(seed & 0xFFFFFFFF),
            _signed(seed >> 32),
            opened.sample,
            prompt_len + sampling.min_tokens,
            int(sampling.logprobs is not None),
        ],
        "floats": [getattr(sampling, name) for name in FLOATS],
        "stop_ids": list(opened.stop_ids),
        "bias_ids": list(sampling.logit_bias),
        "bias_values": list(sampling.logit_bias.values()),
    }
    pages = opened.cached_pages[0]
    parts: list[dict[str, list[int]]] = [
        {"first_page": [at], "pages": list(pages[at : at + PAGES])} for at in range(0, len(pages), PAGES)
    ]
    if sampling.penalized:
        for kind, tokens in ((0, opened.prompt_ids), (1, opened.output_ids)):
            parts.extend(
                {"counted_as_output": [kind], "counted": tokens[at : at + TOKENS]}
                for at in range(0, len(tokens), TOKENS)
            )
    for i, part in enumerate(parts or [{}]):
        yield UPDATE.pack(
            {"slot": [opened.slot], "reset": [int(i == 0)], "seq_len": [opened.num_cached_tokens], **row, **part}
        )


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def update(state: DeviceState, packed: jax.Array) -> DeviceState:
    """Apply one packed update to one rank's state. Slot -1 changes nothing, for ranks that open no slot."""
    local, fields = one_rank(state), UPDATE.unpack(one_rank(packed))
    slots = local.seq_lens.shape[0]
    slot = jnp.where(fields["slot"] < 0, slots, fields["slot"])
    sampling = SamplingRows(
        **{
            name: getattr(local.sampling, name).at[slot].set(fields[name], mode="drop")
            for name in ("ints", "floats", "stop_ids", "bias_ids", "bias_values")
        }
    )
    columns = fields["first_page"] + jnp.arange(PAGES, dtype=jnp.int32)
    columns = jnp.where(fields["pages"] < 0, local.page_tables.shape[1], columns)
    fresh = jnp.where(fields["reset"] != 0, slot, slots)
    counts = local.counts.at[fresh].set(0, mode="drop")
    size = counts.shape[1]
    counted = shard_index(fields["counted"], size)
    as_output = jnp.where(fields["counted_as_output"] != 0, counted, size)
    as_prompt = jnp.where(fields["counted_as_output"] != 0, size, counted)
    counts = counts.at[slot, as_output].add(1, mode="drop")
    marked = counts.at[slot, as_prompt].get(mode="fill", fill_value=0) | SEEN_IN_PROMPT
    counts = counts.at[slot, as_prompt].set(marked.astype(counts.dtype), mode="drop")
    return all_ranks(
        dataclasses.replace(
            local,
            seq_lens=local.seq_lens.at[slot].set(fields["seq_len"], mode="drop"),
            page_tables=local.page_tables.at[slot, columns].set(fields["pages"], mode="drop"),
            sampling=sampling,
            counts=counts,
        )
    )
