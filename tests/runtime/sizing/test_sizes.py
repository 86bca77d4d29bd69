"""Unset sizes get defaults, and the scheduler can plan within any result."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from jaxserve.config.data_parallel import Parallelism
from jaxserve.config.schema import EngineConfig
from jaxserve.config.settings import settings
from jaxserve.engine.scheduling.scheduler import Scheduler
from jaxserve.errors import ConfigError
from jaxserve.runtime.devices.device import DeviceFacts
from jaxserve.runtime.execution.host_pool import host_pages
from jaxserve.runtime.sizing.memory import CPU_POOL_BYTES, Footprint, InsufficientMemoryError, plan_pool
from jaxserve.runtime.sizing.sizes import Sizes, resolve_sizes
from jaxserve.runtime.step.state import ArraySpec
from pallas_kernels.paged_attention import KernelTarget
from tests.runtime.tiny import laid_out

CPU = DeviceFacts(KernelTarget("cpu"), 2**34)
GPU = DeviceFacts(KernelTarget("cuda"), 2**30)


def _resolve(device: DeviceFacts = CPU, **options: Any) -> Sizes:
    bytes_of_one: Any = {"weight_bytes": 2**20, "slot_bytes": 2**10, "bytes_per_token": (256,)}
    return resolve_sizes(EngineConfig(**options), laid_out(), device, **bytes_of_one)


def test_defaults_of_a_cpu() -> None:
    sizes = _resolve()
    assert sizes.capacity.num_slots == 32
    assert sizes.capacity.decode_buckets == (1, 8, 16, 32)
    assert sizes.capacity.max_model_len == 64
    assert sizes.capacity.num_pages == 32 * 64 // 16
    assert sizes.chunked_prefill_size == sizes.max_prefill_tokens == sizes.max_num_batched_tokens == 64
    assert sizes.capacity.token_buckets == (16, 32, 64)


def test_all_devices_of_a_cpu_share_the_cap_of_its_pools() -> None:
    bytes_of_one: Any = {"weight_bytes": 2**20, "slot_bytes": 2**10, "bytes_per_token": (2**16,)}
    config = EngineConfig(max_running_requests=1024)
    made = [
        resolve_sizes(config, laid_out(), CPU, **bytes_of_one, divided=divided)
        for divided in (Parallelism(1, 1), Parallelism(1, 1, stages=4), Parallelism(2, 1, replicas=2, stages=2))
    ]
    assert [sizes.pool_bytes for sizes in made] == [CPU_POOL_BYTES, CPU_POOL_BYTES // 4, CPU_POOL_BYTES // 8]


ABSURD = [0, -1, 1, 2**16, 2**31 - 1, 2**31, 10**11, 10**30, 1e-300, 1e308, math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", [name for name, one in settings().items() if one.kind in (int, float)])
def test_an_absurd_value_fits_or_the_error_names_it(name: str, device: DeviceFacts) -> None:
    """Never raises another error, plans a pool that memory can't hold or an excessive number of programs."""
    owner, kind = settings()[name].owner, settings()[name].kind
    more = {"enable_hierarchical_cache": True} if name.startswith("hicache") else {}
    refusals: list[ConfigError] = []
    for value in ABSURD:
        if kind is int and not isinstance(value, int):
            continue
        given = {name: value, **more}
        try:
            config = owner(**given)
            if isinstance(config, EngineConfig):
                sizes = _resolve(device, **given)
                pages = sizes.capacity.num_pages
                assert pages * config.page_size * 256 <= device.memory_bytes
                assert len(sizes.capacity.decode_buckets) + len(sizes.capacity.token_buckets) < 100
                host_pages(config, [pages], [[ArraySpec((1, 2, 8), np.dtype("int8"), (None, None, None))]])
        except ConfigError as error:
            refusals.append(error)
    assert refusals
    assert all(name in str(error) or isinstance(error, InsufficientMemoryError) for error in refusals)


