"""The keystone: whatever happens around a request, its tokens are those of a naive full recompute of it alone.

The real engine over a tiny random model in float32. Every feature that touches the cache adds itself here.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import random
import re
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import pytest
from llguidance import LLMatcher
from safetensors.numpy import save_file

from jaxserve.api_types import (
    EngineInfo,
    EngineRequest,
    EngineStats,
    FinishReason,
    SamplingParams,
    ThinkingBudget,
    TokenEvent,
    TokenLogprobs,
)
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.core.loop import EngineLoop
from jaxserve.engine.scheduling.grammars import Allowed, Grammars, RequestGrammar
from jaxserve.engine.scheduling.thinking import ThinkingCounter
from jaxserve.models.config import ModelConfig
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.registry import abstract_params, parse_model_config
from jaxserve.runtime.devices.device import DeviceFacts
from jaxserve.runtime.devices.mesh import shardings
from jaxserve.runtime.execution import executor
from jaxserve.runtime.programs.table import step_keys
from jaxserve.runtime.sizing.deployment import deploy
from jaxserve.runtime.step import batch as batches
from jaxserve.runtime.step.draw import DRAW
from jaxserve.runtime.step.program import ProgramKey
from jaxserve.step_plan import Capacity, Draw, SlotOpen, StepPlan
from jaxserve.text.answers.thought_marks import make_marks
from jaxserve.text.grammars.vocabulary import load_vocabulary
from jaxserve.text.tokenizers.tokenizer import Tokenizer
from jaxserve.text.tokenizers.tokenizer_parts import TokenizerParts
from jaxserve.weights.arrays import flatten
from jaxserve.weights.dummy import dummy_params
from jaxserve.worker import build_engine
from pallas_kernels.paged_attention import KernelTarget
from tests.draft_heads import NaiveDrafts, WatchedDrafts, write_target_and_head
from tests.drafts import ForcedDrafts, draft_any_lengths
from tests.grammars import follow_in_turn, run_at_random
from tests.models.forward import cpu_mesh, prompt_hidden, prompt_logits
from tests.runtime import plain_sampling
from tests.selection import grid
from tests.thinking import is_used_up
from tests.tiny_model import CONFIG, byte_tokenizer, locked, of_this_run, write_tiny_model
from tests.weights.conftest import random_checkpoint

pytestmark = pytest.mark.slow

LONGEST = 100
FULL = CONFIG | {"max_position_embeddings": LONGEST}
WINDOWED = FULL | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 9}
SHORT = 24
_FACTORS = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
LONGROPE = FULL | {"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": SHORT, **_FACTORS}}
# Layers of two KV groups: a window of 9 tokens, and whole sequences.
GROUPS = FULL | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_act": None,
    "num_hidden_layers": 3,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
# Experts, of which groups are chosen first, a shared one, and a dense first layer.
MIXTURE = FULL | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
# One row a token for all heads. With `reference`, prompts of a step that has more than 13 tokens are expanded.
LATENT = MIXTURE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "head_dim": None,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 16,
    "v_head_dim": 8,
    "n_shared_experts": 1,
}
# Layers that keep a state of each sequence, and one that attends. A prefix can end at every fourth page.
HYBRID = FULL | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
# Both: layers of two KV groups, with experts.
GROUPS_OF_EXPERTS = FULL | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "intermediate_size": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "attention_bias": True,
    "swiglu_limit": 7.0,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"],
}
DEEP = {"num_hidden_layers": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=30)
CPU = DeviceFacts(KernelTarget("cpu"), 2**34)
# Models for each kind of head
HEADED = {
    "eagle": FULL,
    "eagle3": FULL | DEEP,
    "mtp": LATENT | {"num_nextn_predict_layers": 1},
    "mtp-hybrid": HYBRID | {"mtp_num_hidden_layers": 1},
}
VOCAB = FULL["vocab_size"]
TOLERANCE = 1e-4
FP8 = np.dtype(jax.numpy.float8_e4m3fn)
FP8_TOLERANCE = 0.01
ORIGINS = {
    "none": "are 1, as the checkpoint has none: values beyond 448 are clipped",
    "checkpoint": "come from the checkpoint",
    "calculated": "will be calculated from the first prompts",
}
"""Where the scales of an fp8 cache come from, and what the log says about it."""

Engine = tuple[EngineLoop, EngineInfo]
Build = Callable[..., Engine]

# Programs of these sizes are made once for all settings that have them.
TWO_SIZES: dict[str, Any] = {
    "context_length": 64,
    "max_running_requests": 8,
    "chunked_prefill_size": 16,
    "max_total_tokens": 72,
    "page_size": 4,
    "cuda_graph_bs": (1, 8),
}
SMALL = TWO_SIZES | {"cuda_graph_bs": (8,)}
# Most of what is cached goes to host memory, and comes back.
WITH_HOST_MEMORY: dict[str, Any] = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0}
# 18 pages of whole sequences, and 7 of windows, of which a request takes up to 7 while its prompt is computed.
TWO_POOLS: dict[str, Any] = {"swa_full_tokens_ratio": 0.4}
# Each runs with overlap and without.
SETTINGS: dict[str, dict[str, Any]] = {
    "tiny-pool": TWO_SIZES | {"schedule_conservativeness": 0.1},
    "slivers": TWO_SIZES | {"max_prefill_tokens": 5, "schedule_policy": "random", "prefill_max_requests": 2},
    "write-through": TWO_SIZES | WITH_HOST_MEMORY | {"radix_eviction_policy": "lfu"},
    "write-back": TWO_SIZES | WITH_HOST_MEMORY | {"hicache_write_policy": "write_back"},
    # A sequence that grows past `SHORT` tokens is computed again, with other frequencies.
    "longrope": SMALL,
    "windowed": {"context_length": 64, "max_running_requests": 8, "chunked_prefill_size": 16, "cuda_graph_bs": (8,)},
    "groups": SMALL | TWO_POOLS,
    "groups-write-through": SMALL | TWO_POOLS | WITH_HOST_MEMORY,
    "groups-write-back": SMALL | TWO_POOLS | WITH_HOST_MEMORY | {"hicache_write_policy": "write_back"},
    "mixture": SMALL | {"schedule_conservativeness": 0.1},
    "latent": SMALL | {"schedule_conservativeness": 0.1} | WITH_HOST_MEMORY,
    "latent-expanded": SMALL | {"schedule_conservativeness": 0.1, "attention_backend": "reference"},
    "hybrid": SMALL | {"schedule_conservativeness": 0.1, "max_mamba_cache_size": 10},
    "hybrid-write-through": SMALL | {"max_mamba_cache_size": 8} | WITH_HOST_MEMORY,
    "hybrid-write-back": SMALL | {"max_mamba_cache_size": 8, "hicache_write_policy": "write_back"} | WITH_HOST_MEMORY,
    "roomy": {
        "context_length": 64,
        "max_running_requests": 8,
        "chunked_prefill_size": 32,
        "page_size": 4,
        "schedule_policy": "shortest-prefill-first",
    },
    # More rows than are sampled at once, prompts in one piece, and several mixed programs.
    "wide": {
        "max_running_requests": 20,
        "chunked_prefill_size": -1,
        "max_total_tokens": 600,
        "schedule_policy": "priority",
        "page_size": 8,
        "cuda_graph_bs": (4, 20),
    },
}
TIERED = ("write-through", "write-back", "latent")
GROUPS_TIERED = ("groups-write-through", "groups-write-back")
HYBRID_TIERED = ("hybrid-write-through", "hybrid-write-back")
QUICK = SETTINGS.keys() - {"roomy", "wide", "mixture", "hybrid", "hybrid-write-through"}
SPECULATED = ("tiny-pool", "groups-write-back", "longrope", "latent")
QUICK_IN_TURN = {"tiny-pool", "groups-write-back"}


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Makes engines by the name of their settings; programs are compiled once a run, for all of its processes.

    With `kv_scales`, the same weights come from a checkpoint that has scales of the KV cache, too. Another `model` is
    a folder that has its weights.
    """
    programs = of_this_run(tmp_path_factory) / "keystone-programs"
    programs.mkdir(exist_ok=True)

    def make(name: str, *, kv_scales: bool = False, **options: Any) -> Engine:
        common = {"load_format": "dummy", "dtype": "float32", "device": "cpu"}
        if "model" in options:
            del common["load_format"]
            return start(EngineConfig(**common, program_cache_dir=str(programs), **SETTINGS[name] | options))
        folder = write_tiny_model(tmp_path_factory.mktemp(name))
        (folder / "config.json").write_text(json.dumps(_model(name)))
        if kv_scales:
            _write_weights(folder, parse_model_config(_model(name)))
            del common["load_format"]
        paths = {"model": str(folder), "program_cache_dir": str(programs)}
        return start(EngineConfig(**common, **paths, **SETTINGS[name] | options))

    def start(config: EngineConfig) -> Engine:
        model = (Path(config.model) / "config.json").read_bytes()
        with locked(programs, f"{zlib.crc32(model)}-{config.speculative_method}-{config.kv_cache_dtype}"):
            loop, info = build_engine(config)
        return run_at_random(follow_in_turn(loop), random.Random(0)), info

    return make


