"""The deployment that the worker runs, `plan` reports on and `compile` compiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_type_hints

import jax
import msgspec
import pytest
from gguf import GGMLQuantizationType as Kind

from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.registry import abstract_params, parse_model_config
from jaxserve.quant import GGUF_TYPES, held_weights
from jaxserve.runtime.devices.device import DeviceFacts, facts_of_target
from jaxserve.runtime.devices.mesh import device_bytes, make_mesh
from jaxserve.runtime.programs.bundle import BundlePart, read_manifest, sized_like_bundle, write_manifest
from jaxserve.runtime.programs.table import step_keys
from jaxserve.runtime.sizing.deployment import Deployment, deploy, read_stored
from jaxserve.runtime.sizing.temp_memory import TempMemory, with_temp_memory
from jaxserve.runtime.step.page_copies import read_key, write_key
from jaxserve.runtime.step.state import max_pages
from pallas_kernels.paged_attention import BACKENDS, KernelTarget
from pallas_kernels.quantized_matmul import PackedWeight
from tests.runtime.tiny import F32, mesh, model
from tests.tiny_model import CONFIG
from tests.weights.conftest import GOLDEN, tensor_parts
from tests.weights.gguf_converter import from_golden

CPU = DeviceFacts(KernelTarget("cpu"), 2**34, max_devices=8)


def _deploy(device: DeviceFacts = CPU, **options: Any) -> Deployment:
    return deploy(EngineConfig(dtype="float32", **options), model(), device)


def test_the_footprint_is_the_sum_of_the_specs() -> None:
    made = _deploy()
    footprint = made.sizes.footprint
    assert footprint.weights == sum(spec.nbytes for spec in jax.tree.leaves(made.params))
    pool = sum(spec.nbytes for spec in jax.tree.leaves(made.state.kv))
    everything = sum(spec.nbytes for spec in jax.tree.leaves(made.state))
    assert made.sizes.pool_bytes == pool
    assert footprint.state == everything - pool


def test_the_plan_fits_the_share_of_memory() -> None:
    device = DeviceFacts(KernelTarget("cuda"), 2**24)
    made = _deploy(device, mem_fraction_static=0.5, max_running_requests=400)
    pool = made.sizes.pool_bytes
    assert made.capacity.num_pages < 400 * max_pages(made.capacity)
    assert 0 <= 2**23 - made.sizes.footprint.non_pool - pool < made.sizes.footprint.kv_per_token[0] * 16


def test_shards_share_weights_and_pool() -> None:
    one, two = _deploy(), _deploy(tp_size=2)
    assert two.sizes.footprint.kv_per_token[0] * 2 == one.sizes.footprint.kv_per_token[0]
    assert one.sizes.footprint.weights / 2 < two.sizes.footprint.weights < one.sizes.footprint.weights
    assert device_bytes(two.state, {"data": 1, "tensor": 2}) < device_bytes(two.state, {})


def test_shards_share_a_kv_head_and_pad_the_vocabulary_if_needed() -> None:
    """The model has two KV heads and 258 tokens."""
    two, four = _deploy(tp_size=2), _deploy(tp_size=4)
    assert four.sizes.footprint.kv_per_token[0] == two.sizes.footprint.kv_per_token[0]
    assert four.params.layers[0].attention.qkv.shape == (4, 1 + 2, 16, 32)
    assert four.params.embedding.shape == (260, 32)
    assert four.state.counts.shape[2] == 260
    assert two.params.embedding.shape == (258, 32)


H200 = KernelTarget("cuda", "NVIDIA H200", (9, 0))


def test_an_fp8_cache_takes_half_the_memory_and_other_programs() -> None:
    device = DeviceFacts(H200, 2**24)
    halves, bytes_ = (
        deploy(EngineConfig(kv_cache_dtype=kind), model(), device)  # type: ignore[arg-type]
        for kind in ("auto", "fp8")
    )
    assert halves.sizes.footprint.kv_per_token[0] == 2 * bytes_.sizes.footprint.kv_per_token[0]
    facts = [made.builder(mesh()).facts() for made in (halves, bytes_)]
    assert [fact["kv_cache_dtype"] for fact in facts] == ["bfloat16", "float8_e4m3fn"]


def test_a_pool_is_no_larger_than_its_kernels_can_address() -> None:
    """Triton's kernels can address only the first 2 GiB of fp8 keys, up to 4 GiB."""
    device = DeviceFacts(H200, 2**36, max_devices=8)
    token = 2 * 2 * 16  # bytes of keys: layers, KV heads, head size

    def keys(**options: Any) -> int:
        slots = 2**20  # of 64 tokens: 4 GiB of keys
        config = EngineConfig(
            kv_cache_dtype="fp8", max_running_requests=slots, cuda_graph_bs=(slots,), max_num_batched_tokens=slots,
            **options,
        )  # fmt: skip
        made = deploy(config, model(), device)
        return made.capacity.num_pages * made.capacity.page_size * token // config.tp_size

    assert keys() == 2**31 - 16 * token
    assert keys(attention_backend="reference") == 2**32
    assert keys(tp_size=2) == 2**31 - 16 * token // 2
    assert keys(max_total_tokens=2**24) == 2**30
    with pytest.raises(ConfigError, match=r"triton can address only 33554416 tokens of an fp8 KV cache .* 2 to 4 GiB"):
        keys(max_total_tokens=2**25)