def test_the_error_for_a_pool_that_memory_cannot_hold_says_what_fits() -> None:
    with pytest.raises(
        ConfigError, match=r"max_total_tokens=99999999999 takes .* at most --max-total-tokens (\d+) fits"
    ) as no:
        _resolve(max_total_tokens=99_999_999_999)
    fitting = int(str(no.value).split()[-2])
    assert _resolve(max_total_tokens=fitting).capacity.num_pages == fitting // 16
    with pytest.raises(InsufficientMemoryError, match="state"):
        _resolve(max_total_tokens=64, max_running_requests=2**31 - 1)
    model_of_large_tokens = Footprint(weights=0, state=0, activations=0, kv_per_token=(2**14,))
    with pytest.raises(
        InsufficientMemoryError, match=r"KV cache of 536870912 bytes, .* less than one page of page_size=65536"
    ):
        plan_pool(
            EngineConfig(page_size=65536),
            model_of_large_tokens,
            platform="cpu",
            memory_bytes=2**34,
            model_context=64,
            max_running=32,
        )


def test_defaults_of_an_accelerator() -> None:
    sizes = _resolve(GPU)
    assert sizes.capacity.num_slots == 256
    assert sizes.capacity.decode_buckets[:5] == (8, 16, 24, 32, 48)
    assert sizes.capacity.decode_buckets[-2:] == (160, 256)


def test_no_chunking_means_a_step_holds_the_longest_prompt() -> None:
    sizes = _resolve(chunked_prefill_size=-1)
    assert sizes.chunked_prefill_size == sizes.max_prefill_tokens == sizes.capacity.token_buckets[-1] == 64
    sizes = _resolve(chunked_prefill_size=-1, max_total_tokens=48, max_running_requests=2)
    assert sizes.capacity.max_model_len == sizes.chunked_prefill_size == sizes.capacity.token_buckets[-1] == 48


def test_budgets_bound_each_other() -> None:
    sizes = _resolve(chunked_prefill_size=40, max_prefill_tokens=10, max_num_batched_tokens=20, max_running_requests=4)
    assert (sizes.chunked_prefill_size, sizes.max_prefill_tokens, sizes.max_num_batched_tokens) == (20, 10, 20)
    assert sizes.capacity.token_buckets == (16, 20)
    assert _resolve(chunked_prefill_size=8).max_prefill_tokens == 8
    assert _resolve(chunked_prefill_size=10**6).chunked_prefill_size == 64


def test_a_step_may_be_wider_than_the_context_if_the_batch_is() -> None:
    sizes = _resolve(context_length=8, max_running_requests=20, chunked_prefill_size=8, max_num_batched_tokens=100)
    assert sizes.max_num_batched_tokens == sizes.capacity.token_buckets[-1] == 20


def test_decode_programs_follow_their_flags() -> None:
    assert _resolve(cuda_graph_bs=(3, 5)).capacity.decode_buckets == (3, 5, 32)
    assert _resolve(cuda_graph_max_bs=8, max_running_requests=20).capacity.decode_buckets == (1, 2, 4, 8, 16, 20)
    fine = _resolve(GPU, cuda_graph_max_bs=8, max_running_requests=20)
    assert fine.capacity.decode_buckets == (8, 16, 24), "a product of fewer than 8 rows is padded"
    assert _resolve(GPU, cuda_graph_bs=(1, 20), max_running_requests=60).capacity.decode_buckets == (8, 24, 64)


@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
def test_the_pool_holds_the_context_in_whole_pages(page_size: int) -> None:
    capacity = _resolve(page_size=page_size, max_running_requests=1).capacity
    assert capacity.num_pages * page_size >= capacity.max_model_len == 64
    tiny = _resolve(page_size=page_size, max_total_tokens=page_size).capacity
    assert (tiny.num_pages, tiny.max_model_len) == (1, min(page_size, 64))


def test_a_pool_of_less_than_a_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_total_tokens=15"):
        _resolve(max_total_tokens=15)


def test_the_scheduler_can_plan_within_any_sizes() -> None:
    choices: dict[str, list[Any]] = {
        "max_running_requests": [None, 1, 3, 300],
        "chunked_prefill_size": [None, -1, 1, 7, 10000],
        "max_num_batched_tokens": [None, 1, 5, 10000],
        "max_total_tokens": [None, 16, 100],
        "cuda_graph_bs": [None, (1,), (400,)],
    }
    for values in itertools.product(*choices.values()):
        sizes = _resolve(**dict(zip(choices, values)))
        Scheduler(
            sizes.capacity,
            chunked_prefill_size=sizes.chunked_prefill_size,
            max_prefill_tokens=sizes.max_prefill_tokens,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
        )
        assert sizes.chunked_prefill_size <= sizes.max_num_batched_tokens <= sizes.capacity.token_buckets[-1]
        assert sizes.capacity.decode_buckets[-1] >= sizes.capacity.num_slots
