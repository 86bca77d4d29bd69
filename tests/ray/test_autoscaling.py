"""How many replicas the queues ask for. Replicas are numbered here."""

from __future__ import annotations

from typing import Any

import pytest
from ray.serve._private.common import DeploymentID
from ray.serve.config import AutoscalingContext

from jaxserve.ray import scale_on_queue


class Deployment:
    """A deployment that has as many replicas as the policy asked for, of `slots` slots each."""

    def __init__(self, slots: float = 10, target: int = 1) -> None:
        self.slots = slots
        self.target = target
        self._state: dict[str, Any] = {}

    def ask(self, *loads: tuple[float, float], queued: float = 0, known: bool = True) -> int:
        """Ask with the running and waiting requests of each replica."""
        replicas: list[Any] = list(range(len(loads)))
        metrics = {
            "running": {replica: float(loads[replica][0]) for replica in replicas},
            "waiting": {replica: float(loads[replica][1]) for replica in replicas},
            "slots": dict.fromkeys(replicas, float(self.slots)),
        }
        wanted, self._state = scale_on_queue(
            AutoscalingContext(
                deployment_id=DeploymentID("engine"),
                deployment_name="engine",
                app_name="llm",
                current_num_replicas=len(loads),
                target_num_replicas=self.target,
                running_replicas=replicas,
                total_num_requests=sum(map(sum, loads)) + queued,
                total_queued_requests=queued,
                aggregated_metrics=metrics if known else {},
                raw_metrics={},
                capacity_adjusted_min_replicas=1,
                capacity_adjusted_max_replicas=100,
                policy_state=self._state,
                last_scale_up_time=None,
                last_scale_down_time=None,
                current_time=0.0,
                config=None,
            )
        )
        self.target = int(wanted)
        return self.target


def test_a_queue_asks_for_more_and_a_longer_one_for_more_yet() -> None:
    assert Deployment().ask((5, 0)) == 1
    assert Deployment().ask((10, 4)) == 2
    assert Deployment().ask((10, 30)) == 5
    assert Deployment().ask((10, 0), queued=30) == 5, "what waits at Serve's handles waits, too"


def test_replicas_whose_cache_is_full_count_by_what_they_run() -> None:
    assert Deployment(slots=100).ask((10, 10)) == 3
    assert Deployment(slots=100).ask((10, 10), (10, 10)) == 5


def test_without_a_queue_there_are_fewer_but_one() -> None:
    deployment = Deployment()
    assert deployment.ask((10, 10), (10, 0)) == 4
    assert deployment.ask((8, 0), (2, 0), (2, 0), (1, 0)) == 2
    assert deployment.ask((0, 0), (0, 0)) == 1


def test_what_ran_at_once_is_not_forgotten_when_the_queue_is_gone() -> None:
    """Otherwise the replicas that took the queue away would end at once, as there seem to be slots for all."""
    deployment = Deployment(slots=100)
    wanted = deployment.ask((10, 10))
    assert wanted == 3
    for _ in range(3):
        assert deployment.ask((7, 0), (7, 0), (6, 0)) == wanted


def test_what_runs_at_once_may_be_more_than_was_seen() -> None:
    deployment = Deployment(slots=100)
    assert deployment.ask((10, 10)) == 3
    assert deployment.ask((40, 0), (0, 0), (0, 0)) == 2
    assert deployment.ask((40, 20), (40, 20)) == 4


@pytest.mark.parametrize("known", [False, True])
def test_where_nothing_is_known_the_number_stays(known: bool) -> None:
    deployment = Deployment(slots=0, target=3)
    assert deployment.ask((0, 0), (0, 0), known=known) == 3
