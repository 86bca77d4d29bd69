from __future__ import annotations

import pytest

from jaxserve.weights.kv_scales import parse_kv_scale_name
from jaxserve.weights.open import is_ignored


@pytest.mark.parametrize(
    ("name", "scaled"),
    [
        ("k_scale", "k"),
        ("v_scale", "v"),
        ("attn.k_scale", "k"),
        ("kv_scale", "kv"),
        ("k_proj.k_scale", "k"),
        ("v_proj.v_scale", "v"),
        ("k_proj.output_scale", "k"),
        ("v_proj.output_scale", "v"),
        ("q_scale", "q"),
        ("q_proj.output_scale", "q"),
        ("prob_output_scale", "prob"),
    ],
)
def test_names_of_scales(name: str, scaled: str) -> None:
    name = f"model.layers.12.self_attn.{name}"
    assert parse_kv_scale_name(name) == (12, scaled)
    assert is_ignored(name)


@pytest.mark.parametrize(
    "name",
    ["self_attn.k_proj.weight_scale", "self_attn.k_proj.v_scale", "self_attn.k_proj.input_scale", "mlp.k_scale",
     "self_attn.o_proj.output_scale", "self_attn.k_scales"],
)  # fmt: skip
def test_other_names(name: str) -> None:
    assert parse_kv_scale_name(f"model.layers.0.{name}") is None
    assert not is_ignored(f"model.layers.0.{name}")
