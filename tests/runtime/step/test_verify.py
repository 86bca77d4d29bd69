"""Which drafts are accepted."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.runtime.step.state import Drafts
from jaxserve.runtime.step.verify import accept

DRAFT = [11, 12, 13]


@pytest.mark.parametrize(
    ("drawn", "queries", "drafted", "proposed", "accepted", "count"),
    [
        ([11, 12, 13, 14], 4, 3, 3, 3, 4),
        ([11, 12, 9, 14], 4, 3, 3, 2, 3),
        ([9, 12, 13, 14], 4, 3, 3, 0, 1),
        # What comes after a rejected token doesn't count.
        ([11, 9, 13, 14], 4, 3, 3, 1, 2),
        # Fewer were drafted than the row has tokens, or fewer verified than drafted.
        ([11, 12, 13, 14], 4, 2, 2, 2, 3),
        ([11, 12, 13, 14], 3, 3, 2, 2, 3),
        ([11, 12, 13, 14], 4, 0, 0, 0, 1),
        # A decode accepts nothing, but shows whether its first draft token was right.
        ([11, 0, 0, 0], 1, 3, 1, 1, 1),
        ([9, 0, 0, 0], 1, 3, 1, 0, 1),
        ([11, 0, 0, 0], 1, 0, 0, 0, 1),
    ],
)
def test_accepted_as_far_as_the_same_was_drawn(
    drawn: list[int], queries: int, drafted: int, proposed: int, accepted: int, count: int
) -> None:
    def column(value: int) -> jnp.ndarray:
        return jnp.asarray([value, value], jnp.int32)

    tokens = jnp.asarray([[0, 0, 0], DRAFT], jnp.int32)
    drafts = Drafts(tokens, jnp.asarray([0, drafted], jnp.int32), None)  # type: ignore[arg-type]
    # The second row is padding: its slot is none.
    found = accept(
        drafts, jnp.asarray([drawn] * 2, jnp.int32), jnp.asarray([1, 2]), column(queries), column(20 + queries)
    )
    assert [int(x[0]) for x in (found.proposed, found.accepted, found.counts)] == [proposed, accepted, count]
    assert int(found.lengths[0]) == 20 + count
    np.testing.assert_array_equal(found.tokens[0], drawn)
