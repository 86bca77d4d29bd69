"""Every head says which of its rows are needed, so that a CPU leaves the others out."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.layers import embedding
from jaxserve.models import registry
from jaxserve.models.draft_heads import eagle, mtp

HEADS = {module.head for module in registry._FAMILIES.values() if hasattr(module, "head")}
MODEL: Any = SimpleNamespace(config=SimpleNamespace(logit_cap=30.0, logit_scale=0.5, logits_scaling=2.0))
TABLE = jnp.zeros((16, 8))
PARAMS: Any = SimpleNamespace(head=TABLE, output=TABLE, norm=None, d2t=None)


def _of_model(features: Any, num_rows: Any) -> Any:
    return embedding.logits(features, TABLE, num_rows)


@pytest.mark.parametrize(
    "head",
    [
        *sorted(HEADS, key=lambda head: head.__module__),
        lambda model, params, x, num_rows: eagle.logits(model, params, x, _of_model, num_rows),
        lambda model, params, x, num_rows: mtp.logits(model, params, x, _of_model, num_rows),
    ],
)
def test_a_head_passes_the_number_of_rows_on(head: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def linear(x: Any, table: Any, *, out_dtype: Any, num_rows: Any) -> Any:
        asked.append(num_rows)
        return jnp.zeros((len(x), len(table)), out_dtype)

    monkeypatch.setattr(embedding, "linear", linear)
    jax.eval_shape(functools.partial(head, MODEL, PARAMS), jnp.zeros((4, 8)), jnp.int32(1))
    assert len(asked) == 1
    assert asked[0] is not None
