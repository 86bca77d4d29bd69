"""Compares vectors, scores and labels with those of transformers and sentence-transformers, from fixtures made by
scripts/make_pooled.py. Those on several devices are in test_golden_on_meshes.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.config.served_checkpoint import ServedCheckpoint
from jaxserve.errors import ConfigError
from jaxserve.model_source import read_config, resolve
from jaxserve.model_source.pooling import ModelTask, PooledLayer, PooledTask, Pooling
from jaxserve.models.layout import LaidOutModel, Stage
from jaxserve.models.registry import abstract_params, parse_model_config, stage_params
from jaxserve.runtime.devices.mesh import shardings
from jaxserve.weights import check_tensors, dummy_params
from jaxserve.weights.open import is_ignored
from tests.models.forward import cpu_mesh
from tests.models.golden import folder_of, source_of
from tests.models.pooled import FOLDERS, POOLED, cases, expected, pooled_difference, pooled_source, served, vectors

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", FOLDERS)
def test_vectors_equal_those_of_transformers(name: str) -> None:
    assert pooled_difference(name) < 1e-4


def task_of(name: str, **settings: Any) -> PooledTask:
    task = served(pooled_source(name), **settings).task
    assert task.pooled is not None
    assert not task.generates
    return task.pooled


def test_an_embedder_of_sentence_transformers() -> None:
    task = task_of("llama_mean_dense")

    layer = PooledLayer("2_Dense/linear", 16, 10, has_bias=True, activation="tanh")
    assert task.pooling == Pooling("mean", (layer,))
    assert (task.kind, task.size, task.normalize, task.dimensions) == ("embed", 10, True, (10, 4))
    assert (task.prompts, task.default_prompt) == ((("passage", "passage: "), ("query", "query: ")), "passage")
    assert task.max_tokens == 96


def test_an_embedder_as_published() -> None:
    task = task_of("qwen3_embedding")

    assert (task.pooling, task.size, task.normalize) == (Pooling("last"), 16, True)
    assert (dict(task.prompts), task.default_prompt) == ({"query": "Instruct: find\nQuery:", "document": ""}, "")


@pytest.mark.parametrize("name", ["qwen3_embedding", "llama_mean_dense"])
def test_expected_embeddings_are_those_that_the_task_says(name: str) -> None:
    for case in cases(name):
        assert case.embedding is not None
        np.testing.assert_allclose(case.vector / np.linalg.norm(case.vector), case.embedding, atol=1e-6)


def test_heads_of_labels() -> None:
    score, labels, reward = (task_of(name) for name in ("qwen3_score", "gemma2_labels", "qwen2_reward"))

    assert (score.labels, score.activation, score.scores_pairs) == (("LABEL_0",), "sigmoid", True)
    assert labels.labels == ("negative", "neutral", "positive")
    assert (labels.activation, labels.scores_pairs, labels.size) == ("softmax", False, 3)
    assert [layer.activation for layer in reward.pooling.layers] == ["relu", "none"]
    assert (reward.labels, reward.activation) == (("LABEL_0",), "none")


def test_the_forms_of_a_reranker_of_two_tokens(tmp_path: Path) -> None:
    folder = tmp_path / "qwen3_reranker"
    shutil.copytree(POOLED / "qwen3_reranker", folder)
    no, yes = expected("qwen3_reranker")["tokens"]
    fields = {"classifier_from_token": ["no", "yes"], "architectures": ["Qwen3ForSequenceClassification"]}
    plain = task_of("qwen3_reranker", convert="classify")
    by_fields = [
        task_of("qwen3_reranker", hf_overrides=fields | form)
        for form in ({"is_original_qwen3_reranker": True}, {"method": "from_2_way_softmax"})
    ]
    kinds = ["Transformer", "LogitScore"]
    modules = [{"idx": i, "path": f"{i}_{kind}" if i else "", "type": f"st.{kind}"} for i, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir()
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps({"true_token_id": yes, "false_token_id": no}))
    by_module = served(resolve(str(folder))).task.pooled

    assert plain.pooling == Pooling("last", (PooledLayer("lm_head", 16, 2, tokens=(no, yes)),))
    assert (plain.activation, plain.scores_pairs, plain.pair_template) == ("softmax", True, "qwen3_reranker")
    assert by_fields == [plain, plain]
    assert by_module is not None
    assert (by_module.pooling, by_module.activation) == (plain.pooling, "softmax")
    assert by_module.pair_template == "", "sentence-transformers has the tokenizer join a pair"
    odds = np.subtract(*reversed(cases("qwen3_reranker")[0].vector))
    assert 1 / (1 + np.exp(-odds)) == pytest.approx(expected("qwen3_reranker")["score"], abs=1e-6)


def test_a_label_for_each_token_that_the_config_names() -> None:
    names = ["no", "yes", "<think>"]
    task = task_of("qwen3_reranker", hf_overrides={"classifier_from_token": names})

    assert task.labels == tuple(names)
    assert (task.activation, task.scores_pairs, task.pair_template, task.size) == ("softmax", False, "", 3)


def golden_prompt(name: str) -> tuple[list[int], np.ndarray]:
    """Return a prompt of a golden fixture and the logits of its last token."""
    with np.load(folder_of(name) / "golden.npz") as golden:
        return golden["ids_2"].tolist(), golden["logits_2"][-1]


def logits_of_tokens(name: str, tokens: tuple[int, ...], generates: bool, *, packed: bool = False) -> np.ndarray:
    """Return the logits of tokens after a golden fixture's prompt, which the rows of the head give as layers."""
    source = source_of(name)
    raw = read_config(source)
    layer = PooledLayer("lm_head", raw["hidden_size"], len(tokens), tokens=tokens)
    task = PooledTask(kind="classify", pooling=Pooling("last", (layer,)), size=len(tokens))
    found = ServedCheckpoint(raw, "config.json", ModelTask(generates, task))
    [vector] = vectors(source, found, [golden_prompt(name)[0]], packed=packed)
    return vector


