"""Compares vectors, scores and labels with those of transformers and sentence-transformers, from fixtures made by
scripts/make_pooled.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.models.pooled import FOLDERS, SETTINGS, cases, pooled_source, served, vectors


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("name", FOLDERS)
def test_vectors_equal_those_of_transformers(name: str, shards: int) -> None:
    source = pooled_source(name)
    found = served(source, **SETTINGS.get(name, {}))
    own = cases(name)
    for case, vector in zip(own, vectors(source, found, [case.ids for case in own], shards), strict=True):
        np.testing.assert_allclose(vector, case.vector, atol=1e-4, rtol=0)