def _model(name: str) -> dict[str, Any]:
    others = {
        "windowed": WINDOWED,
        "longrope": LONGROPE,
        "mixture": MIXTURE,
        "groups": GROUPS,
        "latent": LATENT,
        "hybrid": HYBRID,
    }
    return next((model for start, model in others.items() if name.startswith(start)), FULL)


@functools.cache
def _params(config: ModelConfig) -> Any:
    abstract = abstract_params(LaidOutModel(config), np.dtype(np.float32))
    return dummy_params(abstract, shardings(cpu_mesh(), abstract), EngineConfig().random_seed)


def _naive_logits(
    tokens: list[int], model: dict[str, Any] = FULL, kv_dtype: Any = None, kv_scales: Any = None
) -> np.ndarray:
    """All logits of one sequence, computed in one go."""
    config = parse_model_config(model)
    return prompt_logits(
        LaidOutModel(config), _params(config), tokens, size=LONGEST, kv_dtype=kv_dtype, kv_scales=kv_scales
    )


def naive_hidden(tokens: list[int], model: dict[str, Any] = FULL) -> np.ndarray:
    """All hidden states of one sequence, computed in one go."""
    config = parse_model_config(model)
    return prompt_hidden(LaidOutModel(config), _params(config), tokens, LONGEST)


def _write_weights(folder: Path, config: ModelConfig) -> None:
    """Write `_params` as a checkpoint, with scales so small that many keys and values are clipped."""
    abstract = abstract_params(LaidOutModel(config), np.dtype(np.float32))
    tensors = random_checkpoint(abstract)
    for (_, spec), (_, values) in zip(flatten(abstract)[0], flatten(_params(config))[0], strict=True):
        for part in spec.parts:
            window = tuple(slice(start, start + size) for start, size in zip(part.index, part.shape))
            stored = np.asarray(values)[window].reshape(tensors[part.name].shape)
            tensors[part.name] = np.ascontiguousarray(stored - np.float32(part.offset))
    for layer in range(config.num_layers):
        for i, kind in enumerate("kv"):
            tensors[f"model.layers.{layer}.self_attn.{kind}_scale"] = np.array([1e-4 * (1 + layer + i / 2)], np.float32)
    save_file(tensors, folder / "model.safetensors")


