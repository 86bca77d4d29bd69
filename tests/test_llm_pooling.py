"""Tests what `LLM` makes of pooled vectors, with an engine that makes them of the ids alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.api_types import EngineRequest, FinishReason, TokenEvent, Usage
from jaxserve.engine.client import InProcessEngine
from jaxserve.errors import ConfigError, ContextLengthError, InvalidRequestError, RequestFailedError
from jaxserve.model_source.pooling import ModelTask
from tests.server.fake_engine import FakeEngine, vector_of
from tests.server.pooling.tasks import EMBED, LABELS, RERANK, REWARD, both, only
from tests.server.pooling.test_embeddings import PROMPTS, normalized
from tests.server.pooling.test_encoders import BY_TOKEN, CLS, LONG, SEP, unit, vectors_of
from tests.server.pooling.test_encoders import TOKENIZER as BERT
from tests.server.pooling.test_scoring import SCORE_TEMPLATE, cosine, pair_score
from tests.tiny_model import EOS_ID, VOCAB_SIZE, write_tiny_model


class PoolingEngine:
    """An engine in this process with the methods that `SharedEngine` calls. It answers the last request first, with the
    `vector` of its ids."""

    def __init__(self, vector: Callable[[Sequence[int]], np.ndarray] = vector_of) -> None:
        self._vector = vector
        self.info = FakeEngine.info_of(VOCAB_SIZE, max_model_len=512)
        self.submitted: list[EngineRequest] = []
        self.aborted: list[str] = []
        self._waiting: list[EngineRequest] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def submit(self, request: EngineRequest) -> None:
        self.submitted.append(request)
        self._waiting.append(request)

    def step(self) -> list[TokenEvent]:
        request = self._waiting.pop()
        if request.prompt_ids == [*b"fail"]:
            return [TokenEvent(request.request_id, [], FinishReason.ERROR, error="no memory")]
        pooled, usage = self._vector(request.prompt_ids).tobytes(), Usage(len(request.prompt_ids), 0, 1)
        return [TokenEvent(request.request_id, [], FinishReason.STOP, usage=usage, pooled=pooled)]

    def abort(self, request_ids: Iterable[str]) -> None:
        self.aborted += request_ids

    def close(self) -> None:
        pass


type Load = Callable[..., contextlib.AbstractContextManager[tuple[LLM, PoolingEngine]]]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Return a function that loads an `LLM` for a task."""

    @contextlib.contextmanager
    def loaded(
        task: ModelTask, *, write: bool = True, vector: Any = vector_of, **settings: Any
    ) -> Iterator[tuple[LLM, PoolingEngine]]:
        engine = PoolingEngine(vector)
        monkeypatch.setattr("jaxserve.config.served_checkpoint.read_task", lambda *_, **__: task)
        monkeypatch.setattr(InProcessEngine, "start", lambda _: engine)
        with LLM(write_tiny_model(tmp_path) if write else str(tmp_path), **settings) as llm:
            yield llm, engine

    return loaded


def test_embeddings(load: Load) -> None:
    with load(only(EMBED, **PROMPTS)) as (llm, engine):
        first, second = llm.embed(["a", [98, 99]], use_tqdm=False)
        assert first.outputs.embedding == normalized([*b"Q: a"])
        assert second.outputs.embedding == normalized([98, 99])
        assert (second.prompt_token_ids, second.num_cached_tokens, second.finished) == ([98, 99], 1, True)
        assert (first.outputs.hidden_size, engine.submitted[0].pooled) == (4, True)
        [cut] = llm.embed("ab", dimensions=2, prompt_name="document", use_tqdm=False)
        assert cut.outputs.embedding == normalized([*b"ab"], 2)
        [raw] = llm.embed({"prompt": "ab"}, prompt_name="", normalize=False, use_tqdm=False)
        assert raw.outputs.embedding == llm.encode([[97, 98]], use_tqdm=False)[0].outputs.data
        [short] = llm.embed("abcd", prompt_name="", truncate_prompt_tokens=2, use_tqdm=False)
        assert short.prompt_token_ids == [97, 98]
        assert llm.embed([], use_tqdm=False) == []


def test_scores_of_embeddings_are_cosines(load: Load) -> None:
    with load(both(EMBED)) as (llm, engine):
        found = llm.score("q", ["a", "b"], use_tqdm=False)
        assert [one.outputs.score for one in found] == pytest.approx([cosine(b"q", b"a"), cosine(b"q", b"b")])
        assert len(engine.submitted) == 3
        [one, two] = llm.score(["q", "r"], ["a", "b"], use_tqdm=False)
        assert (one.outputs.score, two.outputs.score) == pytest.approx((cosine(b"q", b"a"), cosine(b"r", b"b")))


