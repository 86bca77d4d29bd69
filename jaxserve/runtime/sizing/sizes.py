"""Resolves the sizes of a deployment from its settings: batch, prefill chunk, buckets, KV pool and context."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence

import numpy as np

from jaxserve.config.data_parallel import ONE_DEVICE, Parallelism
from jaxserve.config.schema import EngineConfig
from jaxserve.config.speculation import HEADS
from jaxserve.models.layout import AnyModel
from jaxserve.params import KVSpec
from jaxserve.runtime.devices.device import DeviceFacts
from jaxserve.runtime.sizing import memory
from jaxserve.runtime.sizing.drafting import max_drafts
from jaxserve.runtime.sizing.memory import Footprint
from jaxserve.runtime.sizing.state_pool import resolve_running
from jaxserve.runtime.step.buckets import decode_buckets, fine_decode_rows, token_buckets
from jaxserve.step_plan import Capacity, WindowGroup
from pallas_kernels.gated_delta import BLOCK
from pallas_kernels.paged_attention import Problem


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes that the programs can hold, the scheduler's budgets in tokens per step, and the memory footprint.

    `wanted_context` is the context length before it was fitted to the pool. `memory_bound` says that the pool would be
    larger if the device had more memory. The state of a sequence takes `state_bytes` of a device, 0 if there is none.
    """

    capacity: Capacity
    chunked_prefill_size: int
    max_prefill_tokens: int
    max_num_batched_tokens: int
    max_mixed_step_ms: int
    footprint: Footprint
    wanted_context: int
    memory_bound: bool
    state_bytes: int = 0

    @property
    def pool_bytes(self) -> int:
        """Bytes of the KV pools on a device."""
        tokens = (pages * self.capacity.page_size for pages in self.capacity.pages_by_group)
        return sum(map(operator.mul, tokens, self.footprint.kv_per_token))


@dataclasses.dataclass(frozen=True)
class Defaults:
    """The default sizes of a platform: requests that run at once, tokens of a prefill chunk and of the smallest mixed
    program, the size up to which decode programs are finely spaced, and the longest step with prompts beside decodes.

    `row_multiple` divides the rows of each program that decodes or draws: a product of fewer than 8 rows takes an
    accelerator as long as one of 8, and XLA adds kernels that pad it.
    """

    running: int
    chunk: int
    smallest_bucket: int
    max_fine: int | None
    row_multiple: int
    mixed_step_ms: int


_CPU = Defaults(running=32, chunk=512, smallest_bucket=16, max_fine=None, row_multiple=1, mixed_step_ms=250)
_ACCELERATOR = Defaults(running=256, chunk=2048, smallest_bucket=256, max_fine=160, row_multiple=8, mixed_step_ms=0)
_PROMPT_LOGPROB_TOKENS = 128

# Tokens of the largest step that verifies drafts, whose logits all exist at once on a GPU; the number that divides the
# sizes of such steps; and the tokens that a draft model reads in the smaller of its two programs.
_MOST_VERIFIED = 256
_VERIFY_MULTIPLE = 8
_FEW_READ = 64


def defaults_of(device: DeviceFacts) -> Defaults:
    """Return the sizes that apply to settings left unset."""
    return _CPU if device.platform == "cpu" else _ACCELERATOR


