"""The one table of other engines' names: what each comes to here.

A name is a rename of ours, or a switch or value whose promised effect is in force anyway, sets something of ours, or is
refused with the reason and the counterpart. Nothing is accepted that then does nothing: what isn't in this table or in
the schema is an error. Keys are written with underscores; flags, YAML keys and `LLM` arguments all go through here.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping

from jaxserve.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class InForce:
    """Accepted: what it promises holds here already. `why` says how, in one log line."""

    why: str


@dataclasses.dataclass(frozen=True)
class Sets:
    """Accepted: the same is reached by setting `key` of ours to `value`."""

    key: str
    value: object


@dataclasses.dataclass(frozen=True)
class Refused:
    """Not accepted: `why` says what holds instead and what to do."""

    why: str


Outcome = InForce | Sets | Refused


@dataclasses.dataclass(frozen=True)
class Rename:
    """Another name of the setting `to`."""

    to: str


@dataclasses.dataclass(frozen=True)
class Switch:
    """A true-or-false setting: `--name` is `on`, `--no-name` is `off`."""

    on: Outcome
    off: Outcome


@dataclasses.dataclass(frozen=True)
class Choice:
    """A setting with a value: `known` values first, else `other`."""

    other: Outcome
    known: Mapping[str, Outcome] = dataclasses.field(default_factory=lambda: types.MappingProxyType({}))


Alias = Rename | Switch | Choice

_NO_SPECULATION = Choice(Refused("speculative decoding is not built yet"))
_ONE = types.MappingProxyType({"1": InForce("1 is all there is so far")})


def _not_built(what: str) -> Switch:
    return Switch(on=Refused(f"{what} not built yet"), off=InForce(f"{what} not built yet"))


_PRIORITIES = Switch(
    on=Sets("schedule_policy", "priority"), off=InForce("--schedule-policy priority alone makes priorities count")
)

ALIASES: Mapping[str, Alias] = types.MappingProxyType(
    {
        "model_path": Rename("model"),
        "seed": Rename("random_seed"),
        "tensor_parallel_size": Rename("tp_size"),
        "tp": Rename("tp_size"),
        "data_parallel_size": Rename("dp_size"),
        "dp": Rename("dp_size"),
        "nccl_init_addr": Rename("dist_init_addr"),
        "master_addr": Choice(Refused("write --dist-init-addr HOST:PORT, the same on every node")),
        "master_port": Choice(Refused("write --dist-init-addr HOST:PORT, the same on every node")),
        "distributed_executor_backend": Choice(
            Refused("jaxserve starts one process on each node itself: --nnodes, --node-rank, --dist-init-addr"),
            {"mp": InForce("each node runs a process of its own"), "uni": InForce("one process drives its devices")},
        ),
        "max_model_len": Rename("context_length"),
        "context_len": Rename("context_length"),
        "block_size": Rename("page_size"),
        "gpu_memory_utilization": Rename("mem_fraction_static"),
        "max_num_seqs": Rename("max_running_requests"),
        "cuda_graph_sizes": Rename("cuda_graph_bs"),
        "cudagraph_capture_sizes": Rename("cuda_graph_bs"),
        "max_cudagraph_capture_size": Rename("cuda_graph_max_bs"),
        "enable_chunked_prefill": Switch(
            on=InForce("prompts are always prefilled in chunks, together with decodes"),
            off=Sets("chunked_prefill_size", -1),
        ),
        "enable_mixed_chunk": Switch(
            on=InForce("a step always carries its decodes and prefill chunks together"),
            off=Refused("a step always carries its decodes and prefill chunks together"),
        ),
        "async_scheduling": Switch(
            on=Sets("disable_overlap_schedule", False), off=Sets("disable_overlap_schedule", True)
        ),
        "enable_prefix_caching": Switch(on=Sets("disable_radix_cache", False), off=Sets("disable_radix_cache", True)),
        "enable_cache_report": Switch(
            on=InForce("usage.prompt_tokens_details.cached_tokens is always reported"),
            off=InForce("usage.prompt_tokens_details.cached_tokens is always reported, as OpenAI does"),
        ),
        "enable_torch_compile": Switch(
            on=InForce("every step is one program, compiled before the server is ready"),
            off=Refused("every step is one program, compiled before the server is ready"),
        ),
        "enforce_eager": Switch(
            on=Refused("only programs that were compiled ahead are run; there is no eager mode"),
            off=InForce("only programs that were compiled ahead are run"),
        ),
        "disable_cuda_graph": Switch(
            on=Refused("only programs that were compiled ahead are run; --cuda-graph-bs chooses their sizes"),
            off=InForce("only programs that were compiled ahead are run"),
        ),
        "enable_metrics": Switch(
            on=InForce("/metrics is always served"), off=Refused("/metrics is always served; leave the flag out")
        ),
        "disable_log_stats": Switch(
            on=Sets("log_level", "warning"), off=InForce("batch lines and preemption counts are logged")
        ),
        "disable_log_requests": Switch(
            on=InForce("the contents of requests are never logged"),
            off=Refused("the contents of requests are never logged"),
        ),
        "enable_log_requests": Switch(
            on=Refused("the contents of requests are never logged"),
            off=InForce("the contents of requests are never logged"),
        ),
        "swap_space": Choice(
            InForce("a preempted request is kept and recomputed; no swap space is needed, and none set aside")
        ),
        "scheduling_policy": Rename("schedule_policy"),
        "priority_scheduling": _PRIORITIES,
        "enable_priority_scheduling": _PRIORITIES,
        "q": Rename("quantization"),
        "pipeline_parallel_size": Choice(Refused("pipeline stages are not built yet: only 1 is supported"), _ONE),
        "pp_size": Choice(Refused("pipeline stages are not built yet: only 1 is supported"), _ONE),
        "ep_size": Choice(Refused("expert parallelism is not built yet: only 1 is supported"), _ONE),
        "enable_expert_parallel": _not_built("expert parallelism is"),
        "enable_dp_attention": _not_built("data-parallel attention is"),
        "api_server_count": Choice(Refused("one API process is all there is so far"), _ONE),
        "enable_lora": _not_built("LoRA is"),
        "speculative_algorithm": _NO_SPECULATION,
        "speculative_config": _NO_SPECULATION,
        "speculative_method": _NO_SPECULATION,
        "speculative_model": _NO_SPECULATION,
        "num_speculative_tokens": _NO_SPECULATION,
        "trust_remote_code": Switch(
            on=Refused("code that comes with a checkpoint is never run; leave the flag out"),
            off=InForce("code that comes with a checkpoint is never run"),
        ),
    }
)

_OTHER_KERNEL = "it is a kernel of another engine; --attention-backend auto picks ours by platform"

COUNTERPARTS: Mapping[str, Mapping[str, str]] = types.MappingProxyType(
    {
        "attention_backend": dict.fromkeys(
            (
                "fa2", "fa3", "fa4", "flash_attn", "flashattention", "flashinfer", "flashmla", "cutlass_mla",
                "triton_attn", "trtllm_mha", "trtllm_mla", "torch_native", "torch_sdpa", "xformers", "aiter", "pallas",
            ),
            _OTHER_KERNEL,
        ),
        "quantization": dict.fromkeys(
            (
                "awq", "awq_marlin", "bitsandbytes", "compressed-tensors", "fp8", "gptq", "gptq_marlin", "int8",
                "modelopt", "modelopt_fp4", "mxfp4", "torchao", "w8a8_fp8", "w8a8_int8",
            ),
            "only the blocks of a GGUF file are kept quantized so far: --quantization gguf",
        ),
        "kv_cache_dtype": dict.fromkeys(
            ("bfloat16", "bf16", "float16", "float32", "fp32"), "--kv-cache-dtype auto has the type of --dtype"
        )
        | dict.fromkeys(
            ("fp8_e5m2", "fp4_e2m1", "nvfp4", "int8", "fp8_inc", "fp8_ds_mla"),
            "of quantized caches only e4m3 is built: --kv-cache-dtype fp8_e4m3",
        ),
        "dtype": dict.fromkeys(("half", "float16", "fp16"), "bfloat16 is the 16-bit type here: --dtype bfloat16")
        | dict.fromkeys(("bf16",), "write --dtype bfloat16")
        | dict.fromkeys(("float", "fp32"), "write --dtype float32"),
    }
)  # fmt: skip
"""Values of our own settings that people know from elsewhere, with what to write instead."""


def outcome(alias: Switch | Choice, value: object, place: str) -> Outcome:
    """What a foreign setting with this value comes to. Raises `ConfigError` when a switch is neither true nor false."""
    if isinstance(alias, Choice):
        return alias.known.get(str(value), alias.other)
    if not isinstance(value, bool):
        raise ConfigError(f"{place} must be true or false, got {value!r}")
    return alias.on if value else alias.off


def renames(key: str) -> list[str]:
    """The other names of one of our settings."""
    return [name for name, alias in ALIASES.items() if alias == Rename(key)]
