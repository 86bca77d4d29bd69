from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np

from jaxserve.weights import dummy_params
from tests.weights.conftest import on_one_device, spec


def made(abstract: Any, seed: int = 0) -> Any:
    return jax.tree.map(np.asarray, dummy_params(abstract, on_one_device(abstract), seed))


def test_each_parameter_is_filled_as_its_spec_says() -> None:
    abstract = {
        "w": spec(300, 200, scale=0.5, dtype=ml_dtypes.bfloat16),
        "norm": spec(40, init="ones"),
        "bias": spec(40, init="zeros"),
        "none": None,
    }
    params = made(abstract)
    assert params["w"].dtype == ml_dtypes.bfloat16
    assert abs(params["w"].astype(np.float32).std() - 0.5) < 0.01
    assert abs(params["w"].astype(np.float32).mean()) < 0.01
    assert (params["norm"] == 1).all()
    assert (params["bias"] == 0).all()
    assert params["none"] is None


def test_a_parameter_depends_on_the_seed_and_its_path_alone() -> None:
    few = made({"layers": (spec(50, 30), spec(50, 30))}, seed=3)
    many = made({"a": spec(7), "layers": (spec(50, 30), spec(50, 30), spec(9)), "z": spec(2, scale=3.0)}, seed=3)
    for i in range(2):
        np.testing.assert_array_equal(few["layers"][i], many["layers"][i])
    assert (few["layers"][0] != few["layers"][1]).any()
    assert (made({"layers": (spec(50, 30),)}, seed=4)["layers"][0] != few["layers"][0]).any()
    assert np.isfinite(made({"w": spec(4)}, seed=-1)["w"]).all()


def test_rows_of_a_large_parameter_differ() -> None:
    """The parameter is longer than the block of random numbers that it is made from."""
    table = made({"w": spec(5000, 1024)})["w"]
    assert len(np.unique(table[:, :4], axis=0)) == 5000
    assert abs(table.std() - 0.02) < 0.001
