"""Fits the sizes of a deployment to the memory of a device, and to what its attention kernels can address."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxserve.config.data_parallel import Parallelism
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.models.layout import AnyModel
from jaxserve.runtime.devices.device import DeviceFacts
from jaxserve.runtime.devices.mesh import axis_sizes, device_bytes
from jaxserve.runtime.sizing.drafting import max_drafts
from jaxserve.runtime.sizing.sizes import Sizes, resolve_sizes
from jaxserve.runtime.step.state import DeviceState, pool_layout
from jaxserve.step_plan import Capacity, WindowGroup
from pallas_kernels.paged_attention import Backend, addressable_pages, kv_platform


def fit_sizes(
    config: EngineConfig,
    model: AnyModel,
    device: DeviceFacts,
    divided: Parallelism,
    *,
    backend: Backend,
    describe: Callable[[Capacity], DeviceState],
    params: Any,
    kv_dtype: np.dtype,
    activations: int | None,
    most_pages: Sequence[int] | None = None,
) -> Sizes:
    """Return sizes with which `params`, and the state that `describe` gives for a capacity, fit the memory.

    `activations` is the working memory of the programs in bytes, if it is known. No KV group has more than `most_pages`
    of it. Raises `ConfigError`.
    """
    axes = axis_sizes(data=divided.data, tensor=divided.tensor, expert=divided.expert)
    slot_bytes, page_bytes, state_bytes = _bytes_of_one(describe, config, model, divided.data, axes)
    resolve = functools.partial(
        resolve_sizes,
        model=model,
        device=device,
        weight_bytes=device_bytes(params, axes),
        slot_bytes=slot_bytes,
        bytes_per_token=tuple(size // config.page_size for size in page_bytes),
        state_bytes=state_bytes,
        activations=activations,
        divided=divided,
    )
    wanted = resolve(config, most_pages=most_pages)
    most_pages = _addressable_pages(backend, model, wanted.capacity, kv_dtype)
    if not any(map(operator.lt, most_pages, wanted.capacity.pages_by_group)):
        return wanted
    if config.pool_tokens is None:
        return resolve(config, most_pages=most_pages)
    fitting = resolve(config.with_pool_tokens(None), most_pages=most_pages).capacity
    addressable = fitting.num_pages * config.page_size
    raise ConfigError(
        f"a KV cache of {config.pool_tokens} tokens: attention backend {backend.name} can address only "
        f"{addressable} tokens of an fp8 KV cache whose keys take 2 to 4 GiB; set --max-total-tokens "
        f"{addressable}, or choose another --attention-backend"
    )


def _bytes_of_one(
    describe: Callable[[Capacity], DeviceState],
    config: EngineConfig,
    model: AnyModel,
    ranks: int,
    axes: dict[str, int],
) -> tuple[int, list[int], int | None]:
    """Return the bytes that a slot takes on a device, those of a page by KV group, and those of a sequence's state,
    None if layers keep none.

    They are measured in a state with one slot, one page of each group and one state. A page of the first group also
    holds a draft model's keys and values, and the features for a head.
    """
    windows = (spec.window for spec in model.kv_specs())
    one_of_each = Capacity(
        num_slots=1,
        num_pages=1,
        page_size=config.page_size,
        max_model_len=model.context,
        decode_buckets=(1,),
        token_buckets=(1,),
        prompt_logprob_tokens=1,
        num_ranks=ranks,
        window_groups=tuple(WindowGroup(1, window) for window in windows if window is not None),
        max_drafts=max_drafts(config),
        num_states=0 if model.state_spec() is None else 1,
    )
    state = describe(one_of_each)
    page_bytes = [device_bytes(pool.pools, axes) for pool in state.kv]
    slot_bytes = device_bytes(state, axes) - device_bytes(state.kv, axes)
    if state.drafts is not None and state.drafts.kv is not None:
        page_bytes[0] += device_bytes((state.drafts.kv.pools, state.drafts.features), axes)
        slot_bytes -= device_bytes((state.drafts.kv, state.drafts.features), axes)
    if state.states is None:
        return slot_bytes, page_bytes, None
    state_bytes = device_bytes(state.states.pool.pools, axes)
    return slot_bytes - state_bytes, page_bytes, state_bytes


def _addressable_pages(backend: Backend, model: AnyModel, capacity: Capacity, kv_dtype: np.dtype) -> list[int]:
    """Return how many of the planned pages of each KV group the kernels can address."""
    found = []
    for spec, pages in zip(model.kv_specs(), capacity.pages_by_group, strict=True):
        layout = pool_layout(
            spec, num_pages=pages, page_size=capacity.page_size, dtype=kv_dtype, platform=kv_platform(backend)
        )
        found.append(addressable_pages(backend, layout, model.shards) if spec.num_layers else pages)
    return found