@pytest.mark.parametrize(
    ("name", "generates"), [("qwen3", True), ("llama2", False), ("gguf:qwen3", False), ("gguf:llama2", True)]
)
def test_rows_of_the_head_give_the_logits_of_their_tokens(name: str, generates: bool) -> None:
    found = logits_of_tokens(name, (5, 40, 5), generates)
    np.testing.assert_allclose(found, golden_prompt(name)[1][[5, 40, 5]], atol=1e-4)


@pytest.mark.parametrize(("name", "generates"), [("quantized/gptq_head", False), ("quantized/awq_tied", True)])
def test_rows_of_a_quantized_head_beside_packed_weights(name: str, generates: bool) -> None:
    found = logits_of_tokens(name, (5, 40), generates, packed=True)
    np.testing.assert_allclose(found, golden_prompt(name)[1][[5, 40]], atol=0.2)


def test_a_token_beyond_the_head_is_refused() -> None:
    source = source_of("llama2")
    raw = read_config(source)
    layer = PooledLayer("lm_head", raw["hidden_size"], 1, tokens=(128,))
    task = ModelTask(False, PooledTask(kind="classify", pooling=Pooling("last", (layer,)), size=1))
    with pytest.raises(ConfigError, match=r"lm_head.weight \[128, 32\] instead of \[129, 32\]"):
        check_tensors(source, parse_model_config(raw, task=task))


def test_a_head_that_the_task_does_not_need_is_ignored() -> None:
    for name, settings in {"qwen3_score": {"convert": "embed"}, "llama_mean_dense": {"pooling": "last"}}.items():
        source = pooled_source(name)
        found = served(source, **settings)
        check_tensors(source, parse_model_config(found.raw, found.where, found.task))
    as_chat = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    found = served(pooled_source("llama_mean_dense"), runner="generate", hf_overrides=as_chat)
    check_tensors(pooled_source("llama_mean_dense"), parse_model_config(found.raw, found.where, found.task))
    assert is_ignored("cls.output.weight"), "llama.cpp's copy of two rows of the head of tokens"
    untied = parse_model_config(read_config(source_of("llama2")), task=ModelTask(False, embeddings()))
    check_tensors(source_of("llama2"), untied)


def embeddings() -> PooledTask:
    return PooledTask(kind="embed", pooling=Pooling("last"), size=32)


def test_random_weights_have_a_head_of_labels() -> None:
    found = served(pooled_source("qwen2_reward"))
    model = LaidOutModel(parse_model_config(found.raw, found.where, found.task))
    abstract = abstract_params(model, np.dtype(np.float32))
    params = dummy_params(abstract, shardings(cpu_mesh(), abstract), seed=0)

    assert [layer.weight.shape for layer in params.pooled] == [(16, 16), (16, 16)]
    assert [int(np.any(layer.weight, axis=1).sum()) for layer in params.pooled] == [16, 1]


def test_the_last_stage_has_the_layers_after_pooling() -> None:
    found = served(pooled_source("qwen2_reward"))
    config = parse_model_config(found.raw, found.where, found.task)
    whole = abstract_params(LaidOutModel(config), np.dtype(np.float32))
    first, last = (stage_params(whole, LaidOutModel(config, stage=Stage(i, 2, first=i, end=i + 1))) for i in range(2))

    assert (first.norm, first.pooled, first.output) == (None, (), None)
    assert (last.norm, last.pooled, last.embedding) == (whole.norm, whole.pooled, None)