def test_scores_of_a_reranker(load: Load, tmp_path: Path) -> None:
    with load(only(RERANK)) as (llm, _):
        [one, two] = llm.score("q", ["a", "bc"], use_tqdm=False)
        assert (one.outputs.score, two.outputs.score) == pytest.approx((pair_score([*b"qa"]), pair_score([*b"qbc"])))
        with pytest.raises(InvalidRequestError, match="no place for an instruction"):
            llm.score("q", "a", instruction="i")
    (tmp_path / "score.jinja").write_text(SCORE_TEMPLATE.replace("<|im_end|>", "</s>"))
    with load(only(RERANK), chat_template=str(tmp_path / "score.jinja")) as (llm, _):
        [one] = llm.score("q</s>", "d", instruction="rank", use_tqdm=False)
        assert one.prompt_token_ids == [*b"rank: q</s> ? d", EOS_ID]
        [one] = llm.score("q", "abcdef", truncate_prompt_tokens=14, use_tqdm=False)
        assert one.prompt_token_ids == [*b"find: q ? abc", EOS_ID]
    with load(only(RERANK, pair_template="qwen3_reranker")) as (llm, _):
        [one] = llm.score("q", "d", instruction="Find it", use_tqdm=False)
        assert b"<Instruct>: Find it\n<Query>: q\n<Document>: d<|im_end|>" in bytes(one.prompt_token_ids)


def test_defaults_of_the_template(load: Load, tmp_path: Path) -> None:
    chat = tmp_path / "chat.jinja"
    chat.write_text("{{ messages[0].content[0].text }} {{ mood }}{{ add_generation_prompt }}")
    settings: dict[str, Any] = {"chat_template": str(chat), "default_chat_template_kwargs": {"mood": "calm"}}
    hello = [{"role": "user", "content": "hello"}]
    with load(both(EMBED), **settings, chat_template_content_format="openai") as (llm, _):
        assert bytes(llm.encode_chat(hello)) == b"hello calmTrue"
        assert bytes(llm.encode_chat(hello, mood="merry", add_generation_prompt=False)) == b"hello merryFalse"
    with (
        pytest.raises(ConfigError, match=r"default_chat_template_kwargs\.tools"),
        load(both(EMBED), **settings | {"default_chat_template_kwargs": {"tools": []}}),
    ):
        pass
    chat.write_text(SCORE_TEMPLATE.replace("<|im_end|>", "</s>"))
    with load(only(RERANK), **settings) as (llm, _):
        [one] = llm.score("q", "d", use_tqdm=False)
        assert one.prompt_token_ids == [*b"find: q ? d", EOS_ID, *b"calm"]


def test_more_alternatives_than_the_setting_allows_are_refused(load: Load) -> None:
    with load(both(EMBED), max_logprobs=2) as (llm, engine):
        for name in ("logprobs", "prompt_logprobs"):
            with pytest.raises(InvalidRequestError, match=f"^{name} must be at most 2, got 3") as refused:
                llm.generate("a", SamplingParams(**{name: 3}), use_tqdm=False)
            assert refused.value.param == name
        assert engine.submitted == []


