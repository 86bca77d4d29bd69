"""The table of other engines' setting names and what each means here.

A foreign name is another name for one of our settings, sets some of them, is accepted because its effect always holds
here, or is refused with a reason. No name is accepted and then ignored: a name that is neither in this table nor in the
schema is an error. Keys are written with underscores; flags, YAML keys and `LLM` arguments all go through here.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping

from jaxserve.config.foreign_forms import (
    read_num_draft_tokens,
    read_pooler_config,
    read_speculative_config,
    read_structured_outputs_config,
    read_task,
)
from jaxserve.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class InForce:
    """The setting is accepted, because its effect always holds here. `why` explains it in one log line."""

    why: str


@dataclasses.dataclass(frozen=True)
class Sets:
    """The setting is accepted: it sets our setting `key` to `value`, which has the same effect."""

    key: str
    value: object


@dataclasses.dataclass(frozen=True)
class RefusedName:
    """The setting is not accepted: `why` explains what jaxserve does instead and what to write."""

    why: str


Outcome = InForce | Sets | RefusedName


@dataclasses.dataclass(frozen=True)
class RenameAlias:
    """Another name of our setting `to`."""

    to: str


@dataclasses.dataclass(frozen=True)
class SwitchAlias:
    """A true-or-false setting: `--name` is `on`, `--no-name` is `off`."""

    on: Outcome
    off: Outcome


@dataclasses.dataclass(frozen=True)
class ChoiceAlias:
    """A setting with a value: its outcome is in `known`, else it is `other`."""

    other: Outcome
    known: Mapping[str, Outcome] = dataclasses.field(default_factory=lambda: types.MappingProxyType({}))


@dataclasses.dataclass(frozen=True)
class SameAlias:
    """A setting that must have the value of our setting `to`, because `why`."""

    to: str
    why: str


@dataclasses.dataclass(frozen=True)
class ReadAlias:
    """A setting whose value holds others: `read` returns them by name, from the value and where it was written."""

    read: Callable[[object, str], Mapping[str, object]]
    meaning: str


Alias = RenameAlias | SwitchAlias | ChoiceAlias | SameAlias | ReadAlias


def _not_built(what: str) -> SwitchAlias:
    return SwitchAlias(on=RefusedName(f"{what} not built yet"), off=InForce(f"{what} not built yet"))


_SPECULATIVE_CONFIG = ReadAlias(
    read_speculative_config, "vLLM's mapping, as JSON or in YAML: its keys set the settings of the same meaning"
)
_POOLER_CONFIG = ReadAlias(
    read_pooler_config, "vLLM's mapping, as JSON or in YAML: pooling_type may be LAST, MEAN, CLS or ALL"
)
_NO_TREES = ChoiceAlias(
    RefusedName("drafts are chains, not trees: only 1 is supported"), {"1": InForce("drafts are chains")}
)
_OWN_TOKENS = ChoiceAlias(RefusedName("a request's drafts come from all of its own tokens; leave it out"))
_EXACT = "only tokens that the model draws too are accepted, so that answers never change"
_EXACT_THRESHOLD = ChoiceAlias(RefusedName(_EXACT), dict.fromkeys(("1", "1.0"), InForce(_EXACT)))
_GRAMMAR_BACKEND = ChoiceAlias(
    RefusedName("outputs of a given form are held by llguidance, with every model; leave it out"),
    dict.fromkeys(("auto", "guidance", "llguidance"), InForce("outputs of a given form are held by llguidance")),
)
_FORM_OF_A_REQUEST = SwitchAlias(
    on=RefusedName("a request asks for it, in its own `structured_outputs`; leave the flag out"),
    off=InForce("a request asks for it, in its own `structured_outputs`"),
)
_FOR_BOTH_MODELS = ChoiceAlias(RefusedName("the model's own setting applies to the draft model too; leave it out"))

_FLOAT32_STATES = ChoiceAlias(
    RefusedName("states of sequences are float32"),
    {"float32": InForce("states of sequences are float32"), "auto": InForce("states of sequences are float32")},
)
_PRIORITIES = SwitchAlias(
    on=Sets("schedule_policy", "priority"), off=InForce("priorities count only with --schedule-policy priority")
)

ALIASES: Mapping[str, Alias] = types.MappingProxyType(
    {
        "model_path": RenameAlias("model"),
        "seed": RenameAlias("random_seed"),
        "is_embedding": SwitchAlias(
            on=Sets("runner", "pooling"),
            off=InForce("what a model is for is told from its checkpoint, and by --runner"),
        ),
        "task": ReadAlias(read_task, "vLLM's older form of `runner` and `convert`"),
        "pooler_config": _POOLER_CONFIG,
        "override_pooler_config": _POOLER_CONFIG,
        "tensor_parallel_size": RenameAlias("tp_size"),
        "tp": RenameAlias("tp_size"),
        "data_parallel_size": RenameAlias("dp_size"),
        "dp": RenameAlias("dp_size"),
        "pipeline_parallel_size": RenameAlias("pp_size"),
        "pp": RenameAlias("pp_size"),
        "pp_max_micro_batch_size": ChoiceAlias(
            RefusedName("the steps in flight divide the running requests: --max-running-requests limits them together")
        ),
        "pp_async_batch_depth": ChoiceAlias(
            RefusedName("a step for each stage is in flight, and one more unless --disable-overlap-schedule is set"),
            {"0": InForce("a step for each stage is in flight, and one more unless --disable-overlap-schedule is set")},
        ),
        "enable_dynamic_chunking": SwitchAlias(
            on=RefusedName("a chunk has up to --chunked-prefill-size tokens, wherever it is in its prompt"),
            off=InForce("a chunk has up to --chunked-prefill-size tokens, wherever it is in its prompt"),
        ),
        "nccl_init_addr": RenameAlias("dist_init_addr"),
        "master_addr": ChoiceAlias(RefusedName("write --dist-init-addr HOST:PORT, the same on every node")),
        "master_port": ChoiceAlias(RefusedName("write --dist-init-addr HOST:PORT, the same on every node")),
        "distributed_executor_backend": ChoiceAlias(
            RefusedName("jaxserve runs one process on each node: use --nnodes, --node-rank, --dist-init-addr"),
            {"mp": InForce("each node runs a process of its own"), "uni": InForce("one process drives its devices")},
        ),
        "max_model_len": RenameAlias("context_length"),
        "context_len": RenameAlias("context_length"),
        "block_size": RenameAlias("page_size"),
        "gpu_memory_utilization": RenameAlias("mem_fraction_static"),
        "disable_hybrid_kv_cache_manager": RenameAlias("disable_hybrid_swa_memory"),
        "max_num_seqs": RenameAlias("max_running_requests"),
        "cuda_graph_sizes": RenameAlias("cuda_graph_bs"),
        "cudagraph_capture_sizes": RenameAlias("cuda_graph_bs"),
        "max_cudagraph_capture_size": RenameAlias("cuda_graph_max_bs"),
        "enable_chunked_prefill": SwitchAlias(
            on=InForce("prompts are always prefilled in chunks, together with decodes"),
            off=Sets("chunked_prefill_size", -1),
        ),
        "enable_mixed_chunk": SwitchAlias(
            on=InForce("a step always carries its decodes and prefill chunks together"),
            off=RefusedName("a step always carries its decodes and prefill chunks together"),
        ),
        "async_scheduling": SwitchAlias(
            on=Sets("disable_overlap_schedule", False), off=Sets("disable_overlap_schedule", True)
        ),
        "enable_prefix_caching": SwitchAlias(
            on=Sets("disable_radix_cache", False), off=Sets("disable_radix_cache", True)
        ),
        "enable_cache_report": SwitchAlias(
            on=InForce("usage.prompt_tokens_details.cached_tokens is always reported"),
            off=InForce("usage.prompt_tokens_details.cached_tokens is always reported, as OpenAI does"),
        ),
        "enable_torch_compile": SwitchAlias(
            on=InForce("every step is one program, compiled before the server is ready"),
            off=RefusedName("every step is one program, compiled before the server is ready"),
        ),
        "enforce_eager": SwitchAlias(
            on=RefusedName("only programs compiled ahead of time are run; there is no eager mode"),
            off=InForce("only programs compiled ahead of time are run"),
        ),
        "disable_cuda_graph": SwitchAlias(
            on=RefusedName("only programs compiled ahead of time are run; --cuda-graph-bs chooses their sizes"),
            off=InForce("only programs compiled ahead of time are run"),
        ),
        "enable_metrics": SwitchAlias(
            on=InForce("/metrics is always served"), off=RefusedName("/metrics is always served; leave the flag out")
        ),
        "disable_log_stats": SwitchAlias(
            on=Sets("log_level", "warning"), off=InForce("batch lines and preemption counts are logged")
        ),
        "disable_log_requests": SwitchAlias(
            on=InForce("the contents of requests are never logged"),
            off=RefusedName("the contents of requests are never logged"),
        ),
        "enable_log_requests": SwitchAlias(
            on=RefusedName("the contents of requests are never logged"),
            off=InForce("the contents of requests are never logged"),
        ),
        "swap_space": ChoiceAlias(
            InForce("a preempted request is recomputed later; no swap space is needed or reserved")
        ),
        "mamba_ssm_dtype": _FLOAT32_STATES,
        "mamba_ssm_cache_dtype": _FLOAT32_STATES,
        "mamba_cache_mode": ChoiceAlias(
            RefusedName("a cached prefix always ends where its state is; to keep none, write --disable-radix-cache"),
            {"align": InForce("a cached prefix ends at a whole page where its state is")},
        ),
        "scheduling_policy": RenameAlias("schedule_policy"),
        "priority_scheduling": _PRIORITIES,
        "enable_priority_scheduling": _PRIORITIES,
        "q": RenameAlias("quantization"),
        "ep": RenameAlias("ep_size"),
        "expert_parallel_size": RenameAlias("ep_size"),
        "enable_expert_parallel": SwitchAlias(on=Sets("ep_size", -1), off=Sets("ep_size", 1)),
        "enable_ep_moe": SwitchAlias(on=Sets("ep_size", -1), off=Sets("ep_size", 1)),
        "moe_a2a_backend": ChoiceAlias(
            RefusedName("write --all2all-backend allgather_reducescatter or ragged_all_to_all"),
            {"none": InForce("no other library moves the tokens of experts")},
        ),
        "asc": RenameAlias("api_server_count"),
        "tokenizer_worker_num": RenameAlias("api_server_count"),
        "enable_lora": _not_built("LoRA is"),
        "speculative_config": _SPECULATIVE_CONFIG,
        "sc": _SPECULATIVE_CONFIG,
        "speculative_algorithm": RenameAlias("speculative_method"),
        "spec_method": RenameAlias("speculative_method"),
        "spec_model": RenameAlias("speculative_model"),
        "speculative_draft_model_path": RenameAlias("speculative_model"),
        "speculative_draft_model": RenameAlias("speculative_model"),
        "spec_tokens": RenameAlias("num_speculative_tokens"),
        "speculative_num_steps": RenameAlias("num_speculative_tokens"),
        "speculative_num_draft_tokens": ReadAlias(
            read_num_draft_tokens, "counts the token before the drafts too: sets `num_speculative_tokens` to one less"
        ),
        "ngram_prompt_lookup_max": RenameAlias("prompt_lookup_max"),
        "ngram_prompt_lookup_min": RenameAlias("prompt_lookup_min"),
        "speculative_ngram_max_match_window_size": RenameAlias("prompt_lookup_max"),
        "speculative_ngram_min_match_window_size": RenameAlias("prompt_lookup_min"),
        "speculative_draft_tensor_parallel_size": SameAlias("tp_size", "the draft model runs on the model's devices"),
        "speculative_eagle_topk": _NO_TREES,
        "speculative_ngram_min_bfs_breadth": _NO_TREES,
        "speculative_ngram_max_bfs_breadth": _NO_TREES,
        "speculative_ngram_match_type": ChoiceAlias(RefusedName("drafts are chains, not trees; leave it out")),
        "speculative_ngram_branch_length": _OWN_TOKENS,
        "speculative_ngram_capacity": _OWN_TOKENS,
        "speculative_accept_threshold_single": _EXACT_THRESHOLD,
        "speculative_accept_threshold_acc": _EXACT_THRESHOLD,
        "spec_decoding_acceptance_method": ChoiceAlias(
            RefusedName(_EXACT), {"rejection_sampler": InForce(_EXACT), "standard": InForce(_EXACT)}
        ),
        "typical_acceptance_sampler_posterior_threshold": ChoiceAlias(RefusedName(_EXACT)),
        "typical_acceptance_sampler_posterior_alpha": ChoiceAlias(RefusedName(_EXACT)),
        "disable_logprobs_during_spec_decoding": SwitchAlias(
            on=RefusedName("log probabilities are always reported where a request asks; leave the flag out"),
            off=InForce("log probabilities are always reported where a request asks"),
        ),
        "speculative_disable_mqa_scorer": SwitchAlias(
            on=RefusedName("a draft is verified in one step, by attention to several tokens a request"),
            off=InForce("a draft is verified in one step, by attention to several tokens a request"),
        ),
        "speculative_model_quantization": _FOR_BOTH_MODELS,
        "speculative_draft_model_quantization": _FOR_BOTH_MODELS,
        "speculative_draft_load_format": _FOR_BOTH_MODELS,
        "speculative_draft_attention_backend": _FOR_BOTH_MODELS,
        "speculative_attention_mode": _FOR_BOTH_MODELS,
        "speculative_moe_runner_backend": _FOR_BOTH_MODELS,
        "speculative_moe_a2a_backend": _FOR_BOTH_MODELS,
        "speculative_max_model_len": ChoiceAlias(RefusedName("drafts have the context length of the model")),
        "speculative_draft_model_revision": ChoiceAlias(RefusedName("give the folder of the revision as the model")),
        "speculative_token_map": ChoiceAlias(
            RefusedName("a head's own checkpoint tells which tokens it drafts (d2t); leave it out")
        ),
        "guided_decoding_backend": _GRAMMAR_BACKEND,
        "grammar_backend": _GRAMMAR_BACKEND,
        "enable_auto_tool_choice": SwitchAlias(
            on=InForce("a request that offers tools may have calls in its answer"),
            off=RefusedName("calls are read in the answers to requests that offer tools; leave the flag out"),
        ),
        "exclude_tools_when_tool_choice_none": SwitchAlias(
            on=InForce("with tool_choice none the model sees no tools"),
            off=RefusedName("with tool_choice none the model sees no tools; leave the flag out"),
        ),
        "enable_reasoning": SwitchAlias(
            on=InForce("reasoning comes apart from the content"),
            off=RefusedName("a request leaves reasoning in the content by separate_reasoning: false"),
        ),
        "tool_parser_plugin": ChoiceAlias(RefusedName("only the formats of --tool-call-parser are supported")),
        "tool_server": ChoiceAlias(RefusedName("the server calls no tools itself; clients do")),
        "structured_outputs_config": ReadAlias(
            read_structured_outputs_config, "vLLM's mapping, as JSON or in YAML: backend may be auto or guidance"
        ),
        "guided_decoding_disable_any_whitespace": _FORM_OF_A_REQUEST,
        "guided_decoding_disable_additional_properties": _FORM_OF_A_REQUEST,
        "constrained_json_disable_any_whitespace": _FORM_OF_A_REQUEST,
        "constrained_json_whitespace_pattern": ChoiceAlias(
            RefusedName("a request asks for it: `whitespace_pattern` in its `structured_outputs`; leave the flag out")
        ),
        "use_v2_block_manager": SwitchAlias(
            on=InForce("the KV cache always has pages that requests share"),
            off=RefusedName("the KV cache always has pages that requests share; leave the flag out"),
        ),
        "trust_remote_code": SwitchAlias(
            on=RefusedName("code that comes with a checkpoint is never run; leave the flag out"),
            off=InForce("code that comes with a checkpoint is never run"),
        ),
    }
)

_OTHER_KERNEL = "it is a kernel of another engine; --attention-backend auto chooses ours by platform"

COUNTERPARTS: Mapping[str, Mapping[str, str]] = types.MappingProxyType(
    {
        "attention_backend": dict.fromkeys(
            (
                "fa2", "fa3", "fa4", "flash_attn", "flashattention", "flashinfer", "flashmla", "cutlass_mla",
                "triton_attn", "trtllm_mha", "trtllm_mla", "torch_native", "torch_sdpa", "xformers", "aiter", "pallas",
            ),
            _OTHER_KERNEL,
        ),
        "quantization": dict.fromkeys(("awq_marlin",), "kernels are chosen by device: --quantization awq")
        | dict.fromkeys(("gptq_marlin", "gptq_bitblas"), "kernels are chosen by device: --quantization gptq")
        | dict.fromkeys(
            ("w8a8_fp8", "w8a8_int8"),
            "leave it at auto for a checkpoint of compressed-tensors, or set fp8 for one in 16 bits",
        )
        | dict.fromkeys(
            ("bitsandbytes", "modelopt", "modelopt_fp4", "torchao", "quark", "hqq", "petit_nvfp4"),
            "the format is not supported; awq, gptq, compressed-tensors, fp8 and GGUF files are",
        ),
        "kv_cache_dtype": dict.fromkeys(
            ("bfloat16", "bf16", "float16", "float32", "fp32"), "--kv-cache-dtype auto uses the type of --dtype"
        )
        | dict.fromkeys(
            ("fp4_e2m1", "nvfp4", "int8", "fp8_inc", "fp8_ds_mla"),
            "the quantized types of a KV cache are fp8_e4m3 and fp8_e5m2: --kv-cache-dtype fp8_e4m3",
        ),
        "speculative_method": dict.fromkeys(
            (
                "medusa", "mlp_speculator", "suffix", "dflash", "dspark", "custom_class", "extract_hidden_states",
                "lookahead",
            ),
            "the method is not supported; ngram needs no other model: --speculative-method ngram",
        ),
        "dtype": dict.fromkeys(("half", "float16", "fp16"), "the 16-bit type is bfloat16: --dtype bfloat16")
        | dict.fromkeys(("bf16",), "write --dtype bfloat16")
        | dict.fromkeys(("float", "fp32"), "write --dtype float32"),
    }
)  # fmt: skip
"""Values of our own settings that other engines accept, with what to write here instead."""

SYNONYMS: Mapping[str, Mapping[str, str]] = types.MappingProxyType(
    {
        "speculative_method": {name: name for name in ("none", "ngram", "draft", "eagle", "eagle3", "mtp")}
        | {"ngram_gpu": "ngram", "draft_model": "draft", "standalone": "draft", "nextn": "mtp"}
        | dict.fromkeys(
            (
                "deepseek_mtp", "ernie_mtp", "exaone_moe_mtp", "gemma4_mtp", "glm4_moe_lite_mtp", "glm4_moe_mtp",
                "kimi_k3_mtp", "longcat_flash_mtp", "mimo_mtp", "mimo_v2_mtp", "minimax_m3_mtp", "nemotron_h_mtp",
                "pangu_ultra_moe_mtp", "qwen3_5_mtp", "qwen3_next_mtp", "step3p5_mtp",
            ),
            "mtp",
        ),
    }
)  # fmt: skip
"""Other engines' values of our own settings, in lower case, with the value here that means the same."""


def outcome(alias: SwitchAlias | ChoiceAlias, value: object, place: str) -> Outcome:
    """Return the outcome of a foreign setting with this value. Raise `ConfigError` if a switch is not true or false."""
    if isinstance(alias, ChoiceAlias):
        return alias.known.get(str(value), alias.other)
    if not isinstance(value, bool):
        raise ConfigError(f"{place} must be true or false, got {value!r}")
    return alias.on if value else alias.off


def renames(key: str) -> list[str]:
    """Return the other names of one of our settings."""
    return [name for name, alias in ALIASES.items() if alias == RenameAlias(key)]
