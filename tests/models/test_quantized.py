"""Models of quantized checkpoints compute the logits of the dequantized model, in every format and form."""

from __future__ import annotations

import numpy as np
import pytest

from tests.models.golden import golden_logits
from tests.models.quantized import Form, held_logits
from tests.selection import grid
from tests.weights.quantized.fixtures import MODELS

# The differences of bfloat16, and of inputs in 8 bits; a wrong scale, order or zero makes differences of several units
ROUNDING, QUANTIZED_INPUTS = 0.06, 0.2
FORMS: tuple[Form, ...] = ("packed", "rows")
QUICK = ("awq", "gptq_act_order", "compressed_w8a8_int8", "fp8_blocks", "gptq_own_orders", "gpt_oss_mxfp4")
GGUF = "gguf:quantized/gpt_oss_mxfp4"
QUICK_STORED = (*(f"quantized/{name}" for name in QUICK), GGUF)


@pytest.mark.slow
@pytest.mark.parametrize("name", grid(MODELS, QUICK.__contains__))
def test_dequantized_weights_give_the_logits_of_the_packer(name: str) -> None:
    for logits, expected in golden_logits(f"quantized/{name}", shards=1):
        np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["packed", "rows"])
@pytest.mark.parametrize("name", grid([*(f"quantized/{name}" for name in MODELS), GGUF], QUICK_STORED.__contains__))
def test_weights_are_multiplied_as_they_are_stored(name: str, form: Form) -> None:
    made, logits, expected = held_logits(name, form)
    assert len(made.quantized) >= 2
    inputs = any(scheme.activations for scheme in made.quantized.values())
    error = np.sqrt(((logits - expected) ** 2).mean()) / expected.std()
    assert error < (QUANTIZED_INPUTS if inputs else ROUNDING), error


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "most"), [("int8", 0.06), ("int4", 0.4), ("fp8", 0.2)])
def test_16_bit_weights_are_quantized_on_the_fly(setting: str, most: float) -> None:
    """Both forms are made from the same numbers; by how much they differ from 16 bits is the price of the scheme."""
    (made, packed, expected), (_, rows, _) = (held_logits("llama3", form, setting=setting) for form in FORMS)
    assert made.on_the_fly
    assert np.sqrt(((packed - rows) ** 2).mean()) < 0.03 * expected.std()
    assert np.sqrt(((packed - expected) ** 2).mean()) < most * expected.std()


@pytest.mark.slow
def test_parts_of_kv_b_proj_are_packed_by_head() -> None:
    made, logits, expected = held_logits("glm4_moe_lite", "packed")
    assert {("layers", 0, "attention", name) for name in ("query", "key_up", "value_up", "output")} <= made.forms.keys()
    assert np.sqrt(((logits - expected) ** 2).mean()) < ROUNDING * expected.std()
