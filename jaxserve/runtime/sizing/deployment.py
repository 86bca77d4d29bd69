"""From a configuration and a model to the deployment they make on a device: the one place where sizes, specs and
programs are decided, for the worker that runs it, and for `compile` and `plan`, which only look ahead.

It needs shapes alone: no weights, no arrays, and no device before `builder`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import msgspec
import numpy as np
from jax.sharding import Mesh

from jaxserve import model_source
from jaxserve.config.data_parallel import ranks_and_replicas
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.models.config import ModelConfig, parse_model_config
from jaxserve.models.registry import family
from jaxserve.quant import Packing, Stored, choose, pack
from jaxserve.runtime.devices.device import DeviceFacts
from jaxserve.runtime.devices.mesh import DATA_AXIS, TENSOR_AXIS, device_bytes
from jaxserve.runtime.programs.builder import (
    READ_KEY,
    UPDATE_KEY,
    WRITE_KEY,
    ProgramBuilder,
    dtype_of,
    kv_dtype_of,
    program_keys,
)
from jaxserve.runtime.programs.program_set import Key
from jaxserve.runtime.sizing import determinism
from jaxserve.runtime.sizing.mesh_validation import check_mesh
from jaxserve.runtime.sizing.sizes import Sizes, attention_problem, resolve_sizes
from jaxserve.runtime.step.batch import ProgramKey
from jaxserve.runtime.step.state import DeviceState, pool_layout, state_specs
from jaxserve.runtime.step.step import StepContext
from jaxserve.step_plan import Capacity
from jaxserve.weights import stored_types
from pallas_kernels.paged_attention import Backend, choose_backend

# Rows whose logits exist at once; a GPU and a TPU take them all.
_CPU_SAMPLE_ROWS = 16


@dataclasses.dataclass(frozen=True)
class Deployment:
    """A model in a configuration on `data * tensor` devices of one kind. `params` and `state` are trees of specs over
    all of them; `model` is laid out for the tensor axis. There are `replicas` of it, in processes of their own.

    `stored` are the types of its checkpoint's tensors where these may be quantized, and `packing` what comes of them.
    `indeterminate` says why a request may give other bits in other company; it is empty where it doesn't.
    """

    config: EngineConfig
    model: ModelConfig
    device: DeviceFacts
    dtype: np.dtype
    backend: Backend
    sizes: Sizes
    params: Any
    state: DeviceState
    tensor: int
    data: int = 1
    replicas: int = 1
    stored: Stored = dataclasses.field(default_factory=dict)
    packing: Packing = dataclasses.field(default_factory=Packing)
    indeterminate: str = ""

    @property
    def num_devices(self) -> int:
        """Devices of its mesh."""
        return self.data * self.tensor

    @property
    def dense_bytes(self) -> int:
        """What weights would take of a device with none of them packed."""
        return device_bytes(family(self.model).abstract(self.model, self.dtype), {TENSOR_AXIS: self.tensor})

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks, of all replicas."""
        return self.data * self.replicas

    @property
    def capacity(self) -> Capacity:
        """What the programs hold."""
        return self.sizes.capacity

    @property
    def keys(self) -> list[ProgramKey]:
        """Its step programs."""
        return program_keys(self.capacity)

    @property
    def all_keys(self) -> list[Key]:
        """All of its programs."""
        copies = [READ_KEY, WRITE_KEY] if self.config.enable_hierarchical_cache else []
        return [UPDATE_KEY, *copies, *self.keys]

    def builder(self, mesh: Mesh) -> ProgramBuilder:
        """What compiles its programs for a mesh of its devices, attached or not."""
        sample_rows = _CPU_SAMPLE_ROWS if self.device.platform == "cpu" else None
        context = StepContext(self.model, self.backend, sample_rows)
        return ProgramBuilder(context, self.capacity, mesh, self.params, self.state, self.config.nnodes)