def _scales(loop: EngineLoop) -> list[np.ndarray]:
    """The scales of each KV group, `[2, layers, kv_heads]`, from the state on the device."""
    leaves = loop._executor._commands._state  # type: ignore[attr-defined]
    fp8 = [i for i, leaf in enumerate(leaves) if leaf.dtype == FP8]
    return [np.asarray(leaves[values + 1])[0] for values in fp8[1::2]]


def _naive_logprobs(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


@dataclasses.dataclass
class Answer:
    """All events of one request, put together."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs | None] | None
    last: TokenEvent


def _run(
    loop: EngineLoop, requests: Iterable[EngineRequest], rng: random.Random | None = None, abort_chance: float = 0.0
) -> dict[str, Answer]:
    """Let requests arrive (at random times with `rng`) until all have ended; the books are checked after each step."""
    arrivals = list(requests)
    events: dict[str, list[TokenEvent]] = {request.request_id: [] for request in arrivals}
    assert len(events) == len(arrivals)

    def receive(arrived: list[TokenEvent]) -> None:
        for event in arrived:
            seen = events[event.request_id]
            assert not seen or seen[-1].finish_reason is None, "an event after the last one"
            seen.append(event)

    for _ in range(10_000):
        while arrivals and (rng is None or rng.random() < 0.5):
            assert loop.add(arrivals.pop(0)) is None
        if rng is not None and rng.random() < abort_chance:
            receive(loop.abort([rng.choice(list(events))]))
        receive(loop.step())
        stats = loop.stats(check=True)
        assert stats.integrity_errors == ()
        if not arrivals and not loop.has_work:
            break
    else:
        raise AssertionError("no progress")
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_window_pages == stats.num_window_pages
    assert stats.num_free_pages + stats.num_evictable_pages == stats.num_pages
    return {request_id: _together(seen) for request_id, seen in events.items()}


def assert_experts_are_counted(stats: EngineStats, model: dict[str, Any]) -> None:
    """In each layer with experts, every token that a step computed has its number of them, drafts included."""
    experts = model.get("n_routed_experts") or model.get("num_local_experts") or model.get("num_experts")
    if experts is None:
        assert stats.expert_tokens == ()
        return
    dense = model.get("first_k_dense_replace", 0)
    assert [len(counts) for counts in stats.expert_tokens] == [0] * dense + [experts] * (
        model["num_hidden_layers"] - dense
    )
    computed = stats.step_tokens + stats.draft_tokens
    assert {sum(counts) for counts in stats.expert_tokens[dense:]} == {computed * model["num_experts_per_tok"]}


def _together(events: list[TokenEvent]) -> Answer:
    tokens = [token for event in events for token in event.token_ids]
    last = events[-1]
    assert [event.finish_reason for event in events].index(last.finish_reason) == len(events) - 1
    assert last.usage is not None
    assert last.usage.completion_tokens == len(tokens)
    assert all(event.prompt_logprobs is None for event in events[1:])
    logprobs = [entry for event in events for entry in event.logprobs or []]
    return Answer(tokens, logprobs, events[0].prompt_logprobs, last)


_TOKENIZER = Tokenizer(TokenizerParts(byte_tokenizer("<s>", "</s>"), (257,), 256, {}, {}))
_GRAMMARS = Grammars(lambda: load_vocabulary(_TOKENIZER))
_REGEXES = "[a-z]{3,30}", "(red|green|blue)(, (red|green|blue)){0,3}", "[0-9]*", 'a{2}"[xy]":[^z]{1,9}the end of it'


def _followed(request: EngineRequest) -> RequestGrammar:
    """The grammar of a request before its first token, to be followed token by token."""
    sampling = request.sampling
    grammar = RequestGrammar(
        request.grammar,
        stop_ids=request.stop_ids,
        min_tokens=sampling.min_tokens,
        ignore_eos=False,
        one_by_one=True,
    )
    if request.thinking is not None:
        grammar.thinking = ThinkingCounter(request.thinking)
    _GRAMMARS.submit([grammar])
    return grammar


def _next(grammar: RequestGrammar) -> Allowed:
    assert grammar.job is not None
    grammar.job.result()
    found = grammar.next()
    assert found is not None
    assert found.error is None
    return found


def _allowed(grammar: RequestGrammar, size: int) -> np.ndarray:
    """Whether each of `size` tokens may be drawn next."""
    bits = np.unpackbits(np.frombuffer(_next(grammar).tokens, np.uint8), bitorder="little")
    return np.pad(bits, (0, max(0, size - len(bits))))[:size] != 0


def _check(request: EngineRequest, answer: Answer, context: int, model: dict[str, Any] = FULL) -> None:
    """A greedy request against the naive recompute: its tokens, log probabilities and how it ended."""
    sampling, prompt, tokens = request.sampling, request.prompt_ids, answer.tokens
    logits = _naive_logits(prompt + tokens, model)
    if model is LONGROPE and len(prompt) <= SHORT < len(logits):
        logits[:SHORT] = _naive_logits((prompt + tokens)[:SHORT], model)
    grammar = _followed(request) if request.grammar else None
    forced = _forced(request, tokens)
    complete = False
    for i, token in enumerate(tokens):
        if i in forced:
            continue
        opened = SlotOpen(
            slot=0,
            rank=0,
            sampling=sampling,
            stop_ids=request.stop_ids,
            sample=0,
            prompt_ids=prompt,
            output_ids=tokens[:i],
        )
        edited = plain_sampling.adjusted(logits[len(prompt) - 1 + i], opened)
        if grammar is not None:
            edited = np.where(_allowed(grammar, len(edited)), edited, -np.inf)
        assert edited[token] >= edited.max() - TOLERANCE, (request, i)
        if grammar is not None and grammar.push(token):
            _GRAMMARS.submit([grammar])
    ended_by_stop = bool(tokens) and tokens[-1] in request.stop_ids and len(tokens) > sampling.min_tokens
    if grammar is not None and not ended_by_stop:  # a stop token may be one that the grammar doesn't know
        found = _next(grammar)
        complete = found.complete
    early = [i for i, token in enumerate(tokens[:-1]) if token in request.stop_ids and i >= sampling.min_tokens]
    assert not early
    if answer.last.finish_reason is not FinishReason.ABORT:
        assert answer.last.finish_reason is (FinishReason.STOP if ended_by_stop or complete else FinishReason.LENGTH)
        assert ended_by_stop or complete or len(tokens) == min(sampling.max_tokens, context - len(prompt))
    _check_logprobs(request, answer, _naive_logprobs(logits))


def _forced(request: EngineRequest, tokens: list[int]) -> set[int]:
    """Check that the end of the reasoning follows where its budget is used up; return the indices of its tokens."""
    budget, found, num_closings, end = request.thinking, set[int](), 0, 0
    if budget is None or request.grammar:
        return found
    for i in range(len(tokens)):
        if i >= end and is_used_up(budget, tokens[:i], _PIECES):
            closing = budget.closings[min(num_closings, len(budget.closings) - 1)]
            num_closings, end = num_closings + 1, i + len(closing)
            assert tokens[i:end] == [*closing][: len(tokens) - i]
            found.update(range(i, end))
    return found


def _check_logprobs(request: EngineRequest, answer: Answer, expected: np.ndarray) -> None:
    sampling, prompt = request.sampling, request.prompt_ids
    if sampling.logprobs is None:
        assert answer.logprobs == []
    else:
        assert [entry.token_id for entry in answer.logprobs] == answer.tokens
        forced = _forced(request, answer.tokens)
        for i, (row, entry) in enumerate(zip(expected[len(prompt) - 1 :], answer.logprobs)):
            if i in forced:
                assert entry.logprob == 0.0
            else:
                _check_entry(entry, row, sampling.logprobs)
    if answer.last.finish_reason is FinishReason.ABORT and answer.prompt_logprobs is None:
        return
    if sampling.prompt_logprobs is None:
        assert answer.prompt_logprobs is None
        return
    assert answer.prompt_logprobs is not None
    nothing, *entries = answer.prompt_logprobs
    assert nothing is None
    assert [entry.token_id for entry in entries if entry is not None] == prompt[1:]
    for row, entry in zip(expected, entries):
        assert entry is not None
        _check_entry(entry, row, sampling.prompt_logprobs)


def _check_entry(entry: TokenLogprobs, expected: np.ndarray, count: int) -> None:
    assert entry.logprob == pytest.approx(expected[entry.token_id], abs=TOLERANCE)
    assert len(set(entry.top_ids)) == len(entry.top_ids) == len(entry.top_logprobs) == count
    np.testing.assert_allclose(entry.top_logprobs, expected[entry.top_ids], atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(entry.top_logprobs, np.sort(expected)[::-1][:count], atol=TOLERANCE, rtol=0)


def _random_prompt(rng: random.Random, longest: int, earlier: list[list[int]] | None = None) -> list[int]:
    """A prompt of its own, or some of an `earlier` sequence and then its own: a shared prefix, a chat's next turn."""
    length = min(rng.choice([1, 2, rng.randint(1, 20), rng.randint(1, longest)]), longest)
    own = [rng.randrange(VOCAB) for _ in range(length)]
    if not earlier or rng.random() < 0.3:
        return own
    other = rng.choice(earlier)
    kept = rng.choice([len(other), rng.randint(0, len(other))])
    return [*other[:kept], *own[: rng.randint(1, length)]][:longest]


_PIECES = [*(bytes((byte,)) for byte in range(256)), b"", b""]


def _budget(number: int) -> ThinkingBudget | None:
    """A budget of every fifth request: within reasoning from the start, or whenever one of many bytes is drawn."""
    if number % 5 != 2:
        return None
    begins = tuple(bytes((byte,)) for byte in range(128, 256))
    if number % 2:
        marks = make_marks(_PIECES, (b"<>",), (b"</>",), (tuple(b"</>"),), once=True)
    else:
        marks = make_marks(_PIECES, begins, (b"z", b"\n"), ((10,), tuple(b"the end\n")), once=False)
    return marks.budget(number * 7 % 11, inside=number != 12)


def _random_request(rng: random.Random, number: int, context: int, earlier: list[list[int]]) -> EngineRequest:
    """Greedy, whatever else is asked of it."""
    max_tokens = rng.choice([0, 1, rng.randint(2, 10), rng.randint(10, 40), 200])
    options: list[dict[str, Any]] = [
        {},
        {},
        {"logprobs": rng.choice([0, 1, 20])},
        {"prompt_logprobs": rng.choice([0, 3])},
        {"prompt_logprobs": 1, "logprobs": 2},
        {"repetition_penalty": 1.7, "presence_penalty": 0.5},
        {"frequency_penalty": 0.7, "logit_bias": {rng.randrange(VOCAB): 2.0}},
        {"min_tokens": min(4, max_tokens)},
    ]
    grammar = LLMatcher.grammar_from_regex(_REGEXES[number // 4 % len(_REGEXES)]) if number % 4 == 3 else ""
    return EngineRequest(
        grammar=grammar,
        thinking=_budget(number),
        request_id=f"r{number}",
        prompt_ids=_random_prompt(rng, context - 1, earlier),
        priority=rng.choice([0, 0, 1]),
        namespace=rng.choice(["", "", "", "tenant"]),
        stop_ids=tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 1, 16]))),
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, **rng.choice(options)),
    )


