"""One place decides: what the worker runs is what `plan` reckons with and `compile` compiles."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.models.config import parse_model_config
from jaxserve.runtime.deployment import Deployment, deploy
from jaxserve.runtime.device import DeviceFacts, facts_of_target
from jaxserve.runtime.mesh import device_bytes, make_mesh
from jaxserve.runtime.state import max_pages
from pallas_kernels.paged_attention import Target
from tests.runtime.tiny import mesh, model
from tests.tiny_model import CONFIG

CPU = DeviceFacts(Target("cpu"), 2**34, max_devices=8)


def _deploy(device: DeviceFacts = CPU, **options: Any) -> Deployment:
    return deploy(EngineConfig(dtype="float32", **options), model(), device)


def test_the_footprint_is_what_the_specs_come_to() -> None:
    made = _deploy()
    footprint = made.sizes.footprint
    assert footprint.weights == sum(spec.nbytes for spec in jax.tree.leaves(made.params))
    pool = sum(spec.nbytes for spec in jax.tree.leaves(made.state.kv))
    everything = sum(spec.nbytes for spec in jax.tree.leaves(made.state))
    assert footprint.kv_per_token * made.capacity.num_pages * made.capacity.page_size == pool
    assert footprint.state == everything - pool


def test_all_that_is_planned_fits_the_share_of_memory() -> None:
    device = DeviceFacts(Target("cuda"), 2**24)
    made = _deploy(device, mem_fraction_static=0.5, max_running_requests=400)
    pool = made.sizes.footprint.kv_per_token * made.capacity.num_pages * made.capacity.page_size
    assert made.capacity.num_pages < 400 * max_pages(made.capacity)
    assert 0 <= 2**23 - made.sizes.footprint.taken - pool < made.sizes.footprint.kv_per_token * 16


def test_shards_share_weights_and_pool() -> None:
    one, two = _deploy(), _deploy(tp_size=2)
    assert two.sizes.footprint.kv_per_token * 2 == one.sizes.footprint.kv_per_token
    assert one.sizes.footprint.weights / 2 < two.sizes.footprint.weights < one.sizes.footprint.weights
    assert device_bytes(two.state, {"data": 1, "tensor": 2}) < device_bytes(two.state, {})


def test_shards_share_a_kv_head_and_pad_the_vocabulary_where_they_must() -> None:
    """Of two KV heads and 258 tokens."""
    two, four = _deploy(tp_size=2), _deploy(tp_size=4)
    assert four.sizes.footprint.kv_per_token == two.sizes.footprint.kv_per_token
    assert four.params.layers[0].attention.qkv.shape == (4, 1 + 2, 16, 32)
    assert four.params.embedding.shape == (260, 32)
    assert four.state.counts.shape[2] == 260
    assert two.params.embedding.shape == (258, 32)


def test_programs_are_those_of_the_sizes() -> None:
    made = _deploy(cuda_graph_bs=(2,), max_running_requests=4)
    builder = made.builder(mesh())
    assert builder.capacity == made.capacity
    assert [str(key) for key in made.keys][:3] == ["decode-2-greedy", "decode-2-full", "decode-4-greedy"]
    assert builder.context.sample_rows == 16
    gpu = deploy(EngineConfig(), model(), facts_of_target("nvidia-h200"))
    assert gpu.builder(make_mesh(jax.devices("cpu"))).context.sample_rows is None


def test_an_attention_backend_that_can_not_is_refused() -> None:
    odd = parse_model_config({**CONFIG, "head_dim": 12})
    with pytest.raises(ConfigError, match="attention backend"):
        deploy(EngineConfig(attention_backend="triton"), odd, facts_of_target("tpu-v5e"))


def test_a_tier_in_host_memory_adds_the_programs_that_copy_pages() -> None:
    plain, tiered = _deploy(), _deploy(enable_hierarchical_cache=True)
    assert [key for key in tiered.all_keys if key not in plain.all_keys] == ["read_pages", "write_pages"]
    assert tiered.keys == plain.keys