def resolve_sizes(
    config: EngineConfig,
    model: AnyModel,
    device: DeviceFacts,
    *,
    weight_bytes: int,
    slot_bytes: int,
    bytes_per_token: tuple[int, ...],
    state_bytes: int | None = None,
    activations: int | None = None,
    most_pages: Sequence[int] | None = None,
    divided: Parallelism = ONE_DEVICE,
) -> Sizes:
    """Return all sizes, with defaults for settings left unset.

    Bytes are per device of a model that is `divided`; requests and pages are per data-parallel rank. `bytes_per_token`
    are by KV group, as is `most_pages`, the pages that may not be exceeded. `state_bytes` are those of the state of a
    sequence, None if the model keeps none. `activations` is the working memory of the programs, if it is known. Raises
    `ConfigError` for sizes that don't fit, `InsufficientMemoryError` if no memory is left for a KV cache.
    """
    defaults = defaults_of(device)
    running, num_states = resolve_running(
        config,
        device,
        default=defaults.running,
        multiple=defaults.row_multiple,
        slot_bytes=slot_bytes,
        state_bytes=state_bytes,
        token_bytes=sum(bytes_per_token),
        weight_bytes=weight_bytes,
        num_devices=divided.num_devices * divided.replicas,
    )
    chunk = config.chunked_prefill_size or defaults.chunk
    longest = config.context_length or model.config.max_position_embeddings
    widest = min(config.max_num_batched_tokens or (longest if chunk < 0 else chunk), max(longest, running))
    footprint = Footprint(
        weights=weight_bytes,
        state=running * slot_bytes + num_states * (state_bytes or 0),
        states=num_states * (state_bytes or 0),
        activations=activations or activation_bytes(model, device.platform, widest, running, divided),
        kv_per_token=bytes_per_token,
    )
    specs = model.kv_specs()
    pool = memory.plan_pool(
        config,
        footprint,
        platform=device.platform,
        memory_bytes=device.memory_bytes,
        model_context=model.config.max_position_embeddings,
        longest_context=model.config.longest_context,
        max_running=running,
        chunk=min(widest, longest, config.max_prefill_tokens or longest),
        windows=[spec.window for spec in specs],
        whole_sequences=dataclasses.replace(model, stage=None).kv_specs()[0].num_layers > 0,
        most_pages=most_pages,
        num_devices=divided.num_devices * divided.replicas,
    )
    # -1 disables chunking: a step then holds the longest possible prompt.
    chunk = pool.context_length if chunk < 0 else min(chunk, pool.context_length)
    batched = config.max_num_batched_tokens or chunk
    largest = min(batched, max(pool.context_length, running))
    max_fine = config.cuda_graph_max_bs or defaults.max_fine
    drafts = max_drafts(config)
    verified = _verify_buckets(config, min(running, largest), drafts, largest) if drafts else ()
    pooling = model.config.pooling
    drafting = verified if config.speculative_method in ("draft", *HEADS) else ()
    capacity = Capacity(
        num_slots=running,
        num_pages=pool.pages[0],
        page_size=config.page_size,
        max_model_len=pool.context_length,
        decode_buckets=decode_buckets(
            running, max_fine=max_fine, requested=config.cuda_graph_bs, multiple=defaults.row_multiple
        ),
        token_buckets=token_buckets(largest, smallest=defaults.smallest_bucket),
        prompt_logprob_tokens=max(_PROMPT_LOGPROB_TOKENS, 2 * running),
        num_ranks=divided.data,
        rotation_length=model.config.rotation_length,
        fine_decode_rows=fine_decode_rows(running, max_fine=max_fine, requested=config.cuda_graph_bs),
        window_groups=tuple(
            WindowGroup(pages, spec.window)
            for spec, pages in zip(specs, pool.pages, strict=True)
            if spec.window is not None
        ),
        verify_buckets=verified,
        max_drafts=drafts,
        draft_buckets=token_buckets(max(1, min(running, drafting[-1] // 2)), smallest=defaults.row_multiple)
        if drafting
        else (),
        draft_read_buckets=tuple(sorted({min(_FEW_READ, largest), largest})) if drafting else (),
        max_unread=2 + drafts if config.speculative_method in HEADS else 2,
        smallest_draw=defaults.row_multiple,
        vocab_size=model.padded_vocab_size,
        num_stages=divided.stages,
        num_states=num_states,
        state_unit=math.lcm(config.page_size, BLOCK) if num_states else 0,
        state_block=BLOCK,
        pooled_size=0 if pooling is None else pooling.size(model.config.hidden_size),
        pools_all_tokens=pooling is not None and pooling.method == "mean",
        generates=model.config.generates,
    )
    prefill = min(config.max_prefill_tokens or chunk, largest)
    step_ms = defaults.mixed_step_ms if config.max_mixed_step_ms is None else config.max_mixed_step_ms
    return Sizes(
        capacity,
        min(chunk, largest),
        prefill,
        largest,
        step_ms,
        footprint,
        longest,
        pool.memory_bound,
        state_bytes or 0,
    )


def _verify_buckets(config: EngineConfig, running: int, drafts: int, largest: int) -> tuple[int, ...]:
    """Return the token counts of steps that verify drafts, up to what all requests that may speculate at once need.

    There are few of them. A step of one request needs the smallest; if a step has no room for all drafts, it verifies
    the likeliest ones.
    """
    rows = min(running, config.speculative_disable_by_batch_size or running)
    most = min(rows * (1 + drafts), largest, _MOST_VERIFIED)
    smallest = min(most, -(-(1 + drafts) // _VERIFY_MULTIPLE) * _VERIFY_MULTIPLE)
    return token_buckets(most, smallest=smallest)


def attention_problem(
    config: EngineConfig, model: AnyModel, spec: KVSpec, *, dtype: np.dtype, kv_dtype: np.dtype
) -> Problem:
    """Return the attention problem of a KV group that the kernel of each shard must solve."""
    return Problem(
        heads=model.config.num_heads // model.shards,
        kv_heads=spec.num_kv_heads // model.shards,
        head_dim=spec.head_dim,
        page_size=config.page_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        value_dim=spec.value_dim,
    )


# The number of copies of a shard's logits that the sampler holds at once, as seen in compiled programs.
_LOGIT_COPIES = {"tpu": 7}
_DEFAULT_LOGIT_COPIES = 4


def activation_bytes(model: AnyModel, platform: str, tokens: int, rows: int, divided: Parallelism) -> int:
    """Estimate a step's working memory generously: the activations of the layers, or the sampler's float32 logits.

    `tests/aot` compares it with the compiler's figure.
    """
    tensor = divided.tensor
    shapes = [(spec.num_kv_heads, spec.head_dim) for spec in model.kv_specs()] or [model.kv_shape(0)]
    qkv = ((model.config.num_heads + 2 * kv_heads) * head_dim for kv_heads, head_dim in shapes)
    widest = max(2 * model.config.widest_mlp, *qkv) // tensor
    layers = tokens * (widest * 4 + model.config.hidden_size * 16 + model.config.held_per_token * 4)
    if model.config.num_experts:
        layers += _expert_bytes(model, tokens, divided)
    logits = rows * model.padded_vocab_size * 4 // tensor if model.config.generates else 0
    copies = _LOGIT_COPIES.get(platform, _DEFAULT_LOGIT_COPIES)
    most = max(layers, copies * logits + tokens * model.config.hidden_size * 8)
    return most + most // 16


def _expert_bytes(model: AnyModel, tokens: int, divided: Parallelism) -> int:
    """Return the bytes of the inputs and outputs of experts in a step, with room for all choices of all tokens."""
    sent = 2 * tokens * model.config.experts_per_token // divided.expert if model.ragged_exchange else 0
    tokens *= divided.data if divided.over_ranks else 1
    width = model.config.expert_size * divided.expert // divided.tensor + model.config.hidden_size
    computed = tokens * (model.config.experts_per_token * width + 4 * model.config.hidden_size)  # Sums are float32
    return 2 * (computed + sent * model.config.hidden_size)
