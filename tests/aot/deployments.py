"""Deployments to compile: a model's shape on a target, with a pool about as large as the device would hold."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxserve.config.schema import EngineConfig
from jaxserve.models.config import parse_model_config
from jaxserve.models.registry import family
from jaxserve.runtime.mesh import shape_structs
from jaxserve.runtime.programs import ProgramBuilder, dtype_of
from jaxserve.runtime.sizes import attention_problem
from jaxserve.runtime.state import pool_layout, state_specs
from jaxserve.runtime.step import StepContext
from jaxserve.runtime.topology import target_mesh
from jaxserve.step_plan import Capacity
from pallas_kernels.paged_attention import choose_backend, target_of

LLAMA_8B_TWO_LAYERS = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}

SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}

DECODE_ROWS = 64
MIXED_TOKENS = 2048


@dataclasses.dataclass(frozen=True)
class Device:
    """How a target is used: by the profiles in configs/, and with room for the weights of two layers."""

    pool_bytes: int
    page_size: int


DEVICES = {"nvidia-h200": Device(96 * 2**30, 16), "tpu-v6e": Device(16 * 2**30, 32)}


def deployment(target: str, config: dict[str, Any], *, tensor: int, attention: str = "auto") -> ProgramBuilder:
    """What `build_engine` would make on that device, in bfloat16."""
    mesh = target_mesh(target, tensor=tensor)
    model = parse_model_config(config)
    dtype, device = dtype_of("auto"), DEVICES[target]
    [spec] = family(model).kv_specs(model)
    page = pool_layout(spec, num_pages=1, page_size=device.page_size, dtype=dtype)
    capacity = Capacity(
        num_slots=256,
        num_pages=device.pool_bytes // page.nbytes,
        page_size=device.page_size,
        max_model_len=8192,
        decode_buckets=(DECODE_ROWS, 256),
        token_buckets=(MIXED_TOKENS,),
        prompt_logprob_tokens=512,
    )
    sizes = EngineConfig(page_size=device.page_size)
    problem = attention_problem(sizes, model, dtype=dtype, tensor=tensor)
    backend = choose_backend(target_of(mesh.devices.flat[0]), problem, attention)
    context = StepContext(model, backend, sample_rows=None)
    state = state_specs(spec, capacity, vocab_size=model.vocab_size, dtype=dtype)
    return ProgramBuilder(context, capacity, mesh, family(model).abstract(model, dtype), state)


def device_bytes(builder: ProgramBuilder, specs: Any) -> int:
    """Bytes of one device's shards of a tree of specs."""
    structs = jax.tree.leaves(shape_structs(builder.mesh, specs))
    return sum(int(np.prod(s.sharding.shard_shape(s.shape))) * s.dtype.itemsize for s in structs)