@pytest.mark.parametrize(
    ("name", "order"),
    grid(
        itertools.product(SETTINGS, ("overlap", "in-turn")),
        lambda case: case[0] in (QUICK if case[1] == "overlap" else QUICK_IN_TURN),
    ),
)
def test_greedy_tokens_are_those_of_the_request_alone(build: Build, name: str, order: str) -> None:
    loop, info = build(name, disable_overlap_schedule=order == "in-turn")
    aborted = 0
    sequences: list[list[int]] = []
    for seed in range(3):
        rng = random.Random(f"{name} {seed}")
        requests = []
        for i in range(24):
            # Few that come again and again, where they are to be found in host memory.
            earlier = sequences[:5] if name in TIERED + GROUPS_TIERED + HYBRID_TIERED else sequences
            requests.append(_random_request(rng, i, info.max_model_len, earlier))
            sequences.append(requests[-1].prompt_ids)
        answers = _run(loop, requests, rng, abort_chance=0.15)
        for request in requests:
            _check(request, answers[request.request_id], info.max_model_len, _model(name))
            sequences.append(request.prompt_ids + answers[request.request_id].tokens)
        aborted += sum(answer.last.finish_reason is FinishReason.ABORT for answer in answers.values())
    assert aborted > 0, "these seeds try no abort"
    assert loop.stats().num_preemptions > 0 or name not in ("tiny-pool", "groups")
    assert loop.stats().cache_hit_tokens > 0, "these seeds find nothing in the cache"
    least = 8 if name in TIERED else 2 if name in GROUPS_TIERED + HYBRID_TIERED else -1
    assert loop.stats().host_load_pages > least, "these seeds load too little from host memory"
    assert_experts_are_counted(loop.stats(check=True), _model(name))


