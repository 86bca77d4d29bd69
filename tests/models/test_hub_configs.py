"""The real config.json files of each family give a model of the right size, which `plan` computes with."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxserve.models.layout import LaidOutModel
from jaxserve.models.registry import abstract_params, parse_model_config
from jaxserve.weights.arrays import flatten
from tests.models.hub_configs import HUB
from tests.models.hub_encoders import HUB_ENCODERS
from tests.models.hub_hybrids import HYBRIDS
from tests.models.hub_mixtures import MIXTURES

ALL = HUB | HUB_ENCODERS | HYBRIDS | MIXTURES


@pytest.mark.parametrize("name", ALL)
def test_a_model_of_the_hub_has_its_number_of_parameters(name: str) -> None:
    raw, billions = ALL[name]
    config = parse_model_config(raw)
    leaves, _ = flatten(abstract_params(LaidOutModel(config), np.dtype(np.float32)))
    assert sum(math.prod(spec.stored_shape) for _, spec in leaves) / 1e9 == pytest.approx(billions, rel=0.005)
