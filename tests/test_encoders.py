"""The keystone of encoders: whatever texts are computed with it, when it arrives and what is aborted meanwhile, a text
gets the vector that it gets alone; on a CPU bit for bit, if our kernels multiply."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.api_types import EngineRequest, FinishReason, SamplingParams, TokenEvent
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.core.loop import EngineLoop
from jaxserve.errors import ConfigError
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.registry import abstract_params, parse_model_config
from jaxserve.runtime.devices.mesh import shardings
from jaxserve.weights.dummy import dummy_params
from jaxserve.worker import build_engine
from tests.models.encoding import hidden_states, packed_texts
from tests.models.forward import cpu_mesh
from tests.models.pooled import POOLED, cases
from tests.tiny_model import of_this_run, write_tiny_model

pytestmark = pytest.mark.slow

CONTEXT, STEP = 64, 32
SIZES: dict[str, Any] = {
    "context_length": CONTEXT,
    "chunked_prefill_size": STEP,
    "max_running_requests": 6,
    "device": "cpu",
}
# Widths that our kernel packs
ENCODER = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "type_vocab_size": 2,
}


def random_texts(rng: random.Random, count: int, vocab: int) -> list[EngineRequest]:
    """Texts of all lengths, some of which are pairs and some of lists."""
    found = []
    for i in range(count):
        length = rng.choice((1, 2, 7, STEP, STEP + 1, CONTEXT, rng.randint(3, 40)))
        ids = [rng.randrange(vocab) for _ in range(length)]
        second = rng.choice((None, rng.randint(0, length)))
        group = rng.choice(("", "list"))
        found.append(
            EngineRequest(
                request_id=f"t{i}",
                prompt_ids=ids,
                sampling=SamplingParams(max_tokens=0),
                pooled=True,
                second_start=second,
                group_id=group,
                priority=rng.randrange(3),
            )
        )
    return found


def run(
    loop: EngineLoop, texts: list[EngineRequest], rng: random.Random, abort_chance: float = 0.0
) -> dict[str, TokenEvent]:
    """Let texts arrive in bursts, and return the only event of each; the books are checked after each step."""
    arrivals, found = list(texts), dict[str, TokenEvent]()
    waiting: set[str] = set()

    def receive(events: list[TokenEvent]) -> None:
        for event in events:
            assert event.finish_reason is not None
            waiting.remove(event.request_id)
            found[event.request_id] = event

    while arrivals or loop.has_work:
        for one in arrivals[: rng.randrange(12)]:
            arrivals.remove(one)
            waiting.add(one.request_id)
            assert loop.add(one) is None
        if waiting and rng.random() < abort_chance:
            receive(loop.abort([rng.choice(sorted(waiting))]))
        receive(loop.step())
        assert loop.stats(check=True).integrity_errors == ()
    assert not waiting
    return found


def vector_of(event: TokenEvent) -> np.ndarray:
    assert event.finish_reason is FinishReason.STOP
    assert event.pooled is not None
    return np.frombuffer(event.pooled, np.float32)


def check_crowd(loop: EngineLoop, texts: list[EngineRequest], rng: random.Random, tolerance: float) -> None:
    """Compare the vectors of a crowd, some of which are aborted, with those of each text alone."""
    events = run(loop, texts, rng, abort_chance=0.5)
    aborted = 0
    for one in texts:
        if events[one.request_id].finish_reason is FinishReason.ABORT:
            aborted += 1
            assert events[one.request_id].pooled is None
            continue
        alone = run(loop, [one], rng)[one.request_id]
        np.testing.assert_allclose(vector_of(events[one.request_id]), vector_of(alone), rtol=0, atol=tolerance)
    assert 0 < aborted < len(texts)
    stats = loop.stats()
    assert (stats.compiles_after_ready, stats.num_running, stats.num_waiting) == (0, 0, 0)


@pytest.fixture
def write(tmp_path: Path) -> Path:
    (write_tiny_model(tmp_path) / "config.json").write_text(json.dumps(ENCODER))
    return tmp_path


def start(model: Path, tmp_path_factory: pytest.TempPathFactory, **options: Any) -> EngineLoop:
    programs = of_this_run(tmp_path_factory) / "encoder-programs"
    programs.mkdir(exist_ok=True)
    loop, _ = build_engine(EngineConfig(model=str(model), program_cache_dir=str(programs), **SIZES | options))
    return loop


@pytest.mark.parametrize(
    "options", [{"schedule_policy": "lpm"}, {"schedule_policy": "priority", "prefill_max_requests": 3}]
)
def test_bits_do_not_depend_on_the_company(
    write: Path, tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any]
) -> None:
    loop = start(write, tmp_path_factory, load_format="dummy", pooling="mean", **options)
    rng = random.Random(options["schedule_policy"])
    check_crowd(loop, random_texts(rng, 60, 96), rng, 0.0)


@pytest.mark.parametrize("name", ["mpnet", "modernbert", "xlmr_pair", "gemma_bidirectional"])
def test_a_crowd_gets_the_vectors_of_transformers(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Among random texts are those of the fixture, whose vectors are known."""
    loop = start(POOLED / name, tmp_path_factory, dtype="float32")
    rng, known = random.Random(name), cases(name)
    texts = random_texts(rng, 30, 60)
    texts += [
        EngineRequest(
            request_id=f"known{i}",
            prompt_ids=case.ids,
            sampling=SamplingParams(max_tokens=0),
            pooled=True,
            second_start=case.second_start,
        )
        for i, case in enumerate(known)
        if len(case.ids) <= CONTEXT
    ]
    rng.shuffle(texts)
    events = run(loop, texts, rng)
    for i, case in enumerate(known):
        if len(case.ids) <= CONTEXT:
            assert np.abs(vector_of(events[f"known{i}"]) - case.vector).max() < 1e-4
    assert len(events) > 30