SAMPLED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 20, "min_p": 0.02},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    {"logit_bias": {5: 3.0, 7: -100.0}, "logprobs": 2},
    {"temperature": 2.0, "prompt_logprobs": 1},
    {"min_tokens": 10, "top_k": 30},
    {"temperature": 0.0},
]


def sampled_requests(rng: random.Random) -> list[EngineRequest]:
    """Requests of every kind of sampling, seeded."""
    return [
        EngineRequest(
            request_id=f"r{i}",
            prompt_ids=_random_prompt(rng, 30),
            stop_ids=(9, 10, 11),
            sample=i % 3,
            sampling=SamplingParams(**{"max_tokens": 25, "seed": i // 6} | SAMPLED[i % len(SAMPLED)]),
        )
        for i in range(24)
    ]


@pytest.mark.parametrize(
    ("name", "drafts", "order"),
    grid(
        itertools.product(
            ("tiny-pool", "groups-write-back", "longrope", "mixture", "hybrid-write-back"),
            range(1, 9),
            ("overlap", "in-turn"),
        ),
        {("groups-write-back", 7, "in-turn"), ("hybrid-write-back", 5, "overlap")}.__contains__,
    ),
)
def test_drafts_change_no_token(build: Build, name: str, drafts: int, order: str) -> None:
    plain, _ = build(name)
    loop, info = build(
        name,
        speculative_method="ngram",
        num_speculative_tokens=drafts,
        disable_overlap_schedule=order == "in-turn",
        cuda_graph_bs=(8,),
    )
    forced = ForcedDrafts(loop, VOCAB, random.Random(f"{name} {drafts}"))
    sequences: list[list[int]] = []
    for rightness in (1.0, 0.7, 0.0):
        rng = random.Random(f"{name} {drafts} {rightness}")
        requests = [_random_request(rng, i, info.max_model_len, sequences) for i in range(8)]
        sampled = [
            msgspec.structs.replace(request, request_id=f"s{i}") for i, request in enumerate(sampled_requests(rng))
        ]
        expected = _run(plain, requests + sampled)
        whole = {one.request_id: one.prompt_ids + expected[one.request_id].tokens for one in requests + sampled}
        sequences += whole.values()
        forced.sequences, forced.rightness = whole, rightness
        accepted = loop.stats().accepted_tokens
        answers = _run(loop, requests + sampled, rng, abort_chance=0.1)
        for request in requests:
            _check(request, answers[request.request_id], info.max_model_len, _model(name))
        for request in sampled:
            answer, other = answers[request.request_id], expected[request.request_id]
            assert answer.tokens == other.tokens[: len(answer.tokens)]
            if answer.last.finish_reason is not FinishReason.ABORT:
                assert (answer.tokens, answer.last.finish_reason) == (other.tokens, other.last.finish_reason)
                assert [entry.token_id for entry in answer.logprobs] == [entry.token_id for entry in other.logprobs]
        assert loop.stats().accepted_tokens > accepted + 20 or rightness < 1.0


@pytest.mark.parametrize(
    ("name", "drafts", "order"),
    grid(
        itertools.product(("tiny-pool", "write-back", "longrope", "windowed"), range(1, 9), ("overlap", "in-turn")),
        {("tiny-pool", 3, "overlap"), ("write-back", 3, "in-turn")}.__contains__,
    ),
)
def test_a_draft_model_follows_its_sequences(build: Build, tmp_path: Path, name: str, drafts: int, order: str) -> None:
    """A model that drafts for itself is always right, unless it lacks a token that the sequence has."""
    plain, _ = build(name)
    folder = write_tiny_model(tmp_path)
    (folder / "config.json").write_text(json.dumps(_model(name)))
    loop, info = build(
        name,
        speculative_method="draft",
        speculative_model=str(folder),
        num_speculative_tokens=drafts,
        disable_overlap_schedule=order == "in-turn",
        max_running_requests=4,
        cuda_graph_bs=(4,),
    )
    rng = random.Random(f"{name} {drafts} {order}")
    draft_any_lengths(loop, rng)
    sequences: list[list[int]] = []
    for _ in range(3):
        requests = [_random_request(rng, i, info.max_model_len, sequences) for i in range(8)]
        sampled = [
            msgspec.structs.replace(request, request_id=f"s{i}") for i, request in enumerate(sampled_requests(rng))
        ]
        expected = _run(plain, requests + sampled)
        sequences += [one.prompt_ids + expected[one.request_id].tokens for one in requests + sampled]
        answers = _run(loop, requests + sampled, rng, abort_chance=0.1)
        for request in requests + sampled:
            answer, other = answers[request.request_id], expected[request.request_id]
            assert answer.tokens == other.tokens[: len(answer.tokens)]
            if answer.last.finish_reason is not FinishReason.ABORT:
                assert (answer.tokens, answer.last.finish_reason) == (other.tokens, other.last.finish_reason)
    stats = loop.stats(check=True)
    assert stats.num_preemptions > 0 or name != "tiny-pool"
    # Of the others, few requests share a page that has not been evicted
    assert stats.cache_hit_tokens > 0 or name != "write-back"
    assert stats.accepted_tokens > 50
    assert stats.accepted_tokens == stats.draft_tokens


@pytest.mark.parametrize(
    ("method", "name", "drafts", "order"),
    grid(
        itertools.product(HEADED, ("tiny-pool", "write-back"), range(1, 9), ("overlap", "in-turn")),
        {("eagle3", "tiny-pool", 4, "overlap"), ("mtp-hybrid", "write-back", 3, "overlap")}.__contains__,
    ),
)
def test_a_head_drafts_from_what_the_model_has_seen(
    build: Build, tmp_path: Path, method: str, name: str, drafts: int, order: str
) -> None:
    """Each greedy draft is what the head makes of the whole sequence, computed in one go."""
    model = HEADED[method]
    settings = write_target_and_head(tmp_path, model, method.partition("-")[0])
    cached = name != "tiny-pool"
    settings |= {"disable_overlap_schedule": order == "in-turn", "disable_radix_cache": not cached}
    settings |= {"num_speculative_tokens": drafts, "max_running_requests": 2, "cuda_graph_bs": (2,)}
    loop, info = build(name, **settings)
    config = EngineConfig(dtype="float32", **SETTINGS[name] | settings)
    naive = NaiveDrafts(deploy(config, parse_model_config(model), CPU), loop, LONGEST)
    rng = random.Random(f"{method} {name} {drafts} {order}")
    lengths = draft_any_lengths(loop, rng)
    watched = WatchedDrafts(loop)
    sequences: list[list[int]] = []
    right = [0, 0]
    for _ in range(3):
        requests = [_random_request(rng, i, info.max_model_len, sequences) for i in range(8)]
        greedily: dict[str, Any] = {"sampling": GREEDY, "thinking": None}
        requests = [msgspec.structs.replace(one, **greedily) if i % 2 else one for i, one in enumerate(requests)]
        sampled = sampled_requests(rng)[:8]
        requests += [msgspec.structs.replace(request, request_id=f"s{i}") for i, request in enumerate(sampled)]
        lengths.paused = True
        expected = _run(loop, requests)
        lengths.paused = False
        for request in requests:
            if request.sampling is GREEDY and not request.grammar:
                known = request.prompt_ids + expected[request.request_id].tokens
                rows = prompt_logits(*naive.target, known, size=LONGEST)[len(request.prompt_ids) - 1 : -1]
                assert all(row[token] >= row.max() - TOLERANCE for row, token in zip(rows, known[-len(rows) :]))
        sequences = [one.prompt_ids + expected[one.request_id].tokens for one in requests]
        watched.made.clear()
        answers = _run(loop, requests, rng, abort_chance=0.1)
        for request in requests:
            answer, other = answers[request.request_id], expected[request.request_id]
            assert answer.tokens == other.tokens[: len(answer.tokens)]
            if answer.last.finish_reason is not FinishReason.ABORT:
                assert (answer.tokens, answer.last.finish_reason) == (other.tokens, other.last.finish_reason)
        greedy = {one.request_id for one in requests if one.sampling is GREEDY}
        for request_id, known, drafted in watched.made:
            if request_id in greedy:
                right[naive.draft(known, len(drafted)) == drafted] += 1
    stats = loop.stats(check=True)
    assert stats.num_preemptions > 0 or name != "tiny-pool"
    assert stats.cache_hit_tokens > 0 or not cached
    # The head may have read a page in the cache with another token after it.
    assert right[1] > 10
    assert right[0] <= cached * right[1] / 10


def with_pooled(requests: list[EngineRequest], rng: random.Random) -> list[EngineRequest]:
    """Return requests of which two of five are pooled."""
    pooled = {"pooled": True, "grammar": "", "thinking": None, "sampling": SamplingParams(max_tokens=0)}
    return [msgspec.structs.replace(one, **pooled) if rng.random() < 0.4 else one for one in requests]


def check_vector(request: EngineRequest, answer: Answer, method: str, model: dict[str, Any] = FULL) -> None:
    """A pooled request against the naive recompute."""
    assert answer.tokens == []
    if answer.last.finish_reason is FinishReason.ABORT:
        assert answer.last.pooled is None
        return
    assert answer.last.finish_reason is FinishReason.STOP
    hidden = naive_hidden(request.prompt_ids, model)
    expected = hidden[-1] if method == "last" else hidden.mean(axis=0)
    assert answer.last.pooled is not None
    assert answer.last.usage is not None
    assert answer.last.usage.cached_tokens == 0 or method == "last"
    np.testing.assert_allclose(np.frombuffer(answer.last.pooled, np.float32), expected, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "method", "options"),
    grid(
        [
            ("tiny-pool", "mean", {}),
            ("groups-write-back", "last", {}),
            ("latent", "mean", {"runner": "pooling"}),
            ("hybrid", "last", {}),
            ("slivers", "mean", {"disable_overlap_schedule": True}),
            ("write-through", "last", {"pooled_time_share": 0.01}),
            ("mixture", "mean", {}),
            ("longrope", "last", {"runner": "pooling"}),
            ("tiny-pool", "mean", {"speculative_method": "ngram", "num_speculative_tokens": 3}),
            ("wide", "mean", {}),
        ],
        lambda case: case == ("tiny-pool", "mean", {}),
    ),
)
def test_vectors_are_those_of_each_text_alone(build: Build, name: str, method: str, options: dict[str, Any]) -> None:
    """Pooled requests between chats, or by themselves."""
    loop, info = build(name, **{"runner": "generate", "convert": "embed", "pooling": method} | options)
    rng = random.Random(name + method)
    sequences: list[list[int]] = []
    requests = []
    for i in range(60):
        requests.append(_random_request(rng, i, info.max_model_len, sequences[:5]))
        sequences.append(requests[-1].prompt_ids)
    requests = with_pooled(requests, rng)
    if "runner" in options:
        requests = [one for one in requests if one.pooled]
    answers = _run(loop, requests, rng, abort_chance=0.4)
    assert loop.stats().compiles_after_ready == 0  # the naive recompute compiles
    for request in requests:
        if request.pooled:
            check_vector(request, answers[request.request_id], method, _model(name))
        else:
            _check(request, answers[request.request_id], info.max_model_len, _model(name))
    aborted = [one for one in requests if answers[one.request_id].last.finish_reason is FinishReason.ABORT]
    assert any(one.pooled for one in aborted) or "runner" in options
    stats = loop.stats()
    assert stats.num_preemptions > 0 or name != "tiny-pool"
    assert stats.cache_hit_tokens > 0 or method != "last"


@pytest.mark.parametrize("name", grid(["tiny-pool", "wide"], QUICK.__contains__))
def test_sampled_tokens_depend_on_the_request_alone(build: Build, name: str) -> None:
    rng = random.Random(name)
    requests = sampled_requests(rng)
    crowd, _ = build(name)
    together = _run(crowd, requests, rng)
    assert crowd.stats().num_preemptions > 0 or name != "tiny-pool"
    lonely, _ = build("tiny-pool", disable_overlap_schedule=True)
    for request in requests:
        alone = _run(lonely, [request])[request.request_id]
        found = together[request.request_id]
        assert found.tokens == alone.tokens, request
        assert (found.last.finish_reason, found.last.stop_id) == (alone.last.finish_reason, alone.last.stop_id)
        _check_logprobs(request, found, _naive_logprobs(_naive_logits(request.prompt_ids + found.tokens)))


def test_samples_of_a_seeded_prompt_differ_and_repeat(build: Build) -> None:
    loop, _ = build("tiny-pool")
    samples = [
        EngineRequest(
            request_id=f"s{i}",
            group_id="s",
            prompt_ids=[1, 2, 3],
            sample=i,
            sampling=SamplingParams(n=4, max_tokens=12, seed=77),
        )
        for i in range(4)
    ]
    first, again = (
        [answer.tokens for answer in _run(loop, order).values()] for order in (samples, list(reversed(samples)))
    )
    assert len({tuple(tokens) for tokens in first}) == 4
    assert first == again[::-1]


def test_requests_without_a_seed_differ_and_the_engines_seed_repeats_them(build: Build) -> None:
    def tokens(**options: Any) -> list[list[int]]:
        loop, _ = build("tiny-pool", **options)
        requests = [
            EngineRequest(request_id=f"r{i}", prompt_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=12))
            for i in range(3)
        ]
        return [answer.tokens for answer in _run(loop, requests).values()]

    first = tokens()
    assert len({tuple(one) for one in first}) == 3
    assert tokens() == first


