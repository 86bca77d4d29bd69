"""The messages between a client of the engine (an API process or `LLM`) and the engine.

All are frozen and can be encoded as msgpack. They hold token ids, never text.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from jaxserve.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_STOP_IDS = 16
MAX_STOP_CHARACTERS = 4096
# States of a grammar's automaton, which takes 1 to 2 KB for each.
MAX_LEXER_STATES = 25_000

# Upper bounds of a histogram of steps by the tokens they computed: vLLM's buckets.
STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class FinishReason(enum.StrEnum):
    """The reason why a request ended, as OpenAI names it if it has a name for it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


# Types with the bounds of request fields. The server decodes requests by them and has them in its schema;
# `SamplingParams` checks them again. Numbers are computed in float32: one that float32 rounds to 0 counts as 0.
TokenCount = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
NumSamples = Annotated[int, Meta(ge=1, le=128)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
_Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
_BIAS, _TOKEN_ID = Meta(ge=-100.0, le=100.0), Meta(ge=0, le=2**31 - 1)


@dataclass(frozen=True)
class Help:
    """The help text of a numeric field of `SamplingParams`, for flags.

    `is_shared`: all APIs have the field by the same name, as does `jaxserve bench serve`, and take it from here.
    """

    text: str
    is_shared: bool = False


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form that an output must have; exactly one of the first six fields gives it. The names are vLLM's.

    `json` is a JSON schema, as an object or as text, and `json_object` asks for any object. `grammar` is Lark or GBNF.
    `structural_tag` has a `format`, or `structures` and `triggers`. JSON may have blanks of `whitespace_pattern`
    between its parts, by default at most two or a line break and an indentation, or none with `disable_any_whitespace`.
    With `disable_additional_properties`, objects have only properties that the schema names. A keyword that a grammar
    can hardly hold (`uniqueItems` of many values) is left to the client, or with `strict` refused.
    Raises `InvalidRequestError` unless exactly one form is given.
    """

    json: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        given = [name for name in STRUCTURED_FORMS if self._given(name)]
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_outputs needs exactly one of {', '.join(STRUCTURED_FORMS)}, got "
                f"{' and '.join(given) or 'none'}",
                param="structured_outputs",
            )

    @property
    def form(self) -> tuple[str, Any]:
        """The name of the field that is given, and its value."""
        return next((name, getattr(self, name)) for name in STRUCTURED_FORMS if self._given(name))

    def _given(self, name: str) -> bool:
        value = getattr(self, name)
        return value is not None and (name != "json_object" or value is True)


STRUCTURED_FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose the tokens of one request. Raises `InvalidRequestError` naming a field that is out of range.

    `temperature` 0 is greedy. `top_k` 0 or -1 means all tokens. `logprobs` and `prompt_logprobs` are the number of
    alternatives to report with each token (0 to 20); None reports no log probabilities. They are the model's own,
    before penalties, temperature and truncation. The randomness of a request depends on `seed`, the sample and the
    position alone. `stop_regex` are patterns that end the output as `stop` strings do.
    `structured_outputs` is the form that the output must have.
    """

    max_tokens: Annotated[TokenCount, Help("maximum number of tokens of the answer")] = 16
    temperature: Annotated[
        float, Meta(ge=0.0, le=100.0), Help("0 always selects the most likely token", is_shared=True)
    ] = 1.0
    top_p: Annotated[
        float,
        Meta(gt=0.0, le=1.0),
        Help("sample from the most likely tokens whose probabilities sum to this", is_shared=True),
    ] = 1.0
    top_k: Annotated[
        int, Meta(ge=-1, le=2**31 - 1), Help("sample from this many most likely tokens; 0 means all", is_shared=True)
    ] = 0
    min_p: Annotated[
        float,
        Meta(ge=0.0, le=1.0),
        Help("exclude tokens less likely than this fraction of the most likely one", is_shared=True),
    ] = 0.0
    # Logits are divided by it: near 0 they would be infinite.
    repetition_penalty: Annotated[
        float,
        Meta(ge=0.01, le=100.0),
        Help("above 1 makes tokens of the prompt and the answer less likely", is_shared=True),
    ] = 1.0
    frequency_penalty: Annotated[
        _Penalty, Help("lowers tokens in proportion to their count in the answer", is_shared=True)
    ] = 0.0
    presence_penalty: Annotated[_Penalty, Help("lowers tokens that are already in the answer", is_shared=True)] = 0.0
    logit_bias: dict[int, float] = {}
    min_tokens: Annotated[TokenCount, Help("minimum number of tokens before the answer may end")] = 0
    seed: Annotated[Seed | None, Help("makes sampling repeatable")] = None
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: NumSamples = 1
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        for name, bounds in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None:
                _in_range(name, value, bounds)
        if self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens must be in [0, max_tokens={self.max_tokens}], got {self.min_tokens}",
                param="min_tokens",
            )
        for name, most in (("logit_bias", MAX_LOGIT_BIAS), ("stop_token_ids", MAX_STOP_IDS)):
            count = len(getattr(self, name))
            if count > most:
                raise InvalidRequestError(f"{name} has {count} entries; at most {most} are supported", param=name)
        for token, bias in self.logit_bias.items():
            _in_range("logit_bias", bias, _BIAS)
            _in_range("logit_bias", token, _TOKEN_ID)
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
        """Whether to take the likeliest token of unchanged logits, without log probabilities."""
        return (
            self.temperature == 0.0
            and not self.penalized
            and not self.logit_bias
            and self.min_tokens == 0
            and self.logprobs is None
        )

    @property
    def penalized(self) -> bool:
        """Whether penalties change the logits, so that earlier tokens must be counted."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


def _leaves(hint: object) -> Iterator[object]:
    """Yield the parts of a type: its annotations, then the plain types."""
    yield from getattr(hint, "__metadata__", ())
    parts = getattr(hint, "__args__", ())
    for part in parts:
        yield from _leaves(part)
    if not parts:
        yield hint


class NumberOption(NamedTuple):
    """A numeric field of `SamplingParams` with a help text: its type with the bounds, and the plain one."""

    hint: Any
    kind: type[int] | type[float]
    help: Help


_FIELDS = {field.name: (field.type, [*_leaves(field.type)]) for field in msgspec.structs.fields(SamplingParams)}
_BOUNDS = {name: leaf for name, (_, leaves) in _FIELDS.items() for leaf in leaves if isinstance(leaf, Meta)}
NUMBER_OPTIONS = {
    name: NumberOption(hint, int if int in leaves else float, leaf)
    for name, (hint, leaves) in _FIELDS.items()
    for leaf in leaves
    if isinstance(leaf, Help)
}
SHARED_OPTIONS = tuple(name for name, option in NUMBER_OPTIONS.items() if option.help.is_shared)


def _in_range(name: str, value: float, bounds: Meta) -> None:
    low, high = bounds.gt if bounds.ge is None else bounds.ge, bounds.le
    assert low is not None
    assert high is not None
    # NaN fails both comparisons. (math.isfinite would raise for an int that no float can hold.)
    inside = (low < value if bounds.ge is None else low <= value) and value <= high
    if isinstance(value, bool) or not inside:
        left = "(" if bounds.ge is None else "["
        raise InvalidRequestError(f"{name} must be in {left}{low}, {high}], got {value}", param=name)


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens of reasoning an output may have, and what ends the reasoning then.

    The output begins `inside` its reasoning, or reasoning begins with one of the texts `begins`; one of `ends` ends it.
    With `once`, it can only come first, with blanks before it; else it may begin again. `fragments` are the bytes of
    all tokens that have a part of such a text, of blank ones and of those without text; others have no part in one.
    When `num_tokens` tokens of reasoning have been drawn, counted over all its parts, the first of the `closings`
    follows, and if reasoning begins again, the next one, the last of them from then on. A text of `begins` has at least
    `num_begin_tokens` tokens.
    """

    num_tokens: int
    inside: bool
    once: bool
    begins: tuple[bytes, ...]
    ends: tuple[bytes, ...]
    fragments: dict[int, bytes]
    closings: tuple[tuple[int, ...], ...]
    num_begin_tokens: int = 1


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to compute. `n` samples of a prompt are `n` requests with one `group_id` and `sample` 0 to n-1.

    `stop_ids` are all ids that end the output: the model's own (unless `ignore_eos`) and those of the request. `client`
    is the index of the API process that gets the events. `grammar` is a text of llguidance that the output must
    match, if it is not empty. `thinking` bounds its reasoning. A `pooled` one produces no tokens, but a vector. If its
    prompt is a pair of texts that the model tells apart, the tokens from `second_start` on are those of the second. A
    `priority` of None is the engine's default.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    stop_ids: tuple[int, ...] = ()
    group_id: str = ""
    sample: int = 0
    priority: int | None = None
    namespace: str = ""
    client: int = 0
    grammar: str = ""
    thinking: ThinkingBudget | None = None
    pooled: bool = False
    second_start: int | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The log probability of one token, and those of the likeliest tokens at its position, best first."""

    token_id: int
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """The token counts of one sequence. `cached_tokens` of the prompt were found in the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of a request, for its client. Only the last event of a request has a `finish_reason`.

    A stop id that ended the output is the last of `token_ids` and also `stop_id`. Only the first event has
    `prompt_logprobs`, whose first entry is None, as nothing precedes the first token, and `queue_seconds`, the time
    that the request waited in the engine before it first ran. The first and the last event have the `usage` so far.
    The only event of a pooled request has its vector, `pooled`: float32 numbers in the byte order of the machine.
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
    pooled: bytes | None = None