def test_tokens_get_vectors_of_their_own(write: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    loop = start(write, tmp_path_factory, load_format="dummy", dtype="float32", pooling="all")
    model = LaidOutModel(parse_model_config(ENCODER))
    abstract = abstract_params(model, np.dtype(np.float32))
    params = dummy_params(abstract, shardings(cpu_mesh(), abstract), EngineConfig().random_seed)
    texts = random_texts(random.Random(5), 12, 96)
    events = run(loop, texts, random.Random(6))
    batch = packed_texts([one.prompt_ids for one in texts], [one.second_start for one in texts])
    hidden, start_ = hidden_states(model, params, batch), 0
    for one in texts:
        found = vector_of(events[one.request_id]).reshape(len(one.prompt_ids), -1)
        np.testing.assert_allclose(found, hidden[start_ : start_ + len(found)], atol=1e-4)
        start_ += len(found)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tp_size": 2}, "tp_size=2: models that read a text in both directions"),
        ({"pp_size": 2}, "pp_size=2: models that read a text in both directions"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8: this model reads whole texts in both directions"),
        ({"enable_hierarchical_cache": True}, "enable_hierarchical_cache=True: this model reads"),
        ({"kv_cache_memory_bytes": 2**20}, "kv_cache_memory_bytes=1048576: this model reads"),
        ({"num_gpu_blocks_override": 9}, "num_gpu_blocks_override=9: this model reads"),
        ({"radix_eviction_policy": "lfu"}, "radix_eviction_policy=lfu: this model reads"),
        ({"retraction_policy": "priority"}, "retraction_policy=priority: this model reads"),
        ({"long_prefill_token_threshold": 16}, "long_prefill_token_threshold=16: this model reads"),
        ({"context_length": CONTEXT + 1}, "longer than the model's 64 tokens"),
        ({"runner": "generate"}, "runner=generate"),
        ({"speculative_method": "ngram"}, "drafts tokens"),
        ({"attention_backend": "mosaic_gpu"}, "'mosaic_gpu' is not built"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(write: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build_engine(EngineConfig(model=str(write), load_format="dummy", **SIZES | options))
    assert words in str(raised.value)