def test_programs_follow_from_the_sizes() -> None:
    made = _deploy(cuda_graph_bs=(2,), max_running_requests=4)
    builder = made.builder(mesh())
    assert builder.capacity == made.capacity
    assert [str(key) for key in step_keys(made.capacity)][:3] == ["decode-2-greedy", "decode-2-full", "decode-4-greedy"]
    assert builder.context.sample_rows == 32
    gpu = deploy(EngineConfig(), model(), facts_of_target("nvidia-h200"))
    assert gpu.builder(make_mesh(jax.devices("cpu"))).context.sample_rows is None


def test_a_dynamic_rotation_stretches_to_contexts_up_to_its_factor() -> None:
    stretched = parse_model_config({**CONFIG, "rope_scaling": {"type": "dynamic", "factor": 4.0}})
    made = deploy(EngineConfig(dtype="float32", context_length=256), stretched, CPU)
    assert made.capacity.max_model_len == 256
    assert made.model.context == 256
    assert deploy(EngineConfig(dtype="float32"), stretched, CPU).capacity.max_model_len == 64
    with pytest.raises(ConfigError, match="context_length=257 is longer than the model's 256"):
        deploy(EngineConfig(dtype="float32", context_length=257), stretched, CPU)


def test_shards_of_a_cpu_promise_no_determinism() -> None:
    asked = EngineConfig(tp_size=2, enable_deterministic_inference=True)
    with pytest.raises(ConfigError, match="enable_deterministic_inference: with tp_size=2 XLA adds the sums of shards"):
        deploy(asked, model(), CPU)


def test_the_flag_takes_every_attention_backend() -> None:
    assert set(get_args(get_type_hints(EngineConfig)["attention_backend"])) == {"auto", *BACKENDS.names}


def test_an_unsupported_attention_backend_is_refused() -> None:
    odd = parse_model_config({**CONFIG, "head_dim": 12})
    with pytest.raises(ConfigError, match="attention backend"):
        deploy(EngineConfig(attention_backend="triton"), odd, facts_of_target("tpu-v5e"))


GEMMA = parse_model_config(
    {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 4096, "hidden_size": 256,
        "intermediate_size": 512, "num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "max_position_embeddings": 32768, "sliding_window": 512,
    }
)  # fmt: skip


def test_layers_with_a_window_have_a_pool_of_their_own() -> None:
    made = deploy(EngineConfig(), GEMMA, DeviceFacts(H200, 2**30))
    assert [(spec.num_layers, spec.window) for spec in made.kv_specs] == [(2, None), (10, 512)]
    assert [pool.num_layers for pool in made.state.kv] == [2, 10]
    assert made.sizes.footprint.kv_per_token == (2 * 2 * 2 * 64 * 2, 10 * 2 * 2 * 64 * 2)
    assert made.sizes.memory_bound
    assert 0 <= int(2**30 * 0.88) - made.sizes.footprint.non_pool - made.sizes.pool_bytes < 2**20
    whole = deploy(EngineConfig(disable_hybrid_swa_memory=True), GEMMA, DeviceFacts(H200, 2**30))
    assert made.capacity.num_pages > 3 * whole.capacity.num_pages
    assert whole.capacity.window_groups == ()


def test_a_window_as_long_as_the_context_needs_no_pool() -> None:
    assert len(deploy(EngineConfig(context_length=512), GEMMA, CPU).kv_specs) == 1
    assert len(deploy(EngineConfig(context_length=513), GEMMA, CPU).kv_specs) == 2


def test_the_tokens_of_whole_sequences_decide_the_other_pools_on_any_memory() -> None:
    """So that a bundle fits, and the processes of a mesh agree."""
    for options in ({}, {"chunked_prefill_size": -1}, {"swa_full_tokens_ratio": 0.3}, {"kv_cache_dtype": "fp8"}):
        config = EngineConfig(**options)  # type: ignore[arg-type]
        sized = deploy(config, GEMMA, DeviceFacts(H200, 2**30), activations=2**27)
        assert sized.sizes.memory_bound
        tokens = sized.capacity.num_pages * sized.capacity.page_size
        again = deploy(msgspec.structs.replace(config, max_total_tokens=tokens), GEMMA, DeviceFacts(H200, 2**32))
        assert again.capacity == sized.capacity


