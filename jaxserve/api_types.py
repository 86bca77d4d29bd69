"""What crosses the border between a client (API process, `LLM`) and the engine.

Everything here is frozen and encodes to msgpack. Nothing here knows text: ids in, ids out.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from jaxserve.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_STOP_IDS = 16
MAX_STOP_CHARACTERS = 4096

# Steps are counted by how many tokens they computed, up to each of these and beyond: vLLM's buckets.
STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class FinishReason(enum.StrEnum):
    """Why a request ended; the values are OpenAI's where OpenAI has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


# What a field may hold. The server decodes by these types and puts them into its schema; `SamplingParams` checks them.
TokenCount = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Temperature = Annotated[float, Meta(ge=0.0, le=100.0)]
TopP = Annotated[float, Meta(gt=0.0, le=1.0)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
MinP = Annotated[float, Meta(ge=0.0, le=1.0)]
RepetitionPenalty = Annotated[float, Meta(gt=0.0, le=100.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
NumSamples = Annotated[int, Meta(ge=1, le=128)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
_BIAS, _TOKEN_ID = Meta(ge=-100.0, le=100.0), Meta(ge=0, le=2**31 - 1)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of one request are chosen. Raises `InvalidRequestError` naming the field that is out of range.

    `temperature` 0 is greedy. `top_k` 0 or -1 means all. `logprobs` and `prompt_logprobs` count the alternatives wanted
    beside each token (0 to 20), `None` none at all. Log probabilities are those of the model, before penalties,
    temperature and truncation. The randomness of a request depends on `seed`, the sample and the position alone.
    `stop_regex` are patterns that end the output as `stop` strings do.
    """

    max_tokens: TokenCount = 16
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: dict[int, float] = {}
    min_tokens: TokenCount = 0
    seed: Seed | None = None
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: NumSamples = 1
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name, bounds in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None:
                _in_range(name, value, bounds)
        if self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens must be in [0, {self.max_tokens}], the most tokens there may be, got {self.min_tokens}",
                param="min_tokens",
            )
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are supported",
                param="logit_bias",
            )
        for token, bias in self.logit_bias.items():
            _in_range("logit_bias", bias, _BIAS)
            _in_range("logit_bias", token, _TOKEN_ID)
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise InvalidRequestError(
                f"stop_token_ids has {len(self.stop_token_ids)} entries; at most {MAX_STOP_IDS} are supported",
                param="stop_token_ids",
            )
        for name in ("stop", "stop_regex"):
            if not all(getattr(self, name)):
                raise InvalidRequestError(f"{name} must not hold an empty string", param=name)
        longest = max(map(len, self.stop), default=0)
        if longest > MAX_STOP_CHARACTERS:
            raise InvalidRequestError(
                f"stop holds a string of {longest} characters; at most {MAX_STOP_CHARACTERS} are supported",
                param="stop",
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, with nothing changing the logits and no log probabilities wanted."""
        return (
            self.temperature == 0.0
            and not self.penalized
            and not self.logit_bias
            and self.min_tokens == 0
            and self.logprobs is None
        )

    @property
    def penalized(self) -> bool:
        """Whether the counts of earlier tokens change the logits."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


def _bounds_of(hint: object) -> Meta | None:
    found = [*getattr(hint, "__metadata__", ())]
    for part in getattr(hint, "__args__", ()):
        found += getattr(part, "__metadata__", ())
    return next((meta for meta in found if isinstance(meta, Meta)), None)


_BOUNDS = {
    field.name: bounds
    for field in msgspec.structs.fields(SamplingParams)
    if (bounds := _bounds_of(field.type)) is not None
}


def _in_range(name: str, value: float, bounds: Meta) -> None:
    low, high = bounds.gt if bounds.ge is None else bounds.ge, bounds.le
    assert low is not None
    assert high is not None
    # NaN is within no bounds. (math.isfinite raises for an int that no float can hold.)
    inside = (low < value if bounds.ge is None else low <= value) and value <= high
    if isinstance(value, bool) or not inside:
        left = "(" if bounds.ge is None else "["
        raise InvalidRequestError(f"{name} must be in {left}{low}, {high}], got {value}", param=name)


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to compute. `n` samples of a prompt are `n` of these with one `group_id` and `sample` 0 to n-1.

    `stop_ids` is the whole set of ids that end the output: the model's own (unless `ignore_eos`) and the request's.
    `client` is the index of the API process the events go to.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    stop_ids: tuple[int, ...] = ()
    group_id: str = ""
    sample: int = 0
    priority: int = 0
    namespace: str = ""
    client: int = 0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The log probability of one token, and those of the likeliest alternatives, best first."""

    token_id: int
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """Token counts of one sequence. `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """What a client sees of a request: new tokens, and exactly once, last, a `finish_reason`.

    A token that ended the output by being a stop id is in `token_ids` and named by `stop_id`. `prompt_logprobs` comes
    once, with the first event; its first entry is None, as nothing precedes the first token. `queue_seconds` comes with
    the first event too: how long the request waited in the engine before it first ran.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_id: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    usage: Usage | None = None
    error: str | None = None
    queue_seconds: float | None = None


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine is, said once when it is ready. Sizes are in tokens; times in seconds by start-up phase.

    `quantization` is gguf where weights are kept as a GGUF file has them, else none. Of each device's memory, weights
    take `weight_bytes`; `free_bytes` were left once all was allocated, of which the programs take `working_bytes` while
    they run; `memory_bound` says that more of it would have made the KV cache larger. `working_bytes` is the compiler's
    figure and a margin then, else an estimate. `deterministic`: a request gives the same bits whatever it is batched
    with.
    """

    max_model_len: int
    vocab_size: int
    page_size: int
    num_pages: int
    max_running_requests: int
    chunked_prefill_size: int
    device: str
    dtype: str
    attention_backend: str
    num_programs: int
    startup_seconds: dict[str, float]
    num_compiled_programs: int = 0
    schedule_policy: str = "fcfs"
    free_bytes: int = 0
    working_bytes: int = 0
    memory_bound: bool = False
    quantization: str = "none"
    weight_bytes: int = 0
    deterministic: bool = False

    @property
    def max_total_num_tokens(self) -> int:
        """Tokens of KV cache the pool holds."""
        return self.num_pages * self.page_size


class Profile(msgspec.Struct, frozen=True, array_like=True):
    """A profile: the folder that its files are in, or will be, and how many steps ended while it was recorded."""

    directory: str
    num_steps: int = 0

    def __str__(self) -> str:
        return f"{self.num_steps} steps, in {self.directory}"


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A reading of the engine, sent with the events of a step and when asked for. Counters only ever grow.

    `num_deferred` of the waiting ones wait for a prefix that another request computes. Pages are free, cached and
    evictable, or in use; `token_usage` is the share in use. `cache_query_tokens` counts the prompt tokens of requests
    that started, `cache_hit_tokens` those of them that were found in the prefix cache; what is computed again after a
    retraction counts in neither. `num_host_pages_used` of `num_host_pages` pages of host memory hold what the cache
    keeps there; so far `host_save_pages` were copied to it and `host_load_pages` from it. `decode_rows` of
    `decode_bucket_rows` rows of the decode programs that ran were live, and `mixed_tokens` of `mixed_bucket_tokens`
    tokens of the mixed ones: the rest was padding. `coarse_decode_steps` of `decode_steps` ran beyond the finely spaced
    programs (`cuda graph: False` in the log). Of `num_preemptions` requests that were sent back to the queue,
    `num_retractions` were for want of KV cache, the others for a higher priority. All steps together computed
    `step_tokens`; `steps_by_tokens` counts the steps of so many, for each of `STEP_TOKEN_BUCKETS` and for more. Only in
    a reading that was asked for: how many decode steps had so many rows, and what the audit of the books found.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0
    num_free_pages: int = 0
    num_evictable_pages: int = 0
    num_pages: int = 0
    token_usage: float = 0.0
    new_token_ratio: float = 0.0
    num_steps: int = 0
    num_preemptions: int = 0
    num_retractions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cache_query_tokens: int = 0
    cache_hit_tokens: int = 0
    num_host_pages: int = 0
    num_host_pages_used: int = 0
    host_save_pages: int = 0
    host_load_pages: int = 0
    decode_steps: int = 0
    coarse_decode_steps: int = 0
    decode_rows: int = 0
    decode_bucket_rows: int = 0
    mixed_tokens: int = 0
    mixed_bucket_tokens: int = 0
    step_tokens: int = 0
    steps_by_tokens: tuple[int, ...] = (0,) * (len(STEP_TOKEN_BUCKETS) + 1)
    compiles_after_ready: int = 0
    integrity_errors: tuple[str, ...] = ()
    decode_steps_by_rows: dict[int, int] = {}


class ReplicaReading(msgspec.Struct, frozen=True):
    """One engine process: its process id, and the last reading that came from it."""

    pid: int
    stats: EngineStats


class Devices(msgspec.Struct, frozen=True, kw_only=True):
    """What jax finds to run on: `platform` is cpu, gpu or tpu; a TPU chip may be several devices. `problem` says why
    there is none."""

    platform: str = ""
    num_devices: int = 0
    num_chips: int = 0
    problem: str | None = None