@pytest.mark.parametrize("length", [1, 2, 16, 17, 63])
@pytest.mark.parametrize("name", grid(["tiny-pool", "slivers", "roomy", "wide"], QUICK.__contains__))
def test_a_prompt_scored_without_output(build: Build, name: str, length: int) -> None:
    """In one piece, in chunks of the program's size, and in slivers."""
    prompt = np.random.default_rng(length).integers(0, VOCAB, length).tolist()
    sampling = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=20)
    loop, info = build(name)
    request = EngineRequest(request_id="echo", prompt_ids=prompt, sampling=sampling)
    answer = _run(loop, [request])["echo"]
    assert answer.tokens == []
    assert answer.last.finish_reason is FinishReason.LENGTH
    _check(request, answer, info.max_model_len)


@pytest.mark.parametrize(
    ("name", "counts", "lengths"),
    [
        ("tiny-pool", (1, 5, 8), (50, 10)),
        pytest.param("wide", (1, 4, 5, 12, 20), (90, 40), marks=pytest.mark.grid),
    ],
)
def test_nothing_compiles_once_the_engine_is_ready(
    build: Build, monkeypatch: pytest.MonkeyPatch, name: str, counts: tuple[int, ...], lengths: tuple[int, ...]
) -> None:
    used: set[ProgramKey] = set()
    choose, pack = batches.choose_program, executor.pack_draws

    def record(plan: StepPlan, capacity: Capacity) -> ProgramKey:
        key = choose(plan, capacity)
        used.add(key)
        closed.update(step_keys(capacity))
        return key

    def record_draws(draws: list[Draw], capacity: Capacity) -> tuple[ProgramKey, np.ndarray, list[int]]:
        packed = pack(draws, capacity)
        used.add(packed[0])
        closed.update(DRAW.keys(capacity))
        return packed

    closed: set[ProgramKey] = set()
    monkeypatch.setattr(batches, "choose_program", record)
    monkeypatch.setattr(executor, "pack_draws", record_draws)
    loop, info = build(name)
    for options in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3, "logprobs": 5, "presence_penalty": 1.0}):
        for count in counts:
            sampling = SamplingParams(max_tokens=4, **options)
            for grammar in ("", LLMatcher.grammar_from_regex("[a-z]{9}")):
                requests = [
                    EngineRequest(request_id=f"r{i}", prompt_ids=[i], sampling=sampling, grammar=grammar)
                    for i in range(count)
                ]
                _run(loop, requests)
    for number, (length, temperature, echo) in enumerate(itertools.product(lengths, (0.0, 1.0), (None, 5))):
        prompt = [number, *range(1, length)]  # nothing of it is cached
        sampling = SamplingParams(max_tokens=2, temperature=temperature, prompt_logprobs=echo)
        _run(loop, [EngineRequest(request_id="long", prompt_ids=prompt, sampling=sampling)])
    assert used == closed
    assert len(used) == info.num_programs - 2
    assert loop.stats(check=True).compiles_after_ready == 0