def test_a_bundle_has_the_pools_of_all_groups(tmp_path: Path) -> None:
    config = EngineConfig()
    sized = deploy(config, GEMMA, DeviceFacts(H200, 2**30))
    write_manifest(tmp_path, config, [BundlePart("", sized.builder(mesh()), [])])
    manifest = read_manifest(tmp_path)
    [group] = manifest.facts["sizes"]["window_groups"]
    assert group["num_pages"] == sized.capacity.pages_by_group[1]
    loaded = deploy(sized_like_bundle(config, manifest), GEMMA, DeviceFacts(H200, 2**30 + 2**24))
    assert loaded.builder(mesh()).fingerprint() == sized.builder(mesh()).fingerprint()
    other = msgspec.structs.replace(config, swa_full_tokens_ratio=0.5)
    assert deploy(other, GEMMA, DeviceFacts(H200, 2**30)).builder(mesh()).facts() != manifest.facts


def test_a_ratio_needs_a_window() -> None:
    with pytest.raises(ConfigError, match=r"swa_full_tokens_ratio=0.5: no layer .* context of 64 tokens.*leave it out"):
        _deploy(swa_full_tokens_ratio=0.5)
    with pytest.raises(ConfigError, match="context of 512 tokens"):
        deploy(EngineConfig(swa_full_tokens_ratio=0.5, context_length=512), GEMMA, CPU)


def test_a_window_pool_is_no_larger_than_kernels_can_address() -> None:
    """Triton can't address fp8 keys that take 2 to 4 GiB; those of the ten layers would take 3."""
    config = EngineConfig(kv_cache_dtype="fp8", swa_full_tokens_ratio=1.0, max_running_requests=2048)
    made = deploy(config, GEMMA, DeviceFacts(H200, 15 * 2**29))
    keys = [made.state.kv[group].keys.nbytes for group in (0, 1)]
    assert 2**31 - 2**20 < keys[1] < 2**31
    assert keys[0] * 5 == keys[1]


def test_every_suggested_total_has_pools_that_kernels_can_address() -> None:
    config = EngineConfig(kv_cache_dtype="fp8", swa_full_tokens_ratio=1.0, max_running_requests=2048)
    facts = DeviceFacts(H200, 15 * 2**29)
    with pytest.raises(ConfigError, match="triton can address only") as refused:
        deploy(msgspec.structs.replace(config, max_total_tokens=2**21), GEMMA, facts)
    fitting = int(str(refused.value).split("--max-total-tokens ")[1].split(",")[0])
    deploy(msgspec.structs.replace(config, max_total_tokens=fitting), GEMMA, facts)


def test_a_hierarchical_cache_adds_the_programs_that_copy_pages() -> None:
    plain, tiered = _deploy(), _deploy(enable_hierarchical_cache=True)
    assert [key for key in tiered.program_keys if key not in plain.program_keys] == [read_key(0), write_key(0)]
    assert step_keys(tiered.capacity) == step_keys(plain.capacity)


def _of_gguf(device: DeviceFacts = CPU, **options: Any) -> Deployment:
    """Deploy a GGUF file whose matrices are all Q4_1; in this model down projections have no whole blocks."""
    stored = dict.fromkeys(tensor_parts(abstract_params(LaidOutModel(model()), F32)), GGUF_TYPES["Q4_1"])
    return deploy(EngineConfig(**options), model(), device, stored=stored)


def test_quantized_weights_count_with_their_size() -> None:
    dense, packed = _of_gguf(quantization="none"), _of_gguf()
    held = [weight for weight in held_weights(packed.params).values() if weight.scheme is not None]
    assert len(held) == len(packed.weights.quantized) == 6
    assert not dense.weights.quantized
    saved = dense.sizes.footprint.weights - packed.sizes.footprint.weights
    # 4 bits per weight, and a float32 scale and minimum per 32 weights: 6 bits instead of 16
    elements = sum(weight.data.nbytes * 8 // 6 for weight in held if isinstance(weight, PackedWeight))
    assert saved == elements * 10 // 8
    assert packed.dense_bytes == dense.dense_bytes == dense.sizes.footprint.weights
    assert packed.stored == dense.stored


def test_packed_weights_need_other_programs() -> None:
    dense, packed = (_of_gguf(quantization=asked).builder(mesh()) for asked in ("none", "gguf"))
    assert dense.fingerprint() != packed.fingerprint()
    forms = [made.facts()["weights"]["layers.1.mlp.up"] for made in (dense, packed)]
    assert forms == ["bf16", "int4, groups of 32, zeros"]


def test_a_resized_deployment_keeps_its_packed_weights() -> None:
    made = _of_gguf()
    assert with_temp_memory(made, TempMemory(made.sizes.footprint.activations, "mixed-16")).params == made.params


def test_stored_types_are_read_from_a_gguf_model(tmp_path: Path) -> None:
    path = from_golden("smollm2", tmp_path / "m.gguf", Kind.Q8_0)
    types = read_stored(EngineConfig(model=str(path)), model())
    assert types["model.layers.1.mlp.up_proj.weight"] == GGUF_TYPES["Q8_0"]
    assert read_stored(EngineConfig(model=str(path), load_format="dummy"), model()) == {}
    assert read_stored(EngineConfig(model=str(GOLDEN / "smollm2")), model()) == {}
    assert read_stored(EngineConfig(model=str(GOLDEN / "smollm2" / "config.json")), model()) == {}
