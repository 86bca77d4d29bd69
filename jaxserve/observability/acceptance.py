"""The figures of speculative decoding: how many draft tokens were verified and accepted, of our engine or another."""

from __future__ import annotations

import dataclasses
from itertools import zip_longest

from prometheus_client.parser import text_string_to_metric_families

from jaxserve.api_types import EngineStats

_SERVERS = ("jaxserve:", "vllm:")


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Counts of drafts, of their verified tokens, and of the accepted ones.

    `by_position` counts the drafts whose token of each position was accepted.
    """

    drafts: int
    draft_tokens: int
    accepted: int
    by_position: tuple[int, ...] = ()

    @property
    def length(self) -> float:
        """The tokens that a request got from a verified draft on average, with the one that the model adds; or 1."""
        return 1.0 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def rate(self) -> float:
        """The share of the verified draft tokens that were accepted, 0 to 1."""
        return self.accepted / self.draft_tokens if self.draft_tokens else 0.0

    def since(self, before: Acceptance) -> Acceptance:
        """Return the counts minus the counts of `before`."""
        positions = zip_longest(self.by_position, before.by_position, fillvalue=0)
        return Acceptance(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted - before.accepted,
            tuple(now - then for now, then in positions),
        )

    def as_json(self) -> dict[str, object]:
        """Return the figures under the keys of vLLM's results, and the length under SGLang's too."""
        return {
            "spec_decode_num_drafts": self.drafts,
            "spec_decode_draft_tokens": self.draft_tokens,
            "spec_decode_accepted_tokens": self.accepted,
            "spec_decode_acceptance_rate": 100.0 * self.rate,
            "spec_decode_acceptance_length": self.length,
            "spec_decode_per_position_acceptance_rates": [count / self.drafts for count in self.by_position]
            if self.drafts
            else [],
            "accept_length": self.length,
        }


def acceptance(stats: EngineStats) -> Acceptance:
    """Return the figures of an engine since its start."""
    return Acceptance(stats.num_drafts, stats.draft_tokens, stats.accepted_tokens, stats.accepted_by_position)


def read_acceptance(metrics: str) -> Acceptance | None:
    """Return the figures in the text of /metrics of a jaxserve or vLLM server; None if it has none.

    Counts of several engines are added up. A vLLM server has them only if it speculates; ours has no positions if it
    doesn't. Raises `ValueError` if the text isn't Prometheus'.
    """
    # A jaxserve with --metrics-prefix vllm has them twice
    return next((figures for prefix in _SERVERS if (figures := _figures(metrics, prefix)) is not None), None)


def _figures(metrics: str, prefix: str) -> Acceptance | None:
    counts: dict[str, int] = {}
    positions: dict[int, int] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if not sample.name.startswith(prefix):
                continue
            name, value = sample.name.removeprefix(prefix), int(sample.value)
            if name == "spec_decode_num_accepted_tokens_per_pos_total":
                position = int(sample.labels["position"])
                positions[position] = positions.get(position, 0) + value
            elif name in _COUNTS:
                counts[name] = counts.get(name, 0) + value
    if len(counts) < len(_COUNTS) or not positions:
        return None
    drafts, drafted, accepted = (counts[name] for name in _COUNTS)
    return Acceptance(drafts, drafted, accepted, tuple(positions[key] for key in sorted(positions)))


_COUNTS = (
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
)
