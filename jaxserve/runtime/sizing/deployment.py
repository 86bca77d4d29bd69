"""Decides the sizes, the array specs and the programs of a configuration and a model on a kind of device.

The worker runs the deployment that this module returns; `jaxserve compile` and `jaxserve plan` examine the same one
ahead of time. It works on shapes: it needs no weights and no arrays, and no device before `Deployment.builder`.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from jax.sharding import Mesh

from jaxserve import model_source
from jaxserve.config.data_parallel import Parallelism, parallelism
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.models.config import ModelConfig
from jaxserve.models.dtypes import dtype_of, kv_dtype_of
from jaxserve.models.registry import family, parse_model_config
from jaxserve.params import KVSpec
from jaxserve.quant import Shards, Stored, WeightChoice, choose_weights, hold_weights, method_of, stored_by_config
from jaxserve.runtime.devices.device import DeviceFacts
from jaxserve.runtime.devices.mesh import axis_sizes, device_bytes
from jaxserve.runtime.programs.builder import (
    ADJUST_KEY,
    KV_SCALES_KEY,
    READ_PROMPTS_KEY,
    UPDATE_KEY,
    ProgramBuilder,
    read_key,
    step_keys,
    write_key,
)
from jaxserve.runtime.programs.program_set import ProgramKey
from jaxserve.runtime.sizing import determinism
from jaxserve.runtime.sizing.drafting import Drafting, plan_drafting
from jaxserve.runtime.sizing.mesh_validation import check_mesh
from jaxserve.runtime.sizing.sizes import Sizes, attention_problem, resolve_sizes
from jaxserve.runtime.step.batch import StepKey
from jaxserve.runtime.step.draft import draft_keys
from jaxserve.runtime.step.draw import draw_keys
from jaxserve.runtime.step.state import DeviceState, expert_tokens_spec, pool_layout, state_specs
from jaxserve.runtime.step.step import StepContext
from jaxserve.step_plan import Capacity, WindowGroup
from jaxserve.weights import stored_types
from pallas_kernels.paged_attention import Backend, addressable_pages, choose_backend, kv_platform

# Rows whose logits exist at once on a CPU; a GPU and a TPU compute those of all rows at once.
_CPU_SAMPLE_ROWS = 32


@dataclasses.dataclass(frozen=True)
class Deployment:
    """A model in a configuration on some devices of one kind, among which it is `divided`.

    `params` and `state` are trees of specs over all of them; `model` is laid out for the shards of a rank. `stored`
    tells how the checkpoint stores its tensors if they may be quantized, `weights` how those of linear layers are held.
    `nondeterminism` is the reason why the bits of a request depend on the batch, or empty if they don't. `drafting`
    says how it drafts, None without speculation.
    """

    config: EngineConfig
    model: ModelConfig
    device: DeviceFacts
    dtype: np.dtype
    backend: Backend
    sizes: Sizes
    params: Any
    state: DeviceState
    divided: Parallelism
    stored: Stored = dataclasses.field(default_factory=dict)
    weights: WeightChoice = dataclasses.field(default_factory=WeightChoice)
    nondeterminism: str = ""
    drafting: Drafting | None = None

    @property
    def tensor(self) -> int:
        """The number of shards of a rank."""
        return self.divided.tensor

    @property
    def data(self) -> int:
        """The number of data-parallel ranks."""
        return self.divided.data

    @property
    def replicas(self) -> int:
        """How many such deployments there are, each in a process of its own."""
        return self.divided.replicas

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """The sizes of its mesh, as `make_mesh` takes them."""
        return {"data": self.data, "tensor": self.tensor, "expert": self.divided.expert}

    @property
    def axis_sizes(self) -> dict[str, int]:
        """The sizes of the axes of its mesh."""
        return axis_sizes(**self.mesh_sizes)

    @property
    def num_devices(self) -> int:
        """The number of devices of its mesh."""
        return self.data * self.tensor

    @property
    def dense_bytes(self) -> int:
        """Bytes that the weights would take on a device if none were quantized."""
        own = family(self.model).abstract(self.model, self.dtype)
        return device_bytes((own, None if self.drafting is None else self.drafting.dense), self.axis_sizes)

    @property
    def num_ranks(self) -> int:
        """The number of data-parallel ranks of all replicas."""
        return self.data * self.replicas

    @property
    def capacity(self) -> Capacity:
        """The sizes that the programs can hold."""
        return self.sizes.capacity

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        """The KV groups of the model."""
        return self.model.kv_specs()

    @property
    def step_keys(self) -> list[StepKey]:
        """The keys of its step programs.

        On a CPU, a greedy decode that looks up drafts takes longer than one with the sampler, which runs instead.
        """
        keys = step_keys(self.capacity)
        if self.drafting is None or self.device.platform != "cpu":
            return keys
        return [key for key in keys if not key.greedy]

    @property
    def program_keys(self) -> list[ProgramKey]:
        """The keys of all its programs."""
        groups = range(len(self.state.kv)) if self.config.enable_hierarchical_cache else ()
        copies = [key for group in groups for key in (read_key(group), write_key(group))]
        scales = [KV_SCALES_KEY] if self.config.calculate_kv_scales else []
        prompts = [READ_PROMPTS_KEY] if self.drafting is not None else []
        others: list[ProgramKey] = [*draw_keys(self.capacity), *draft_keys(self.capacity)]
        return [UPDATE_KEY, ADJUST_KEY, *prompts, *scales, *copies, *others, *self.step_keys]

    @property
    def all_params(self) -> Any:
        """The weights that programs take: the model's, or a pair of these and a draft model's."""
        if self.drafting is None or self.drafting.model is None:
            return self.params
        return self.params, self.drafting.params

    def builder(self, mesh: Mesh) -> ProgramBuilder:
        """Return the builder of its programs for a mesh of its devices, which need not be attached."""
        sample_rows = _CPU_SAMPLE_ROWS if self.device.platform == "cpu" else None
        drafter = None if self.drafting is None else self.drafting.drafter
        context = StepContext(self.model, self.backend, sample_rows, drafter)
        return ProgramBuilder(context, self.capacity, mesh, self.all_params, self.state, self.config.nnodes)


def read_model(model: str) -> ModelConfig:
    """Read the config of the model that `--model` names, which may be just a config.json. Raises `ConfigError`."""
    return parse_model_config(model_source.fetch_config(model), f"config of {model}")


def read_stored(config: EngineConfig, model: ModelConfig) -> Stored:
    """Read how the weights are stored in the files that `--model` names, if they are on this machine.

    Returns {} if there are none, or none is quantized. Raises `ConfigError`.
    """
    source = model_source.resolve_local(config.model)
    return {} if source is None else stored_types(source, model, config.load_format)


def deploy(
    config: EngineConfig,
    model: ModelConfig,
    device: DeviceFacts,
    *,
    stored: Stored | None = None,
    activations: int | None = None,
) -> Deployment:
    """Return the deployment of a model on a device.

    `stored` are the types of the checkpoint's tensors if they may be quantized. `activations` is the working memory of
    the programs in bytes, if it is known; else it is estimated. Raises `ConfigError` for settings that can't be met,
    `InsufficientMemoryError` if memory is too small.
    """
    check_mesh(config, model, device)
    divided = parallelism(config)
    data, tensor = divided.data, divided.tensor
    dtype = dtype_of(config.dtype)
    kv_dtype = kv_dtype_of(config.kv_cache_dtype, dtype)
    context = config.context_length or model.max_position_embeddings
    # A window as long as the context masks nothing.
    whole_from = 0 if config.disable_hybrid_swa_memory else context
    model = dataclasses.replace(
        model.with_context(context),
        shards=tensor,
        whole_from=whole_from,
        experts_over_ranks=divided.over_ranks,
        ragged_exchange=divided.over_ranks and _sends_ragged(config, model, device, divided.expert_parts),
    )
    specs = model.kv_specs()
    if config.disable_hybrid_swa_memory and len(specs) > 1:
        heads = ", ".join(f"{spec.num_kv_heads} of size {spec.head_dim}" for spec in specs)
        raise ConfigError(
            f"disable_hybrid_swa_memory: the layers of this model can't share one KV cache, as their KV heads differ: "
            f"{heads}; leave it out"
        )
    _check_ratio(config, specs, context)
    axes = axis_sizes(data=data, tensor=tensor, expert=divided.expert)
    params = family(model).abstract(model, dtype)
    stored = stored or stored_by_config(model.quantization, params)
    shards = Shards(tensor, tensor // divided.expert)
    drafting = plan_drafting(config, model, context, dtype, device.kernels, shards, stored)
    draft_model = None if drafting is None else drafting.model
    if draft_model is not None:
        model = dataclasses.replace(model, taps=draft_model.taps)
    weights = choose_weights(
        config.quantization,
        params,
        stored,
        method_of(model.quantization, stored),
        target=device.kernels,
        dtype=dtype,
        shards=shards,
        splits_into=model.splits_into,
    )
    params = hold_weights(params, weights.forms)
    weight_bytes = device_bytes(params, axes)
    if drafting is not None and draft_model is not None:
        weight_bytes += device_bytes(drafting.params, axes)
    try:
        problems = [
            attention_problem(config, one, spec, dtype=dtype, kv_dtype=kv_dtype, tensor=tensor)
            for one in (model, draft_model)
            if one is not None
            for spec in one.kv_specs()
            if spec.num_layers
        ]
        backend = choose_backend(device.kernels, problems, config.attention_backend)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    nondeterminism = determinism.why_nondeterministic(device.platform, backend, weights, dtype.name, tensor)
    if config.enable_deterministic_inference and nondeterminism:
        raise ConfigError(f"enable_deterministic_inference: {nondeterminism}")
    one = Capacity(
        num_slots=1,
        num_pages=1,
        page_size=config.page_size,
        max_model_len=context,
        decode_buckets=(1,),
        token_buckets=(1,),
        prompt_logprob_tokens=1,
        num_ranks=data,
        window_groups=tuple(WindowGroup(1, spec.window) for spec in specs if spec.window is not None),
    )
    vocab_size = model.padded_vocab_size
    describe = functools.partial(
        state_specs,
        vocab_size=vocab_size,
        hidden_size=model.hidden_size,
        kv_dtype=kv_dtype,
        dtype=dtype,
        platform=kv_platform(backend),
        expert_tokens=expert_tokens_spec(
            len(model.mixture_layers), model.num_experts, ranks=data, over_ranks=model.experts_over_ranks
        ),
        drafter=None if drafting is None else drafting.drafter,
    )
    slot = describe(specs, one)
    page_bytes = [device_bytes(pool.pools, axes) for pool in slot.kv]
    slot_bytes = device_bytes(slot, axes) - device_bytes(slot.kv, axes)
    if slot.drafts is not None and slot.drafts.kv is not None:
        page_bytes[0] += device_bytes((slot.drafts.kv.pools, slot.drafts.features), axes)
        slot_bytes -= device_bytes((slot.drafts.kv, slot.drafts.features), axes)
    sized = functools.partial(
        resolve_sizes,
        model=model,
        device=device,
        weight_bytes=weight_bytes,
        slot_bytes=slot_bytes,
        bytes_per_token=tuple(size // config.page_size for size in page_bytes),
        activations=activations,
        divided=divided,
    )
    sizes = sized(config)
    most_pages = _addressable_pages(backend, specs, sizes.capacity, kv_dtype, tensor)
    if any(map(operator.lt, most_pages, sizes.capacity.pages_by_group)):
        if config.max_total_tokens is not None:
            fitting = sized(msgspec.structs.replace(config, max_total_tokens=None), most_pages=most_pages).capacity
            addressable = fitting.num_pages * config.page_size
            raise ConfigError(
                f"max_total_tokens={config.max_total_tokens}: attention backend {backend.name} can address only "
                f"{addressable} tokens of an fp8 KV cache whose keys take 2 to 4 GiB; set --max-total-tokens "
                f"{addressable}, or choose another --attention-backend"
            )
        sizes = sized(config, most_pages=most_pages)
    state = describe(specs, sizes.capacity)
    return Deployment(
        config,
        model,
        device,
        dtype,
        backend,
        sizes,
        params,
        state,
        divided,
        stored,
        weights,
        nondeterminism,
        drafting,
    )


def _sends_ragged(config: EngineConfig, model: ModelConfig, device: DeviceFacts, parts: int) -> bool:
    """Return whether prefill sends tokens only to devices with their experts."""
    if config.all2all_backend != "auto":
        return config.all2all_backend == "ragged_all_to_all"
    # XLA's reached 2 % of the bandwidth between 8 B200 (openxla/xla#33386)
    share = 1 - (1 - 1 / parts) ** model.experts_per_token
    return device.platform == "tpu" and share <= 0.5


def _check_ratio(config: EngineConfig, specs: Sequence[KVSpec], context: int) -> None:
    """Raise `ConfigError` for `--swa-full-tokens-ratio` if all layers share one KV group."""
    if config.swa_full_tokens_ratio is not None and len(specs) == 1:
        raise ConfigError(
            f"swa_full_tokens_ratio={config.swa_full_tokens_ratio:g}: no layer of this model has a sliding window "
            f"shorter than the context of {context} tokens, so all share one KV cache; leave it out"
        )


def _addressable_pages(
    backend: Backend, specs: Sequence[KVSpec], capacity: Capacity, kv_dtype: np.dtype, tensor: int
) -> list[int]:
    """Return how many pages of each KV group, of those planned, the kernels can address."""
    found = []
    for spec, pages in zip(specs, capacity.pages_by_group, strict=True):
        layout = pool_layout(
            spec, num_pages=pages, page_size=capacity.page_size, dtype=kv_dtype, platform=kv_platform(backend)
        )
        found.append(addressable_pages(backend, layout, tensor) if spec.num_layers else pages)
    return found