@pytest.mark.parametrize(
    "name", grid(TIERED + GROUPS_TIERED + HYBRID_TIERED, lambda name: name != "hybrid-write-through")
)
def test_pages_that_went_to_the_host_give_the_same_tokens_and_log_probabilities(build: Build, name: str) -> None:
    loop, _ = build(name)
    sampling = SamplingParams(max_tokens=20, temperature=0.0, logprobs=3)
    prompts = [[(7 * i + 31 * j) % VOCAB for i in range(30)] for j in range(3)]

    def turn(number: int) -> list[Answer]:
        """One after the other: a pool of 18 pages holds hardly two of them."""
        answers: dict[str, Answer] = {}
        for j, prompt in enumerate(prompts):
            answers |= _run(loop, [EngineRequest(request_id=f"{number}-{j}", prompt_ids=prompt, sampling=sampling)])
        return list(answers.values())

    first, again = turn(0), turn(1)
    for one, other in zip(first, again):
        assert one.tokens == other.tokens
        assert [x.logprob for x in one.logprobs] == pytest.approx([x.logprob for x in other.logprobs], abs=1e-5)
        assert other.last.usage is not None
        assert other.last.usage.cached_tokens == (16 if name in HYBRID_TIERED else 28)
    stats = loop.stats()
    assert stats.host_load_pages >= (8 if name in HYBRID_TIERED else 14)
    assert stats.compiles_after_ready == 0


