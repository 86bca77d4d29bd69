from __future__ import annotations

import msgspec
import pytest

from jaxserve.api_types import EngineStats
from jaxserve.observability.acceptance import Acceptance, acceptance, read_acceptance
from jaxserve.observability.metrics import Metrics
from tests.server.admin.test_metrics import INFO

STATS = EngineStats(num_drafts=10, draft_tokens=28, accepted_tokens=14, accepted_by_position=(8, 5, 1))


def rendered(stats: EngineStats) -> str:
    return Metrics("tiny", lambda: (INFO, stats)).render().decode()


def test_length_and_rate() -> None:
    seen = acceptance(STATS)
    assert (seen.length, seen.rate) == (2.4, 0.5)
    assert (Acceptance(0, 0, 0).length, Acceptance(0, 0, 0).rate) == (1.0, 0.0)


def test_the_counts_since_an_earlier_reading() -> None:
    later = msgspec.structs.replace(
        STATS, num_drafts=14, draft_tokens=40, accepted_tokens=17, accepted_by_position=(10, 6, 1)
    )
    assert acceptance(later).since(acceptance(STATS)) == Acceptance(4, 12, 3, (2, 1, 0))
    assert acceptance(STATS).since(Acceptance(0, 0, 0)) == acceptance(STATS), "a reading from before it speculated"


def test_they_are_read_from_our_metrics() -> None:
    assert read_acceptance(rendered(STATS)) == acceptance(STATS)
    assert read_acceptance(rendered(EngineStats())) is None, "without speculation"
    twice = Metrics("tiny", lambda: (INFO, STATS), other_engines=("vllm",)).render().decode()
    assert read_acceptance(twice) == acceptance(STATS)


def test_they_are_read_from_vllms_engines() -> None:
    lines = []
    for engine, scale in (("0", 1), ("1", 2)):
        for name, value in (("num_drafts", 4), ("num_draft_tokens", 12), ("num_accepted_tokens", 6)):
            lines.append(f'vllm:spec_decode_{name}_total{{engine="{engine}",model_name="m"}} {scale * value}.0')
        for position, value in enumerate((4, 2)):
            labels = f'{{engine="{engine}",model_name="m",position="{position}"}}'
            lines.append(f"vllm:spec_decode_num_accepted_tokens_per_pos_total{labels} {scale * value}.0")
    assert read_acceptance("\n".join(lines) + "\n") == Acceptance(12, 36, 18, (12, 6))


@pytest.mark.parametrize("text", ["", "sglang:spec_accept_length 2.5\n", "vllm:spec_decode_num_drafts_total 5.0\n"])
def test_other_metrics_have_none(text: str) -> None:
    assert read_acceptance(text) is None


def test_results_have_vllms_keys() -> None:
    assert acceptance(STATS).as_json() == {
        "spec_decode_num_drafts": 10,
        "spec_decode_draft_tokens": 28,
        "spec_decode_accepted_tokens": 14,
        "spec_decode_acceptance_rate": 50.0,
        "spec_decode_acceptance_length": 2.4,
        "spec_decode_per_position_acceptance_rates": [0.8, 0.5, 0.1],
        "accept_length": 2.4,
    }
    assert Acceptance(0, 0, 0, (0, 0)).as_json()["spec_decode_per_position_acceptance_rates"] == []