class KVGroup(msgspec.Struct, frozen=True):
    """Layers of a model that share one KV cache of `num_pages` pages over all ranks.

    Layers with a window keep the last `window` positions of a sequence, the others (None) keep whole sequences.
    """

    num_layers: int
    num_pages: int
    window: int | None = None


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about an engine, sent once when it is ready. Sizes are in tokens; times in seconds, by start-up phase.

    `num_pages` counts pages of whole sequences; `kv_groups` are all groups of layers with a KV cache of their own.
    `quantization` is the format of quantized weights (gguf, awq, int4, …), or none. On each device, weights take
    `weight_bytes`, and `free_bytes` were left after all was allocated; running programs take `working_bytes` of these.
    `memory_bound` says that the KV cache would be larger with more memory; `working_bytes` is then the compiler's
    figure plus a margin, else an estimate. `deterministic` says that a request gives the same bits in any batch. A
    model that keeps a state for each sequence has `num_states`, each of `state_bytes` on a device. `uses_priorities`
    says that the priority of a request has any effect.
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
    kv_groups: tuple[KVGroup, ...] = ()
    num_states: int = 0
    state_bytes: int = 0
    uses_priorities: bool = False

    @property
    def max_total_num_tokens(self) -> int:
        """The number of tokens that the KV cache holds."""
        return self.num_pages * self.page_size


