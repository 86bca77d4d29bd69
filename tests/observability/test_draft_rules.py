from __future__ import annotations

from jaxserve.observability.sample import Settings
from tests.observability.test_tuning_rules import grown, only, rules

NGRAM = Settings("lpm", 1.0, speculative_method="ngram")


def test_drafts_are_rejected() -> None:
    advice = only(grown(num_drafts=500, draft_tokens=3500, accepted_tokens=700))
    assert advice.rule == "drafts rejected"
    assert advice.figure == "700 of 3500 draft tokens were accepted (20%), 1.40 of 7.00 per draft"
    assert advice.what_to_do.startswith("Lower --num-speculative-tokens to 3:")
    assert "--prompt-lookup-min" not in advice.what_to_do
    assert rules(grown(num_drafts=500, draft_tokens=3500, accepted_tokens=1100)) == []
    assert rules(grown(num_drafts=100, draft_tokens=700, accepted_tokens=0)) == [], "too little to judge by"


def test_ngram_may_look_for_longer_ngrams() -> None:
    advice = only(grown(num_drafts=500, draft_tokens=3500, accepted_tokens=700, generation_tokens=1200), NGRAM)
    assert "--prompt-lookup-min" in advice.what_to_do


def test_drafts_that_are_always_wrong() -> None:
    advice = only(grown(num_drafts=500, draft_tokens=3500, accepted_tokens=20))
    assert advice.what_to_do.startswith("Leave --speculative-method out")


def test_drafts_that_are_never_verified() -> None:
    advice = only(grown(generation_tokens=20_000, num_drafts=50, draft_tokens=100, accepted_tokens=90), NGRAM)
    assert advice.rule == "drafts unused"
    assert "50 drafts were verified while 20000 tokens" in advice.figure
    assert "Leave --speculative-method ngram out" in advice.what_to_do
    assert rules(grown(generation_tokens=20_000, num_drafts=5000, draft_tokens=5000, accepted_tokens=4000), NGRAM) == []
    assert rules(grown(generation_tokens=5000), NGRAM) == [], "too little to judge by"
    assert rules(grown(generation_tokens=20_000), Settings("lpm", 1.0, speculative_method="none")) == []
    assert rules(grown(generation_tokens=20_000)) == [], "a server that doesn't say"