@pytest.mark.parametrize(
    ("name", "origin"),
    grid(
        [
            ("tiny-pool", "none"),
            ("write-through", "checkpoint"),
            ("groups-write-back", "calculated"),
            ("groups-write-back", "checkpoint"),
            ("tiny-pool", "calculated"),
            ("latent", "calculated"),
            ("latent-expanded", "calculated"),
        ],
        lambda case: case[0] == "groups-write-back",
    ),
)
def test_tokens_over_an_fp8_cache_are_those_of_the_request_alone(
    build: Build, name: str, origin: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever writes and reads it; sums in another order may round a number to its neighbour, so nearly the best.

    `origin` says where the scales come from.
    """
    options = {"kv_scales": origin == "checkpoint", "calculate_kv_scales": origin == "calculated"}
    with caplog.at_level("INFO", "jaxserve"):
        loop, info = build(name, kv_cache_dtype="fp8_e4m3", cuda_graph_bs=(8,), **options)
    assert f"KV cache: float8_e4m3fn; its scales {ORIGINS[origin]}" in caplog.text
    rng = random.Random(name)
    sequences: list[list[int]] = []
    requests = []
    for i in range(48):
        prompt = _random_prompt(rng, info.max_model_len - 1, sequences[:5])
        sampling = SamplingParams(temperature=0.0, max_tokens=rng.choice([3, 40]))
        requests.append(EngineRequest(request_id=f"r{i}", prompt_ids=prompt, sampling=sampling))
        sequences.append(prompt)
    answers = _run(loop, requests, rng)
    scales = _scales(loop)
    assert (set(np.concatenate([group.ravel() for group in scales]).tolist()) == {1.0}) == (origin == "none")
    in_tuples = tuple(tuple(group.ravel().tolist()) for group in scales)
    rounding = 0.0
    for request in requests:
        prompt, tokens = request.prompt_ids, answers[request.request_id].tokens
        expected, exact = (
            _naive_logits(prompt + tokens, _model(name), *cache)[len(prompt) - 1 : -1]
            for cache in ((FP8, in_tuples), (None, None))
        )
        for row, token in zip(expected, tokens, strict=True):
            assert row[token] >= row.max() - FP8_TOLERANCE, request
        rounding = max(rounding, float(np.abs(expected - exact).max()))
    assert rounding > 2 * FP8_TOLERANCE, "the cache is not in fp8"
    stats = loop.stats()
    assert stats.cache_hit_tokens > 0 or name == "tiny-pool"
    assert stats.num_preemptions > 0 or name != "tiny-pool"
    assert stats.host_load_pages > 8 or name not in TIERED


def test_a_compile_after_ready_is_noticed(build: Build) -> None:
    loop, _ = build("tiny-pool")
    jax.jit(lambda x: x * 7 - 3)(np.float32(1))
    assert loop.stats().compiles_after_ready > 0


def test_the_start_says_what_was_decided(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "jaxserve"):
        build("tiny-pool")
    [line] = [message for message in caplog.messages if message.startswith("max_total_num_tokens=")]
    expected = (
        r"max_total_num_tokens=72, chunked_prefill_size=16, max_prefill_tokens=16, max_running_requests=8, "
        r"context_len=64, available_gpu_mem=(\d+\.\d\d) GB"
    )
    found = re.fullmatch(expected, line)
    assert found, line
    assert float(found[1]) > 0


@pytest.mark.grid
def test_a_mixture_without_a_layer_of_experts(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MIXTURE, "first_k_dense_replace", MIXTURE["num_hidden_layers"])
    loop, _ = build("mixture")
    answers = _run(loop, [EngineRequest(request_id="r", prompt_ids=[1, 2], sampling=SamplingParams(max_tokens=3))])
    assert len(answers["r"].tokens) == 3
    assert loop.stats(check=True).expert_tokens == ()
