"""The settings of the engine. Field names are flags (`--page-size`) and YAML keys; descriptions are the help texts.

The names are SGLang's; `other_engines.tsv` has vLLM's and older ones, `server_schema.py` the server's settings. None
means "chosen at start-up", and the choice is logged. Checks that need no model are made here; checks that need the
model or the device are made at start-up.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from jaxserve.config.kv_events import KvEventsConfig
from jaxserve.config.pipeline import layer_partition
from jaxserve.config.processes import check_processes, ranks_and_shards
from jaxserve.config.ranges import ENGINE_RANGES, MOST, check_ranges
from jaxserve.config.speculation import check_speculation
from jaxserve.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m-instruct"

DEFAULT_MEM_FRACTION = 0.88
"""Share of a device's memory that weights and KV cache may take unless `mem_fraction_static` says otherwise."""

# XLA and the driver need the rest.
_MEM_FRACTION_WITH_KV_BYTES = 0.95

LOCAL_SETTINGS = frozenset(
    {
        "node_rank", "dist_init_addr", "dist_timeout", "log_level", "log_config_file", "program_cache_dir",
        "disable_program_cache", "profile_dir", "watchdog_timeout", "soft_watchdog_timeout", "decode_log_interval",
        "kv_events_config", "device_ids", "base_gpu_id", "gpu_id_step", "hf_token",
    }
)  # fmt: skip
"""The settings that change no token, and may differ between the processes of a mesh."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the engine: the model, its memory, its steps. Raises `ConfigError` naming the field and the limit."""

    model: Annotated[
        str, Meta(description="a built-in name, a Hugging Face or converted folder, a .gguf file, or a hub id")
    ] = DEFAULT_MODEL
    runner: Annotated[
        Literal["auto", "generate", "pooling"],
        Meta(
            description="what the model is for; generate: tokens; pooling: vectors, scores and labels; auto: as its "
            "checkpoint says"
        ),
    ] = "auto"
    convert: Annotated[
        Literal["auto", "none", "embed", "classify"],
        Meta(
            description="what is pooled from the model; embed: vectors; classify: labels, by its head or by tokens of "
            "its answer; auto: as its checkpoint says; with --runner generate, both tokens and this"
        ),
    ] = "auto"
    pooling: Annotated[
        Literal["auto", "last", "mean", "cls", "all"],
        Meta(
            description="what vectors are made of; last: the last token of a text; mean: all its tokens; of a model "
            "that reads in both directions also cls: the first token, and all: each token has a vector; auto: as the "
            "checkpoint says"
        ),
    ] = "auto"
    revision: Annotated[
        str | None, Meta(description="branch, tag or commit of the model on the hub; default: its main branch")
    ] = None
    tokenizer_path: Annotated[
        str | None, Meta(description="folder or hub id whose tokenizer is used instead of the model's own")
    ] = None
    tokenizer_revision: Annotated[
        str | None,
        Meta(description="branch, tag or commit of the tokenizer on the hub; default: revision, if it is the model's"),
    ] = None
    download_dir: Annotated[
        str | None, Meta(description="folder for the files of hub models; default: the cache of huggingface_hub")
    ] = None
    hf_token: Annotated[
        str | None,
        Meta(description="token of the hub, for private and gated models; default: $HF_TOKEN, or that of hf"),
    ] = None
    hf_overrides: Annotated[
        dict[str, Any] | None,
        Meta(description="fields that replace those of the model's config.json, as JSON; vLLM's"),
    ] = None
    load_format: Annotated[
        Literal["auto", "safetensors", "gguf", "orbax", "dummy"],
        Meta(description="format of the weights; dummy: random weights from config.json and --random-seed"),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"], Meta(description="type of weights and activations; auto is bfloat16")
    ] = "auto"
    quantization: Annotated[
        Literal[
            "auto", "none", "gguf", "awq", "gptq", "compressed-tensors", "mxfp4", "fbgemm_fp8", "fp8", "int8", "int4"
        ],
        Meta(
            description="how weights are quantized; auto: as the checkpoint has them, where a kernel multiplies by "
            "them; none: dequantized to dtype; fp8 (with inputs in fp8), int8, int4 (weights only, groups of 128): a "
            "checkpoint in 16 bits is quantized as it is loaded; the name of a format: the checkpoint must have it"
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"],
        Meta(
            description="type of the KV cache; auto is dtype; fp8 is fp8_e4m3, half the size of bfloat16; fp8_e5m2 "
            "has a larger range and one bit less of mantissa, and runs on NVIDIA Ampere too"
        ),
    ] = "auto"
    calculate_kv_scales: Annotated[
        bool,
        Meta(
            description="calculate the scales of an fp8 KV cache for each layer from the first prompts that come, "
            "instead of taking those of the checkpoint, or 1"
        ),
    ] = False
    random_seed: Annotated[int, Meta(description="seed of dummy weights, and of requests without a seed")] = 0
    device: Annotated[
        Literal["auto", "cpu", "cuda", "tpu"], Meta(description="platform to run on; auto: the best that jax finds")
    ] = "auto"
    device_ids: Annotated[
        tuple[int, ...] | None,
        Meta(
            description="numbers of the GPUs or TPU chips of this node to use, among those that CUDA_VISIBLE_DEVICES "
            "or TPU_VISIBLE_CHIPS lists, if it is set; default: the first ones"
        ),
    ] = None
    base_gpu_id: Annotated[int, Meta(description="number of the first GPU to use, instead of device_ids")] = 0
    gpu_id_step: Annotated[int, Meta(description="difference between the numbers of a GPU to use and the next")] = 1
    attention_backend: Annotated[
        Literal["auto", "reference", "cpu", "triton", "mosaic_tpu", "mosaic_gpu"],
        Meta(description="paged attention kernel; auto chooses by platform"),
    ] = "auto"
    tp_size: Annotated[
        int, Meta(description="tensor-parallel size: number of devices that share each layer and the vocabulary")
    ] = 1
    dp_size: Annotated[
        int, Meta(description="data-parallel size: number of ranks, each with tp_size devices and its own KV cache")
    ] = 1
    pp_size: Annotated[
        int,
        Meta(
            description="pipeline-parallel size: number of stages, each with a range of the layers, on devices of its "
            "own"
        ),
    ] = 1
    pp_layer_partition: Annotated[
        str,
        Meta(
            description="how layers are divided among stages; layers: as many for each stage; memory: so that the "
            "stage with most weights has as few as possible; or the layers of each stage, such as 20,22,22,16"
        ),
    ] = "layers"
    dp_mode: Annotated[
        Literal["auto", "mesh", "replicas"],
        Meta(
            description="how data-parallel ranks run; mesh: all in one program, in lock step; replicas: each in its "
            "own engine process; auto: replicas for `jaxserve serve` on one node, else mesh"
        ),
    ] = "auto"
    ep_size: Annotated[
        int | None,
        Meta(
            description="expert-parallel size of a mixture of experts: number of parts that its experts are divided "
            "into; -1: one for each device; default: 1, or with enable_dp_attention -1"
        ),
    ] = None
    enable_dp_attention: Annotated[
        bool,
        Meta(
            description="divide attention and its KV cache by data-parallel rank, and experts among the devices of all "
            "ranks; tp_size then counts the devices of all ranks"
        ),
    ] = False
    all2all_backend: Annotated[
        Literal["auto", "allgather_reducescatter", "ragged_all_to_all"],
        Meta(
            description="how tokens reach experts that ranks divide; allgather_reducescatter: all tokens go to all "
            "devices; ragged_all_to_all: tokens of prefill only to devices with their experts; auto: the second "
            "on TPUs if it halves what is sent"
        ),
    ] = "auto"
    nnodes: Annotated[
        int, Meta(description="number of processes, one per host, that share one mesh of the devices of all ranks")
    ] = 1
    node_rank: Annotated[
        int, Meta(description="number of this process among nnodes; 0 schedules and serves HTTP, the others follow it")
    ] = 0
    dist_init_addr: Annotated[
        str | None,
        Meta(description="HOST:PORT of node rank 0, to which the processes of a mesh connect; the same on every node"),
    ] = None
    dist_timeout: Annotated[
        float, Meta(description="seconds to wait at start-up for the other processes of a mesh, and for the first step")
    ] = 120.0
    context_length: Annotated[
        int | None,
        Meta(description="maximum tokens of prompt plus output; default: the model's, reduced to fit the KV cache"),
    ] = None
    page_size: Annotated[int, Meta(description="tokens per page of the KV cache")] = 16
    mem_fraction_static: Annotated[
        float | None, Meta(description="share of device memory for weights and KV cache; default: 0.88")
    ] = None
    max_total_tokens: Annotated[
        int | None,
        Meta(
            description="KV cache tokens of whole sequences per rank; default: what memory allows (on a CPU at most "
            "512 MiB in all)"
        ),
    ] = None
    kv_cache_memory_bytes: Annotated[
        int | None,
        Meta(
            description="bytes of each device's memory for the KV cache, instead of what mem_fraction_static leaves, "
            "such as 4G"
        ),
    ] = None
    num_gpu_blocks_override: Annotated[
        int | None, Meta(description="pages of the KV cache of whole sequences per rank; max_total_tokens in pages")
    ] = None
    swa_full_tokens_ratio: Annotated[
        float | None,
        Meta(
            description="KV cache tokens of layers with a sliding window, as a share of those of the other layers; "
            "default: what requests of half of context_length need, of at most 16384 tokens; if it is not set, of 4096"
        ),
    ] = None
    disable_hybrid_swa_memory: Annotated[
        bool, Meta(description="keep whole sequences in the KV cache also for layers with a sliding window")
    ] = False
    max_running_requests: Annotated[
        int | None,
        Meta(
            description="maximum running requests per rank; default: 32 on a CPU, else 256; fewer if the model keeps a "
            "state for each sequence, and memory has no room for more"
        ),
    ] = None
    max_mamba_cache_size: Annotated[
        int | None,
        Meta(
            description="states of sequences per rank, of running requests and of cached prefixes, in models that keep "
            "some (gated delta nets); default: half as many more than max_running_requests, at least 8 more"
        ),
    ] = None
    state_snapshot_interval: Annotated[
        int,
        Meta(
            description="in models that keep a state for each sequence: tokens of a long prompt after which its state "
            "is kept, so that prompts that begin alike can use it; 0: only at its end, and where prompts branched"
        ),
    ] = 0
    max_queued_requests: Annotated[
        int | None, Meta(description="maximum waiting requests; further ones are answered 503; default: no limit")
    ] = None
    max_num_queued_reqs: Annotated[
        int | None,
        Meta(
            description="maximum requests, waiting or running, of all ranks and replicas; one of n samples counts n; "
            "further ones are answered 503; default: no limit"
        ),
    ] = None
    max_num_queued_tokens: Annotated[
        int | None,
        Meta(
            description="requests are answered 503 while at least this many tokens of prompts wait to be computed; "
            "default: no limit"
        ),
    ] = None
    chunked_prefill_size: Annotated[
        int | None,
        Meta(description="maximum prompt tokens per step and rank; -1: no chunking; default: 512 on a CPU, else 2048"),
    ] = None
    max_prefill_tokens: Annotated[
        int | None,
        Meta(description="another limit of the prompt tokens per step and rank; default: chunked_prefill_size"),
    ] = None
    long_prefill_token_threshold: Annotated[
        int,
        Meta(
            description="maximum tokens of one prompt per step while other requests are open, so that it leaves room "
            "for them; 0: no limit"
        ),
    ] = 0
    max_num_batched_tokens: Annotated[
        int | None, Meta(description="maximum tokens per step, decodes included; default: fits chunked_prefill_size")
    ] = None
    max_mixed_step_ms: Annotated[
        int | None,
        Meta(
            description="longest step, in milliseconds, that computes a part of a long prompt while other requests "
            "decode; measured step times choose the part; 0: no limit; default: 250 on a CPU, else 0"
        ),
    ] = None
    pooled_time_share: Annotated[
        float,
        Meta(
            description="share of the time that pooled requests have while others are open, by measured step times; 1: "
            "no limit, but they come after others"
        ),
    ] = 0.1
    cuda_graph_max_bs: Annotated[
        int | None,
        Meta(description="decode batches up to this size get finely spaced programs; default: 160; on a CPU, few"),
    ] = None
    cuda_graph_bs: Annotated[
        tuple[int, ...] | None, Meta(description="sizes of the decode programs, instead of the default spacing")
    ] = None
    schedule_policy: Annotated[
        Literal["lpm", "fcfs", "priority", "shortest-prefill-first", "random"],
        Meta(
            description="order in which waiting requests start; lpm: longest cached prefix first (fcfs while more than "
            "128 wait); fcfs: first come, first served; priority: higher `priority` first, preempting lower ones"
        ),
    ] = "lpm"
    schedule_low_priority_values_first: Annotated[
        bool, Meta(description="with schedule_policy priority, a lower number is a higher priority, as in vLLM")
    ] = False
    default_priority_value: Annotated[int, Meta(description="priority of requests that name none")] = 0
    disable_priority_preemption: Annotated[
        bool, Meta(description="with schedule_policy priority, running requests are not retracted for others")
    ] = False
    priority_scheduling_preemption_threshold: Annotated[
        int,
        Meta(description="a running request is retracted for one whose priority is higher by more than this"),
    ] = 0
    prefill_max_requests: Annotated[
        int | None, Meta(description="maximum requests whose prompts one step computes, per rank; default: no limit")
    ] = None
    retraction_policy: Annotated[
        Literal["length", "priority"],
        Meta(
            description="which running request is retracted first when pages are short; length: the one with fewest "
            "output tokens; priority: the one of lowest priority, then by length; always with schedule_policy priority"
        ),
    ] = "length"
    schedule_conservativeness: Annotated[
        float,
        Meta(description="room kept for the output of running requests; lower starts more, higher retracts fewer"),
    ] = 1.0
    disable_radix_cache: Annotated[bool, Meta(description="disable prefix caching: compute every prompt in full")] = (
        False
    )
    radix_eviction_policy: Annotated[
        Literal["lru", "lfu", "priority"],
        Meta(
            description="which unused pages of the prefix cache are evicted first; lru: those unused for longest; lfu: "
            "those used least often; priority: those of requests of lowest priority; then the least recently used"
        ),
    ] = "lru"
    enable_hierarchical_cache: Annotated[
        bool, Meta(description="keep pages evicted from the device's KV cache in host memory, and load them on demand")
    ] = False
    hicache_ratio: Annotated[float, Meta(description="pages in host memory, as a multiple of those on the device")] = (
        2.0
    )
    hicache_size: Annotated[
        float | None, Meta(description="GB of host memory for cached pages, instead of the ratio")
    ] = None
    hicache_host_memory_fraction: Annotated[
        float | None,
        Meta(
            description="share of the host's available memory for cached pages, of all replicas together, instead of "
            "the ratio"
        ),
    ] = None
    hicache_write_policy: Annotated[
        Literal["write_through", "write_back"],
        Meta(
            description="when pages are copied to host memory; write_through: once computed, so that eviction costs "
            "nothing; write_back: when evicted, so that host memory holds other pages than the device"
        ),
    ] = "write_through"
    kv_events_config: Annotated[
        KvEventsConfig | None,
        Meta(
            description="where each rank publishes which prefixes it has cached, for routers: JSON with vLLM's keys, "
            'such as {"publisher": "zmq", "endpoint": "tcp://*:5557"}; default: nowhere'
        ),
    ] = None
    speculative_method: Annotated[
        Literal["none", "ngram", "draft", "eagle", "eagle3", "mtp"],
        Meta(
            description="how tokens are drafted for the model to verify in one step; ngram: those that followed the "
            "same tokens earlier; draft: by a smaller model; eagle, eagle3: by a head of speculative_model; mtp: by "
            "the model's own layers; answers stay the same"
        ),
    ] = "none"
    speculative_model: Annotated[
        str | None, Meta(description="model or head that drafts; with no speculative_method, the method is draft")
    ] = None
    num_speculative_tokens: Annotated[
        int | None, Meta(description="maximum draft tokens per request and step; default: 7 with ngram, else 4")
    ] = None
    speculative_disable_by_batch_size: Annotated[
        int | None,
        Meta(description="no tokens are drafted while more requests run per rank; default: as measured times decide"),
    ] = None
    prompt_lookup_max: Annotated[
        int, Meta(description="number of last tokens that ngram looks for at first, to draft those that followed")
    ] = 4
    prompt_lookup_min: Annotated[
        int, Meta(description="number of last tokens that ngram looks for at least, after longer ones weren't found")
    ] = 2
    disable_overlap_schedule: Annotated[
        bool, Meta(description="plan each step only after the previous one has ended; for comparisons")
    ] = False
    enable_deterministic_inference: Annotated[
        bool,
        Meta(
            description="refuse to start unless a request's result is the same, bit for bit, in any batch; on a CPU it "
            "usually is without this flag: the log at start-up says so"
        ),
    ] = False
    programs: Annotated[
        str | None,
        Meta(description="folder of programs made by `jaxserve compile --output`; then nothing is compiled"),
    ] = None
    program_cache_dir: Annotated[
        str | None, Meta(description="folder for compiled programs; default: $JAXSERVE_HOME/programs")
    ] = None
    disable_program_cache: Annotated[bool, Meta(description="compile at every start; write no programs to disk")] = (
        False
    )
    watchdog_timeout: Annotated[
        float,
        Meta(
            description="seconds without a finished step while requests are open, or without a sign of life from the "
            "engine, until /health answers 503; at most 30 for an idle engine"
        ),
    ] = 300.0
    soft_watchdog_timeout: Annotated[
        float | None,
        Meta(
            description="seconds without a finished step while requests are open, after which the log has the stacks "
            "of the engine's threads, once; default: never"
        ),
    ] = None
    profile_dir: Annotated[
        str | None, Meta(description="folder where /start_profile writes profiles; required for profiling")
    ] = None
    decode_log_interval: Annotated[int, Meta(description="decode steps between two 'Decode batch' log lines")] = 40
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="lowest severity of log lines that are written")
    ] = "info"
    log_config_file: Annotated[
        str | None, Meta(description="JSON file for Python's logging.config.dictConfig, instead of lines on stderr")
    ] = None

    def with_defaults(self, **values: Any) -> EngineConfig:
        """Return a copy in which settings that are None have these values."""
        return msgspec.structs.replace(
            self, **{name: value for name, value in values.items() if getattr(self, name) is None}
        )

    def masked(self) -> EngineConfig:
        """Return a copy to show to others, with the token masked."""
        return self if self.hf_token is None else msgspec.structs.replace(self, hf_token="***")

    def __post_init__(self) -> None:
        check_ranges(self, ENGINE_RANGES)
        if self.hf_token is not None and re.fullmatch("[!-~]+", self.hf_token) is None:
            raise ConfigError("hf_token must be a token such as hf_…, without blanks; leave it out if there is none")
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size must be a power of two, got {self.page_size}")
        if self.mem_fraction_static is not None and not 0.0 < self.mem_fraction_static <= 1.0:
            raise ConfigError(f"mem_fraction_static must be in (0, 1], got {self.mem_fraction_static}")
        if self.chunked_prefill_size == 0:
            raise ConfigError("chunked_prefill_size must be positive, or -1 to disable chunking; got 0")
        if self.long_prefill_token_threshold and self.chunked_prefill_size == -1:
            raise ConfigError(
                f"long_prefill_token_threshold={self.long_prefill_token_threshold} computes prompts in parts, and "
                "chunked_prefill_size=-1 asks for none; keep one"
            )
        if self.ep_size == 0:
            raise ConfigError("ep_size must be positive, or -1 for one part on each device; got 0")
        data, tensor = ranks_and_shards(
            tensor=self.tp_size, data=self.dp_size, parts=self.ep_size, dp_attention=self.enable_dp_attention
        )
        check_processes(
            nnodes=self.nnodes,
            node_rank=self.node_rank,
            address=self.dist_init_addr,
            tensor=tensor,
            data=data,
            stages=self.pp_size,
            mode=self.dp_mode,
        )
        layer_partition(self)
        if self.nnodes > 1 and self.programs is not None:
            raise ConfigError(
                f"programs={self.programs}: with nnodes={self.nnodes} every process compiles; leave programs out"
            )
        self._check_pool()
        self._check_priorities()
        self._check_devices()
        self._check_hierarchical_cache()
        if self.kv_events_config is not None:
            if self.disable_radix_cache:
                raise ConfigError(
                    "kv_events_config publishes the content of the cache that disable_radix_cache disables; keep one"
                )
            self.kv_events_config.check_ranks(data)
        check_speculation(
            method=self.speculative_method,
            runner=self.runner,
            model=self.speculative_model,
            num_tokens=self.num_speculative_tokens,
            disable_by_batch_size=self.speculative_disable_by_batch_size,
            lookup_max=self.prompt_lookup_max,
            lookup_min=self.prompt_lookup_min,
        )
        if self.calculate_kv_scales and self.kv_cache_dtype == "auto":
            raise ConfigError("calculate_kv_scales needs an fp8 KV cache: set kv_cache_dtype to fp8_e4m3 or fp8_e5m2")
        if self.calculate_kv_scales and self.pp_size > 1:
            raise ConfigError(
                f"calculate_kv_scales runs all layers at once, and pp_size={self.pp_size} divides them: leave one out; "
                "scales that the checkpoint has are used with any pp_size"
            )
        if self.disable_hybrid_swa_memory and self.swa_full_tokens_ratio is not None:
            raise ConfigError(
                f"swa_full_tokens_ratio={self.swa_full_tokens_ratio:g} divides the KV cache, and "
                "disable_hybrid_swa_memory leaves it undivided; keep one"
            )
        sizes = self.cuda_graph_bs
        if sizes is not None and (not sizes or min(sizes) < 1 or max(sizes) > MOST):
            raise ConfigError(f"cuda_graph_bs must be positive sizes, got {list(sizes)}")

    @property
    def memory_fraction(self) -> float:
        """The share of a device's memory that may be used."""
        default = DEFAULT_MEM_FRACTION if self.kv_cache_memory_bytes is None else _MEM_FRACTION_WITH_KV_BYTES
        return self.mem_fraction_static or default

    @property
    def pool_tokens(self) -> int | None:
        """The KV cache tokens of whole sequences per rank, if a setting says how many."""
        pages = self.num_gpu_blocks_override
        return self.max_total_tokens if pages is None else pages * self.page_size

    def with_pool_tokens(self, tokens: int | None) -> EngineConfig:
        """Return a copy that sets the size of the KV cache to these tokens of whole sequences per rank."""
        return msgspec.structs.replace(
            self, max_total_tokens=tokens, num_gpu_blocks_override=None, kv_cache_memory_bytes=None
        )

    @property
    def uses_priorities(self) -> bool:
        """Whether the priority of a request has any effect."""
        return "priority" in (self.schedule_policy, self.retraction_policy, self.radix_eviction_policy)

    def _check_pool(self) -> None:
        sizes = ("kv_cache_memory_bytes", "max_total_tokens", "num_gpu_blocks_override")
        given = [name for name in sizes if getattr(self, name) is not None]
        if given[:1] == ["kv_cache_memory_bytes"] and self.mem_fraction_static is not None:
            given.append("mem_fraction_static")
        if len(given) > 1:
            raise ConfigError(f"{given[0]} and {given[1]} both set the size of the KV cache; keep one")

    def _check_priorities(self) -> None:
        if not self.uses_priorities:
            for name, nothing in (("schedule_low_priority_values_first", False), ("default_priority_value", 0)):
                if getattr(self, name) != nothing:
                    raise ConfigError(
                        f"{name} needs schedule_policy, retraction_policy or radix_eviction_policy to be priority"
                    )
        threshold = self.priority_scheduling_preemption_threshold
        if self.schedule_policy != "priority" and (self.disable_priority_preemption or threshold):
            raise ConfigError(
                "disable_priority_preemption and priority_scheduling_preemption_threshold need schedule_policy=priority"
            )
        if self.disable_priority_preemption and threshold:
            raise ConfigError(
                f"priority_scheduling_preemption_threshold={threshold} says for which requests others are retracted, "
                "and disable_priority_preemption that they are for none; keep one"
            )
        if self.disable_radix_cache and self.radix_eviction_policy != "lru":
            raise ConfigError(
                f"radix_eviction_policy={self.radix_eviction_policy} says what is evicted from the cache that "
                "disable_radix_cache disables; keep one"
            )

    def _check_devices(self) -> None:
        ids = self.device_ids
        if ids is None:
            return
        if not ids or min(ids) < 0 or len(set(ids)) < len(ids):
            raise ConfigError(f"device_ids must be different numbers from 0, such as 2,3; got {list(ids)}")
        if (self.base_gpu_id, self.gpu_id_step) != (0, 1):
            raise ConfigError(
                f"device_ids={','.join(map(str, ids))} and base_gpu_id={self.base_gpu_id} with "
                f"gpu_id_step={self.gpu_id_step} both choose devices; keep one"
            )

    def _check_hierarchical_cache(self) -> None:
        if self.enable_hierarchical_cache and self.disable_radix_cache:
            raise ConfigError("enable_hierarchical_cache needs the cache that disable_radix_cache disables; keep one")
        if not self.enable_hierarchical_cache and (
            (self.hicache_ratio, self.hicache_size, self.hicache_host_memory_fraction, self.hicache_write_policy)
            != (2.0, None, None, "write_through")
        ):
            raise ConfigError(
                "hicache_ratio, hicache_size, hicache_host_memory_fraction and hicache_write_policy need "
                "enable_hierarchical_cache"
            )
        if self.hicache_host_memory_fraction is not None and (self.hicache_ratio, self.hicache_size) != (2.0, None):
            other = "hicache_ratio" if self.hicache_size is None else "hicache_size"
            raise ConfigError(
                f"hicache_host_memory_fraction={self.hicache_host_memory_fraction:g} and {other}="
                f"{getattr(self, other):g} both size the pages in host memory; keep one"
            )