class ProfileInfo(msgspec.Struct, frozen=True, array_like=True):
    """The folder of a profile, whose files may not be written yet, and how many steps ended while it was recorded."""

    directory: str
    num_steps: int = 0

    def __str__(self) -> str:
        return f"{self.num_steps} steps, in {self.directory}"


class StageTimes(msgspec.Struct, frozen=True, array_like=True):
    """How many seconds a pipeline stage has computed, and waited for the input of steps that were planned."""

    compute_seconds: float = 0.0
    wait_seconds: float = 0.0

    @property
    def busy(self) -> float:
        """The share of the time that it computed, 0 to 1."""
        return self.compute_seconds / (self.compute_seconds + self.wait_seconds) if self.compute_seconds else 0.0


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of an engine, sent with the events of a step and on request. Counters never decrease.

    - Of the `num_waiting` requests, `num_deferred` wait for a prefix that another request computes. `num_queued_tokens`
      prompt tokens are in no step yet. `num_finished` requests have ended, aborted ones included.
    - A page is free, evictable (cached but unused) or in use; `token_usage` is the share in use, the largest of all KV
      groups. `num_pages` and the like count pages of the first group, which keeps whole sequences; of the
      `num_window_pages` of each group with a window, `num_free_window_pages` are free or evictable.
    - `prompt_tokens` counts prompts when they are complete, `prefill_tokens` what each step computes of them.
    - `cache_query_tokens` counts the prompt tokens of requests that started, `cache_hit_tokens` those found in the
      prefix cache. Tokens computed again after a retraction count in neither.
    - `num_host_pages_used` of `num_host_pages` pages of host memory are in use; `host_save_pages` were copied to it and
      `host_load_pages` from it.
    - In a model that keeps a state for each sequence, running requests have `num_states_used` of `num_states` rows, and
      `num_state_snapshots` are snapshots, at which cached prefixes can end. `state_snapshots_taken` were taken so far,
      `state_snapshots_evicted` of them for room, and requests began with one `state_snapshots_found` times.
      `state_recomputed_tokens` tokens had cached pages, but no snapshot, so they were computed again.
    - `decode_rows` of `decode_bucket_rows` rows of the decode programs that ran were live, `verify_tokens` of
      `verify_bucket_tokens` tokens of those that verify drafts, and `mixed_tokens` of `mixed_bucket_tokens` tokens of
      the mixed ones; the rest was padding.
    - `coarse_decode_steps` of `decode_steps` were larger than the finely spaced programs (`cuda graph: False` in the
      log).
    - `num_preemptions` requests were sent back to the queue: `num_retractions` because the KV cache was full, the
      others for a request of higher priority.
    - `num_drafts` times, a request's draft was verified. Of their `draft_tokens`, `accepted_tokens` became output, and
      `accepted_by_position[i]` drafts had token i accepted. Without speculation all are 0, and the last is ().
    - Of the `generation_tokens`, grammars and budgets for reasoning forced `forced_tokens`, without a draw.
    - `step_tokens` is the sum over all steps; `steps_by_tokens` counts the steps in each of `STEP_TOKEN_BUCKETS`, and
      last the longer steps.
    - `stages` are the times of the pipeline stages, () if there is only one.
    - Only metrics sent on request have `decode_steps_by_rows`; `integrity_errors`, the faults that the integrity check
      found; and `expert_tokens[i][j]`, how many tokens expert j of layer i computed. A dense layer has no experts.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0
    num_queued_tokens: int = 0
    num_finished: int = 0
    num_free_pages: int = 0
    num_evictable_pages: int = 0
    num_pages: int = 0
    num_window_pages: tuple[int, ...] = ()
    num_free_window_pages: tuple[int, ...] = ()
    token_usage: float = 0.0
    new_token_ratio: float = 0.0
    num_steps: int = 0
    num_preemptions: int = 0
    num_retractions: int = 0
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    generation_tokens: int = 0
    cache_query_tokens: int = 0
    cache_hit_tokens: int = 0
    num_host_pages: int = 0
    num_host_pages_used: int = 0
    host_save_pages: int = 0
    host_load_pages: int = 0
    num_states: int = 0
    num_states_used: int = 0
    num_state_snapshots: int = 0
    state_snapshots_taken: int = 0
    state_snapshots_found: int = 0
    state_snapshots_evicted: int = 0
    state_recomputed_tokens: int = 0
    decode_steps: int = 0
    coarse_decode_steps: int = 0
    decode_rows: int = 0
    decode_bucket_rows: int = 0
    verify_tokens: int = 0
    verify_bucket_tokens: int = 0
    mixed_tokens: int = 0
    mixed_bucket_tokens: int = 0
    num_drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()
    forced_tokens: int = 0
    step_tokens: int = 0
    steps_by_tokens: tuple[int, ...] = (0,) * (len(STEP_TOKEN_BUCKETS) + 1)
    compiles_after_ready: int = 0
    stages: tuple[StageTimes, ...] = ()
    integrity_errors: tuple[str, ...] = ()
    decode_steps_by_rows: dict[int, int] = {}
    expert_tokens: tuple[tuple[int, ...], ...] = ()

    @property
    def full_token_usage(self) -> float:
        """The share in use of the pages of whole sequences."""
        return 1.0 - (self.num_free_pages + self.num_evictable_pages) / self.num_pages if self.num_pages else 0.0

    @property
    def swa_token_usage(self) -> float:
        """The share in use of the pages of windows, the largest of all groups with a window; 0 if there are none."""
        groups = zip(self.num_free_window_pages, self.num_window_pages)
        return max((1.0 - free / total for free, total in groups if total), default=0.0)

    @property
    def state_usage(self) -> float:
        """The share of the rows of states that running requests have; 0 if there are none."""
        return self.num_states_used / self.num_states if self.num_states else 0.0


class ReplicaStats(msgspec.Struct, frozen=True):
    """The process id of an engine process, and the last metrics received from it."""

    pid: int
    stats: EngineStats


class Devices(msgspec.Struct, frozen=True, kw_only=True):
    """The devices that jax finds. `platform` is cpu, gpu or tpu; a TPU chip may be several devices. If there are none,
    `problem` says why."""

    platform: str = ""
    num_devices: int = 0
    num_chips: int = 0
    problem: str | None = None