def read_model(model: str) -> ModelConfig:
    """The model's config from whatever `--model` names; a config.json is enough. Raises `ConfigError`."""
    return parse_model_config(model_source.config_of(model), f"config of {model}")


def read_stored(config: EngineConfig) -> Stored:
    """The types of the tensors of what `--model` names, where they may be quantized. Raises `ConfigError`."""
    source = model_source.gguf_of(config.model)
    return {} if source is None else stored_types(source, config.load_format)


def deploy(
    config: EngineConfig,
    model: ModelConfig,
    device: DeviceFacts,
    *,
    stored: Stored | None = None,
    activations: int | None = None,
) -> Deployment:
    """Decide everything. `stored` are the types of the checkpoint's tensors, where they may be quantized; `activations`
    the bytes that programs work in, estimated where they aren't known.

    Raises `ConfigError` for what can't be: `NoRoomError` where memory is too small.
    """
    check_mesh(config, model, device)
    data, replicas = ranks_and_replicas(config)
    dtype, tensor = dtype_of(config.dtype), config.tp_size
    kv_dtype = kv_dtype_of(config.kv_cache_dtype, dtype)
    model = dataclasses.replace(model, shards=tensor)
    axes = {DATA_AXIS: data, TENSOR_AXIS: tensor}
    stored = stored or {}
    params = family(model).abstract(model, dtype)
    packing = choose(
        config.quantization,
        params,
        family(model).placements(model),
        stored,
        platform=device.platform,
        dtype=dtype,
        tensor=tensor,
    )
    params = pack(params, packing.bits)
    weight_bytes = device_bytes(params, axes)
    try:
        problem = attention_problem(config, model, dtype=dtype, kv_dtype=kv_dtype, tensor=tensor)
        backend = choose_backend(device.kernels, problem, config.attention_backend)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    indeterminate = determinism.obstacle(device.platform, backend, packing, dtype.name)
    if config.enable_deterministic_inference and indeterminate:
        raise ConfigError(f"enable_deterministic_inference: {indeterminate}")
    [spec] = family(model).kv_specs(model)
    one = Capacity(
        num_slots=1,
        num_pages=1,
        page_size=config.page_size,
        max_model_len=config.context_length or model.max_position_embeddings,
        decode_buckets=(1,),
        token_buckets=(1,),
        prompt_logprob_tokens=1,
        num_ranks=data,
    )
    vocab_size = model.padded_vocab_size
    slot = state_specs(spec, one, vocab_size=vocab_size, kv_dtype=kv_dtype, platform=backend.kv_platform)
    page_bytes = device_bytes(slot.kv, axes)
    sized = functools.partial(
        resolve_sizes,
        model=model,
        device=device,
        weight_bytes=weight_bytes,
        slot_bytes=device_bytes(slot, axes) - page_bytes,
        bytes_per_token=page_bytes // config.page_size,
        activations=activations,
        tensor=tensor,
        data=data,
        replicas=replicas,
    )
    sizes = sized(config)
    layout = pool_layout(
        spec,
        num_pages=sizes.capacity.num_pages,
        page_size=config.page_size,
        dtype=kv_dtype,
        platform=backend.kv_platform,
    )
    reached = backend.addressable_pages(layout, tensor) * config.page_size
    if reached < layout.num_pages * config.page_size:
        if config.max_total_tokens is not None:
            raise ConfigError(
                f"max_total_tokens={config.max_total_tokens}: attention backend {backend.name} reaches {reached} "
                "tokens of an fp8 KV cache whose keys take 2 to 4 GiB; give it as many, or choose another "
                "--attention-backend"
            )
        sizes = sized(msgspec.structs.replace(config, max_total_tokens=reached))
    state = state_specs(spec, sizes.capacity, vocab_size=vocab_size, kv_dtype=kv_dtype, platform=backend.kv_platform)
    return Deployment(
        config,
        model,
        device,
        dtype,
        backend,
        sizes,
        params,
        state,
        tensor,
        data,
        replicas,
        stored,
        packing,
        indeterminate,
    )
