"""The tuning rules about speculative decoding: whether drafts are accepted, and whether they are verified at all."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxserve.observability.sample import Sample, Settings
from jaxserve.observability.tuning_advice import TuningAdvice

MANY_DRAFTED = 1000
"""Acceptance is judged from this many draft tokens on."""
LOW_ACCEPTANCE = 0.3
SHORT_ACCEPTED = 0.1
"""With fewer tokens accepted per draft, no number of draft tokens pays."""
FEW_DRAFTS = 0.02
MANY_TOKENS = 10_000
"""Whether drafts are used is judged from this many generated tokens on."""


def drafts_rejected(samples: Sequence[Sample], settings: Settings) -> TuningAdvice | None:
    """Advise if few of the draft tokens that were verified were accepted."""
    drafts = samples[-1].num_drafts - samples[0].num_drafts
    drafted = samples[-1].draft_tokens - samples[0].draft_tokens
    accepted = samples[-1].accepted_tokens - samples[0].accepted_tokens
    if drafted < MANY_DRAFTED or accepted >= LOW_ACCEPTANCE * drafted:
        return None
    each = accepted / drafts
    if each < SHORT_ACCEPTED:
        what_to_do = "Leave --speculative-method out: this load gains nothing from it."
    else:
        what_to_do = f"Lower --num-speculative-tokens to {math.ceil(each) + 1}: later draft tokens are seldom accepted."
        if settings.speculative_method == "ngram":
            what_to_do += " Or raise --prompt-lookup-min, so that fewer and better drafts are found."
    return TuningAdvice(
        "drafts rejected",
        f"{accepted} of {drafted} draft tokens were accepted ({accepted / drafted:.0%}), {each:.2f} of "
        f"{drafted / drafts:.2f} per draft",
        what_to_do,
    )


def drafts_unused(samples: Sequence[Sample], settings: Settings) -> TuningAdvice | None:
    """Advise if speculation is on, but hardly any drafts were worth verifying."""
    tokens = samples[-1].generation_tokens - samples[0].generation_tokens
    drafts = samples[-1].num_drafts - samples[0].num_drafts
    if settings.speculative_method in (None, "none") or tokens < MANY_TOKENS or drafts >= FEW_DRAFTS * tokens:
        return None
    return TuningAdvice(
        "drafts unused",
        f"{drafts} drafts were verified while {tokens} tokens were generated: by measured times and acceptance the "
        "others would have cost more than they gave",
        f"Leave --speculative-method {settings.speculative_method} out under this load, which saves start-up time and "
        "memory; or raise --speculative-disable-by-batch-size if it is set.",
    )
