from __future__ import annotations

import random

import pytest

from jaxserve.bench.sweep.pareto import pareto_front


@pytest.mark.parametrize(
    ("points", "front"),
    [
        ([], []),
        ([(1, 1)], [0]),
        ([(1, 10), (2, 20), (3, 15)], [0, 1]),
        ([(3, 30), (1, 10), (2, 10)], [1, 0]),
        ([(1, 10), (1, 20)], [1]),
        ([(1, 10), (1, 10)], [0, 1]),
    ],
)
def test_known_fronts(points: list[tuple[float, float]], front: list[int]) -> None:
    assert pareto_front([x for x, _ in points], [y for _, y in points]) == front


def test_the_front_holds_the_undominated_points() -> None:
    rng = random.Random(0)
    for _ in range(100):
        points = [(rng.randrange(8), rng.randrange(8)) for _ in range(12)]
        beaten = {
            i for i, (x, y) in enumerate(points) if any(a <= x and b >= y and (a, b) != (x, y) for a, b in points)
        }
        found = pareto_front([x for x, _ in points], [y for _, y in points])
        assert set(found) == set(range(12)) - beaten
        assert [points[i][0] for i in found] == sorted(points[i][0] for i in found)
