"""Decides the sizes, the array specs and the programs of a configuration and a model on a kind of device.

The worker runs the deployment that this module returns; `jaxserve compile` and `jaxserve plan` examine the same one
ahead of time. It works on shapes: it needs no weights and no arrays, and no device before `Deployment.builder`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxserve.config.data_parallel import Parallelism, parallelism
from jaxserve.config.model_files import local_model_files
from jaxserve.config.schema import EngineConfig
from jaxserve.config.served_checkpoint import fetch_served_checkpoint
from jaxserve.errors import ConfigError
from jaxserve.models.config import ModelConfig
from jaxserve.models.dtypes import dtype_of, kv_dtype_of
from jaxserve.models.layout import AnyModel, LaidOutModel
from jaxserve.models.registry import abstract_params, parse_model_config, stage_params
from jaxserve.params import KVSpec
from jaxserve.quant import Shards, Stored, WeightChoice, choose_weights, hold_weights, method_of, stored_by_config
from jaxserve.runtime.devices.device import DeviceFacts
from jaxserve.runtime.devices.mesh import axis_sizes, device_bytes
from jaxserve.runtime.programs.builder import ProgramBuilder
from jaxserve.runtime.programs.table import KINDS, program_keys
from jaxserve.runtime.programs.transfers import TransferBuilder, feedbacks, handoffs
from jaxserve.runtime.sizing import determinism
from jaxserve.runtime.sizing.drafting import Drafting, plan_drafting
from jaxserve.runtime.sizing.encoder_sizes import encoder_sizes
from jaxserve.runtime.sizing.fitted_sizes import fit_sizes
from jaxserve.runtime.sizing.memory import InsufficientMemoryError
from jaxserve.runtime.sizing.mesh_validation import check_mesh
from jaxserve.runtime.sizing.sizes import Sizes, attention_problem
from jaxserve.runtime.sizing.stages import divide_layers
from jaxserve.runtime.sizing.state_pool import delta_backend
from jaxserve.runtime.step.program import ProgramKey, StepContext
from jaxserve.runtime.step.state import DeviceState, state_specs
from jaxserve.step_plan import Capacity
from jaxserve.weights import stored_types
from pallas_kernels.packed_attention import PackedProblem, choose_packed_backend
from pallas_kernels.paged_attention import Backend, choose_backend, kv_platform

# Rows whose logits exist at once on a CPU; a GPU and a TPU compute those of all rows at once.
_CPU_SAMPLE_ROWS = 32


@dataclasses.dataclass(frozen=True)
class Deployment:
    """A model in a configuration on some devices of one kind, among which it is `divided`.

    `params` and `state` are trees of specs over all devices; `model` is laid out for the shards of a rank. `stored`
    tells how the checkpoint stores its tensors, if they may be quantized. `weights` tells how the weights of linear
    layers are held. `nondeterminism` is the reason why the bits of a request depend on the batch, or empty if they
    don't. `drafting` says how drafts are made, None without speculation.

    With several pipeline stages, `stages` are their deployments: each has the model, the parameters and the state of a
    stage, and all have the same capacity. The whole one has the sizes of the stage that has most to hold.
    """

    config: EngineConfig
    model: AnyModel
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
    stages: tuple[Deployment, ...] = ()

    @property
    def parts(self) -> tuple[Deployment, ...]:
        """The deployments of the stages, or this one if it has none."""
        return self.stages or (self,)

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
        """The sizes of its mesh, or of that of each stage, as `make_mesh` takes them."""
        return {"data": self.data, "tensor": self.tensor, "expert": self.divided.expert}

    @property
    def axis_sizes(self) -> dict[str, int]:
        """The sizes of the axes of its mesh."""
        return axis_sizes(**self.mesh_sizes)

    @property
    def num_devices(self) -> int:
        """The number of devices of its mesh, or of the meshes of all stages."""
        return self.divided.num_devices

    @property
    def dense_bytes(self) -> int:
        """Bytes that the weights would take on a device if none were quantized."""
        own = stage_params(abstract_params(self.model, self.dtype), self.model)
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
    def program_keys(self) -> list[ProgramKey]:
        """The keys of all its programs.

        On a CPU, a greedy decode program that looks up drafts is slower than the one with the sampler, so it is left
        out. So it is where nothing is drawn, on pipeline stages before the last one.
        """
        keys = program_keys(self.config, self.capacity)
        if not self.model.draws:
            return [key for key in keys if not (key.greedy or KINDS[key.kind].where_drawn)]
        if not self.capacity.max_drafts or self.device.platform != "cpu":
            return keys
        return [key for key in keys if not key.greedy]

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
        context = StepContext(self.model, self.backend, sample_rows, drafter, self.dtype)
        return ProgramBuilder(context, self.capacity, mesh, self.all_params, self.state, self.num_processes)

    def transfer_builders(self, meshes: Sequence[Mesh]) -> list[TransferBuilder]:
        """Return the builders of the transfers between its stages, which have these meshes: from each to the next one,
        last from the last one to the first."""
        shapes = [part.builder(mesh).shapes for part, mesh in zip(self.stages, meshes, strict=True)]
        several, keys = self.config.nnodes > 1, self.stages[-1].program_keys
        found = [handoffs(one, keys) for one in shapes[:-1]]
        found.append(feedbacks(shapes[-1], keys, results=several, gathered=self.num_processes > 1))
        targets = [*meshes[1:], meshes[0]]
        return [
            TransferBuilder(source, target, self.capacity, trees, self.config.nnodes)
            for source, target, trees in zip(meshes, targets, found, strict=True)
        ]

    @property
    def num_processes(self) -> int:
        """The number of processes that share its mesh, or that of each stage."""
        return max(1, self.config.nnodes // self.divided.stages)


def read_model(config: EngineConfig) -> ModelConfig:
    """Read the config of the model that a configuration serves; `model` may be just a config.json. Raises
    `ConfigError`."""
    served = fetch_served_checkpoint(config)
    return parse_model_config(served.raw, served.where, served.task)


def read_stored(config: EngineConfig, model: ModelConfig) -> Stored:
    """Read how the weights are stored in the files that `--model` names, if they are on this machine.

    Returns {} if there are none, or none is quantized. Raises `ConfigError`.
    """
    source = local_model_files(config)
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
    divided, dtype = parallelism(config), dtype_of(config.dtype)
    shards = Shards(divided.tensor, divided.tensor // divided.expert)
    untapped = _lay_out(config, model, device, divided)
    _check_kv_groups(config, untapped)
    dense = abstract_params(untapped, dtype)
    types = stored or stored_by_config(model.quantization, dense)
    drafting = plan_drafting(config, untapped, dtype, device.kernels, shards, types)
    laid_out = untapped if drafting is None else dataclasses.replace(untapped, taps=drafting.taps)
    weights = choose_weights(
        config.quantization,
        dense,
        types,
        method_of(model.quantization, types),
        target=device.kernels,
        dtype=dtype,
        shards=shards,
        splits_into=model.splits_into,
    )
    params = hold_weights(dense, weights.forms)
    kv_dtype = kv_dtype_of(config.kv_cache_dtype, dtype)
    backend = _choose_attention(config, laid_out, drafting, device, dtype, kv_dtype)
    nondeterminism = determinism.why_nondeterministic(
        device.platform,
        backend,
        delta_backend(laid_out, dtype, device.kernels),
        weights,
        dtype.name,
        divided.tensor,
    )
    if config.enable_deterministic_inference and nondeterminism:
        raise ConfigError(f"enable_deterministic_inference: {nondeterminism}")

    def deployment(
        model: AnyModel, most_pages: Sequence[int] | None = None, states: tuple[int, int] | None = None
    ) -> Deployment:
        own = stage_params(params, model, embeds=model.draws and drafting is not None and drafting.needs_embedding)
        drafts = drafting if model.draws else None
        describe = functools.partial(
            state_specs,
            model,
            kv_dtype=kv_dtype,
            dtype=dtype,
            platform=kv_platform(backend),
            drafter=None if drafts is None else drafts.drafter,
        )
        held = (own, None if drafts is None else drafts.params)
        if model.config.bidirectional:
            weight_bytes = device_bytes(held, axis_sizes())
            sizes = encoder_sizes(config, model, device, divided, weight_bytes=weight_bytes, activations=activations)
        else:
            sizes = fit_sizes(
                config
                if states is None
                else config.with_defaults(max_running_requests=states[0], max_mamba_cache_size=states[1]),
                model,
                device,
                divided,
                backend=backend,
                describe=describe,
                params=held,
                kv_dtype=kv_dtype,
                activations=activations,
                most_pages=most_pages,
            )
        return Deployment(
            config=config,
            model=model,
            device=device,
            dtype=dtype,
            backend=backend,
            sizes=sizes,
            params=own,
            state=describe(sizes.capacity),
            divided=divided,
            stored=types,
            weights=weights,
            nondeterminism=nondeterminism,
            drafting=drafts,
        )

    if divided.stages == 1:
        return deployment(laid_out)
    axes = axis_sizes(data=divided.data, tensor=divided.tensor, expert=divided.expert)
    stages = divide_layers(config, laid_out, params, axes, drafting=None if drafting is None else drafting.params)
    return _join_stages([dataclasses.replace(laid_out, stage=stage) for stage in stages], deployment, params, drafting)


def _join_stages(
    models: Sequence[AnyModel],
    deployment: Callable[[AnyModel, Sequence[int] | None, tuple[int, int] | None], Deployment],
    params: Any,
    drafting: Drafting | None,
) -> Deployment:
    """Return the deployment of all stages, with as many pages as the stage with the fewest has room for, and as many
    requests and states."""

    def fit(
        model: AnyModel, most_pages: Sequence[int] | None = None, states: tuple[int, int] | None = None
    ) -> Deployment:
        try:
            return deployment(model, most_pages, states)
        except InsufficientMemoryError as error:
            stage = model.stage
            assert stage is not None
            layers = f"layers {stage.first} to {stage.end - 1}"
            raise InsufficientMemoryError(f"stage {stage.index} of {stage.count}, with {layers}: {error}") from None

    alone = [fit(model) for model in models]
    states = None
    if alone[0].capacity.num_states:
        states = min((made.capacity.num_slots, made.capacity.num_states) for made in alone)
        alone = [fit(model, None, states) for model in models]
    fullest = min(alone, key=lambda one: one.capacity.num_pages)
    parts = [fit(model, fullest.capacity.pages_by_group, states) for model in models]
    bound = any(part.sizes.memory_bound for part in alone)
    parts = [dataclasses.replace(one, sizes=dataclasses.replace(one.sizes, memory_bound=bound)) for one in parts]
    assert all(part.capacity == parts[0].capacity for part in parts)
    return dataclasses.replace(
        parts[fullest.model.stage.index],  # type: ignore[union-attr]
        model=dataclasses.replace(fullest.model, stage=None),
        params=params,
        drafting=drafting,
        stages=tuple(parts),
    )


def _lay_out(config: EngineConfig, model: ModelConfig, device: DeviceFacts, divided: Parallelism) -> AnyModel:
    """Return the model laid out for the shards of a rank, before a head that drafts asks for features of it."""
    context = config.context_length or model.max_position_embeddings
    ragged = divided.over_ranks and _sends_ragged(config, model, device, divided.expert_parts)
    return LaidOutModel(
        model,
        shards=divided.tensor,
        context=context,
        # A window as long as the context masks nothing.
        whole_from=0 if config.disable_hybrid_swa_memory else context,
        experts_over_ranks=divided.over_ranks,
        ragged_exchange=ragged,
    )


def _check_kv_groups(config: EngineConfig, model: AnyModel) -> None:
    """Raise `ConfigError` for settings of the KV cache that don't fit the groups of the model."""
    specs = model.kv_specs()
    if model.state_spec() is not None and config.calculate_kv_scales:
        raise ConfigError(
            "calculate_kv_scales: the layers of this model that keep a state for each sequence can't run without one; "
            "leave it out: scales are then the checkpoint's, or 1"
        )
    if config.disable_hybrid_swa_memory and len(specs) > 1:
        heads = ", ".join(f"{spec.num_kv_heads} of size {spec.head_dim}" for spec in specs)
        raise ConfigError(
            f"disable_hybrid_swa_memory: the layers of this model can't share one KV cache, as their KV heads differ: "
            f"{heads}; leave it out"
        )
    if config.swa_full_tokens_ratio is not None and len(specs) == 1:
        raise ConfigError(
            f"swa_full_tokens_ratio={config.swa_full_tokens_ratio:g}: no layer of this model has a sliding window "
            f"shorter than the context of {model.context} tokens, so all share one KV cache; leave it out"
        )


