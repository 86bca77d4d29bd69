from __future__ import annotations

import itertools
import random

import pytest

from jaxserve.bench.tune.bucket_choice import best_buckets, choose_buckets, padding_share


@pytest.mark.parametrize(
    ("steps", "count", "best"),
    [
        ({8: 100}, 1, (8,)),
        ({1: 100, 8: 100}, 2, (1, 8)),
        # One program fewer than sizes: 3 goes with 4, as that pads one row a step, and 1 with 3 would pad two.
        ({1: 10, 3: 10, 4: 10, 8: 10}, 3, (1, 4, 8)),
        # The same sizes, but 1 is so rare that it may be padded.
        ({1: 1, 3: 10, 4: 10, 8: 10}, 3, (3, 4, 8)),
        ({2: 5}, 3, (2, 8)),
    ],
)
def test_known_optima(steps: dict[int, int], count: int, best: tuple[int, ...]) -> None:
    assert best_buckets(steps, 8, count) == best


def test_no_other_set_of_as_many_sizes_pads_less() -> None:
    rng = random.Random(0)
    for _ in range(60):
        largest = rng.randint(1, 9)
        steps = {size: rng.choice((0, 1, 5, 40)) for size in range(1, largest + 1)}
        for count in range(1, largest + 1):
            found = best_buckets(steps, largest, count)
            assert len(found) <= count
            assert found[-1] == largest
            others = (
                (*sizes, largest) for few in range(count) for sizes in itertools.combinations(range(1, largest), few)
            )
            least = min(padding_share(steps, other) for other in others)
            assert padding_share(steps, found) == pytest.approx(least)


def test_a_program_is_added_only_if_it_saves_enough() -> None:
    steps = {1: 1, 16: 1000}
    assert choose_buckets(steps, 16).buckets == (16,), "15 rows of 16,000 are nothing"
    assert choose_buckets(steps, 16, min_saving=0.0001).buckets == (1, 16)
    choice = choose_buckets({1: 500, 16: 500}, 32)
    assert choice.buckets == (1, 16, 32)
    assert choice.padding == 0.0
    assert choice.padding_with_one_fewer == pytest.approx(7500 / 16000)
    assert len(choose_buckets(dict.fromkeys(range(1, 257), 1), 256, max_programs=5, min_saving=0.0).buckets) == 5


def test_a_load_that_never_decoded_gets_one_program() -> None:
    assert choose_buckets({}, 8).buckets == (8,)
