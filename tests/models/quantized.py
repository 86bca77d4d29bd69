"""Computes the logits of the quantized fixtures with weights held as a deployment holds them."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.layout import LaidOutModel
from jaxserve.models.registry import abstract_params
from jaxserve.quant import Shards, WeightChoice, choose_weights, hold_weights, method_of
from jaxserve.runtime.devices.mesh import make_mesh, shardings
from jaxserve.weights import build_params, open_weights, stored_types
from pallas_kernels.quantized_matmul import Backend
from pallas_kernels.target import CPU, KernelTarget
from tests.models.forward import prompt_logits
from tests.models.golden import folder_of, golden_config, source_of

H200 = KernelTarget("cuda", "NVIDIA H200", (9, 0), cores=132)

Form = Literal["packed", "rows"]


def held_logits(
    name: str, form: Form, shards: int = 1, setting: str = "auto", dtype: Any = jnp.bfloat16, *, expert: int = 1
) -> tuple[WeightChoice, np.ndarray, np.ndarray]:
    """Return how weights are held, the logits of a prompt of a fixture, and the dequantized model's logits.

    `packed` is a CPU's layout, in bfloat16; `rows` is an H200's, multiplied by the reference. Devices
    are in `expert` groups, which have experts of their own.
    """
    folder = folder_of(name)
    config = golden_config(name)
    model = LaidOutModel(config, shards=shards)
    mesh, source = make_mesh(jax.devices("cpu"), tensor=shards, expert=expert), source_of(name)
    abstract = abstract_params(model, np.dtype(dtype))
    stored, bf16 = stored_types(source, config), np.dtype(jnp.bfloat16)
    method = method_of(config.quantization, stored)
    made, on_gpu = (
        choose_weights(
            setting, abstract, stored, method, target=target, dtype=bf16, shards=Shards(shards, shards // expert)
        )
        for target in (CPU, H200)
    )
    forms = made.forms
    if form == "rows":
        arrangements = {path: one.arrangement for path, one in on_gpu.forms.items()}
        forms = {
            path: dataclasses.replace(one, backend=Backend(), arrangement=arrangements.get(path, ()))
            for path, one in forms.items()
            if one.scheme
        }
    tree = hold_weights(abstract, forms)
    options: dict[str, Any] = {"quantization": config.quantization, "on_the_fly": made.on_the_fly}
    params = build_params(tree, shardings(mesh, tree), open_weights(source, tree, dense=abstract, **options))
    with np.load(folder / "golden.npz") as golden:
        ids, expected = golden["ids_2"].tolist(), golden["logits_2"]
    # Norms may be float32, so the type of keys and values, and of states, isn't that of the last norm
    return made, prompt_logits(model, params, ids, size=64, kv_dtype=dtype, mesh=mesh, abstract=tree), expected