def _choose_attention(
    config: EngineConfig,
    model: AnyModel,
    drafting: Drafting | None,
    device: DeviceFacts,
    dtype: np.dtype,
    kv_dtype: np.dtype,
) -> Backend:
    """Return the attention backend for all KV groups, and for that of a draft model. Raises `ConfigError`."""
    draft, shape = None if drafting is None else drafting.model, model.config
    try:
        if shape.bidirectional:
            kv_heads, head_dim = model.kv_shape(0)
            problem = PackedProblem(shape.num_heads, kv_heads, head_dim, dtype, shape.biases_distances)
            return choose_packed_backend(device.kernels, problem, config.attention_backend)
        problems = [
            attention_problem(config, one, spec, dtype=dtype, kv_dtype=kv_dtype)
            for one in (model, draft)
            if one is not None
            for spec in one.kv_specs()
            if spec.num_layers
        ]
        return choose_backend(device.kernels, problems, config.attention_backend)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _sends_ragged(config: EngineConfig, model: ModelConfig, device: DeviceFacts, parts: int) -> bool:
    """Return whether prefill sends tokens only to devices with their experts."""
    if config.all2all_backend != "auto":
        return config.all2all_backend == "ragged_all_to_all"
    # XLA's reached 2 % of the bandwidth between 8 B200 (openxla/xla#33386)
    share = 1 - (1 - 1 / parts) ** model.experts_per_token
    return device.platform == "tpu" and share <= 0.5