def test_an_encoder_truncates_and_tells_the_texts_of_pairs_apart(load: Load, tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text(BERT.to_json())
    a, b, long = (BERT.encode(text)[1:-1] for text in ("a", "b", LONG))
    with load(only(EMBED, max_tokens=6), write=False) as (llm, _):
        assert [one.prompt_token_ids for one in llm.embed([LONG, "a"], use_tqdm=False)] == [
            [CLS, *long[:4], SEP],
            [CLS, *a, SEP],
        ]
        with pytest.raises(ContextLengthError, match="length is 6 tokens"):
            llm.embed([[1] * 7])
    with load(only(RERANK, max_tokens=8), write=False) as (llm, engine):
        pairs = llm.score("a", ["b", LONG], use_tqdm=False)
        assert [one.prompt_token_ids for one in pairs] == [[CLS, *a, SEP, *b, SEP], [CLS, *a, SEP, *long[:4], SEP]]
        assert [request.second_start for request in engine.submitted] == [3, 3]


def test_vectors_of_tokens(load: Load) -> None:
    with load(only(BY_TOKEN), vector=vectors_of) as (llm, _):
        [one] = llm.encode("ab", use_tqdm=False)
        assert one.outputs.data == vectors_of([*b"ab"]).tolist()
        [score] = llm.score("ab", "cde", use_tqdm=False)
        products = unit(vectors_of([*b"ab"])) @ unit(vectors_of([*b"cde"])).T
        assert score.outputs.score == pytest.approx(float(products.max(axis=1).sum()))
        with pytest.raises(InvalidRequestError, match="makes a vector of each token, by score and encode; it has no"):
            llm.embed("a")


def test_labels_and_rewards(load: Load) -> None:
    with load(only(LABELS)) as (llm, _):
        [one] = llm.classify("ab", use_tqdm=False)
        values = vector_of([*b"ab"])
        assert (sum(one.outputs.probs), one.outputs.num_classes) == (pytest.approx(1), 4)
        assert one.outputs.label == LABELS.labels[int(np.argmax(values))]
        [raw] = llm.classify("ab", use_activation=False, use_tqdm=False)
        assert raw.outputs.probs == values.tolist()
    with load(only(REWARD)) as (llm, _):
        assert llm.reward("ab", use_tqdm=False)[0].outputs.data == vector_of([*b"ab"]).tolist()


def test_the_task_is_that_of_the_config_with_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InProcessEngine, "start", lambda _: PoolingEngine())
    settings: dict[str, Any] = {"runner": "pooling", "hf_overrides": {"classifier_from_token": ["a", "b", "c", "d"]}}
    with LLM(write_tiny_model(tmp_path), **settings) as llm:
        assert llm.classify("ab", use_tqdm=False)[0].outputs.label in ("a", "b", "c", "d")


def test_a_conversation_needs_a_model_that_generates_before_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InProcessEngine, "start", lambda _: PoolingEngine())
    encoder = Path(__file__).parent / "fixtures" / "pooled" / "bert_mean"
    with LLM(encoder) as llm, pytest.raises(InvalidRequestError, match="generates no text"):
        llm.chat([{"role": "user", "content": "a"}])


def test_what_a_model_is_not_for_is_refused(load: Load) -> None:
    with load(ModelTask()) as (llm, _), pytest.raises(InvalidRequestError, match='runner="pooling"'):
        llm.embed("a")
    with load(only(EMBED)) as (llm, engine):
        for use in (llm.classify, llm.reward):
            with pytest.raises(InvalidRequestError, match="makes embeddings, by embed, score and encode"):
                use("a")
        with pytest.raises(InvalidRequestError, match="generates no text"):
            llm.generate("a")
        assert not engine.submitted
    with load(only(LABELS)) as (llm, _):
        with pytest.raises(
            InvalidRequestError, match="labels of texts, by classify, reward and encode; it has no embed"
        ):
            llm.embed("a")
        with pytest.raises(InvalidRequestError, match="it has no score"):
            llm.score("a", "b")


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        (["a", ""], {}, r"prompts\[1\] is empty"),
        ([[1, 999]], {}, r"prompts\[0\] holds the token id 999"),
        ([[1]], {"prompt_name": ""}, "needs texts"),
        (["a"], {"prompt_name": "x"}, "no prompt 'x'"),
        (["a"], {"dimensions": 5}, r"\[1, 4\]"),
        (["a"], {"truncate_prompt_tokens": 0}, r"\[1, 512\]"),
        ([1.5], {}, "a prompt is a text"),
    ],
)
def test_invalid_prompts_raise_before_anything_runs(load: Load, prompts: Any, options: Any, words: str) -> None:
    with load(only(EMBED)) as (llm, engine):
        with pytest.raises(InvalidRequestError, match=words):
            llm.embed(prompts, **options)
        with pytest.raises(ContextLengthError, match=r"your prompts\[0\] resulted in"):
            llm.embed("a" * 513)
        for sides in ((["a", "b"], ["c"]), ([], []), ("a", [])):
            with pytest.raises(InvalidRequestError, match="one for all"):
                llm.score(*sides)
        assert not engine.submitted


def test_a_failed_text_ends_the_others(load: Load) -> None:
    with load(only(EMBED)) as (llm, engine):
        with pytest.raises(RequestFailedError, match="no memory"):
            llm.embed(["a", "fail", "b"], use_tqdm=False)
        assert engine.submitted[0].request_id in engine.aborted
