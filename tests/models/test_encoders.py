"""Compares encoders with transformers and sentence-transformers, by fixtures of scripts/make_encoders.py."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.errors import ConfigError
from jaxserve.layers.rope import RopeConfig, frequencies
from jaxserve.model_source import resolve
from jaxserve.model_source.pooling import PooledLayer, PooledTask, Pooling
from jaxserve.models.registry import parse_model_config
from jaxserve.weights import check_tensors
from tests.models.encoding import difference, encoded, load
from tests.models.pooled import ENCODERS, POOLED, cases, pooled_source, served

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ENCODERS)
def test_vectors_equal_those_of_transformers(name: str) -> None:
    model, params = load(pooled_source(name))
    assert difference(model, params, cases(name)) < 1e-4


def raw_config(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((POOLED / name / "config.json").read_text())
    return content


def task_of(name: str, **settings: Any) -> PooledTask:
    task = served(pooled_source(name), **settings).task
    assert not task.generates
    assert task.pooled is not None
    return task.pooled


def test_padding_and_other_texts_change_nothing() -> None:
    model, params = load(pooled_source("modernbert"))
    together, [alone] = encoded(model, params, cases("modernbert")), encoded(model, params, cases("modernbert")[1:2])
    np.testing.assert_allclose(together[1], alone, atol=1e-5)


def test_the_types_of_tokens_tell_the_texts_of_a_pair_apart() -> None:
    model, params = load(pooled_source("bert_labels"))
    own = [dataclasses.replace(case, second_start=None) for case in cases("bert_labels")]
    changed = [not np.allclose(found, case.vector, atol=1e-3) for found, case in zip(encoded(model, params, own), own)]
    assert changed == [True, True, False, False, False]


def test_embedders() -> None:
    bert, modernbert, gemma = (task_of(name) for name in ("bert_mean", "modernbert", "gemma_bidirectional"))

    assert (bert.pooling, bert.size, bert.normalize, bert.max_tokens) == (Pooling("mean"), 16, True, 100)
    assert modernbert.pooling == Pooling("cls")
    assert [(layer.name, layer.outputs) for layer in gemma.pooling.layers] == [
        ("2_Dense/linear", 20),
        ("3_Dense/linear", 12),
    ]
    for name in ("bert_mean", "mpnet", "modernbert", "nomic", "gte", "gemma_bidirectional"):
        for case in cases(name):
            np.testing.assert_allclose(case.vector / np.linalg.norm(case.vector), case.embedding, atol=1e-6)


def test_heads_of_labels() -> None:
    nli, reranker, several = (task_of(name) for name in ("bert_labels", "xlmr_pair", "roberta_labels"))

    assert nli.pooling.method == "cls"
    assert (nli.labels, nli.activation, nli.scores_pairs) == (
        ("contradiction", "entailment", "neutral"),
        "softmax",
        False,
    )
    assert [layer.name for layer in nli.pooling.layers] == ["pooler.dense", "classifier"]
    assert (reranker.labels, reranker.activation, reranker.uses) == (("LABEL_0",), "sigmoid", ("classify", "score"))
    assert (several.activation, several.labels) == ("sigmoid", ("joy", "anger", "fear"))
    dense = PooledLayer("head.dense", 16, 16, has_bias=True, activation="gelu", norm="head.norm")
    assert task_of("modernbert_labels").pooling == Pooling(
        "mean", (dense, PooledLayer("classifier", 16, 2, has_bias=True))
    )


def test_heads_of_bidirectional_decoders() -> None:
    nvidia = {"architectures": ["LlamaBidirectionalForSequenceClassification"], "pooling": "avg", "num_labels": 1}
    euro = {"architectures": ["EuroBertForSequenceClassification"], "classifier_pooling": "bos", "num_labels": 2}
    dense = PooledLayer("dense", 16, 16, has_bias=True, activation="gelu")
    classifier = PooledLayer("classifier", 16, 2, has_bias=True)
    found = [task_of("qwen3_bidirectional", hf_overrides=each, convert="classify").pooling for each in (nvidia, euro)]
    assert found == [Pooling("mean", (PooledLayer("score", 16, 1),)), Pooling("cls", (dense, classifier))]
    with pytest.raises(ConfigError, match="classifier_pooling='late' is not supported; bos and mean are"):
        task_of("qwen3_bidirectional", hf_overrides=euro | {"classifier_pooling": "late"}, convert="classify")


def test_without_a_word_the_first_token_is_pooled_and_the_mean_of_a_decoder() -> None:
    assert task_of("bert_labels", convert="embed").pooling == Pooling("cls")
    assert task_of("bert_mean", pooling="cls").pooling == Pooling("cls")
    alone = served(pooled_source("qwen3_bidirectional"), hf_overrides={"architectures": ["Qwen3ForCausalLM"]})
    assert alone.task.pooled is not None
    assert alone.task.pooled.pooling == Pooling("mean")
    nvidia = {"architectures": ["LlamaBidirectionalModel"], "model_type": "llama_bidirec", "pooling": "avg"}
    assert task_of("qwen3_bidirectional", hf_overrides=nvidia).pooling == Pooling("mean")


@pytest.mark.parametrize("name", ["bert_mean", "xlmr_pair", "modernbert_labels", "gte"])
def test_heads_and_poolers_that_the_task_does_not_need_are_ignored(name: str, tmp_path: Path) -> None:
    found = served(pooled_source(name), convert="embed")
    config = parse_model_config(found.raw, found.where, found.task)
    check_tensors(pooled_source(name), config)
    folder = tmp_path / name
    shutil.copytree(POOLED / name, folder)
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "surplus.weight": np.zeros(3, np.float32)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"1 tensor is left over .*: surplus.weight"):
        check_tensors(resolve(str(folder)), config)


@pytest.mark.parametrize(("name", "prefix"), [("mpnet", "mpnet."), ("modernbert", "model."), ("nomic", "nomic_bert.")])
def test_names_have_a_prefix_or_none(name: str, prefix: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    shutil.copytree(POOLED / name, folder)
    weights = {f"{prefix}{key}": value for key, value in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    model, params = load(resolve(str(folder)))
    assert difference(model, params, cases(name)) < 1e-4


@pytest.mark.parametrize("published_by", ["stanford", "pylate"])
def test_vectors_of_tokens(published_by: str, tmp_path: Path) -> None:
    """ColBERT's layer follows the hidden state of each token."""
    folder, linear = tmp_path / "bert_mean", np.arange(96, dtype=np.float32).reshape(6, 16)
    shutil.copytree(POOLED / "bert_mean", folder)
    config = raw_config("bert_mean")
    if published_by == "stanford":
        (folder / "modules.json").unlink()
        config |= {"architectures": ["HF_ColBERT"], "dim": 6}
        weights = load_file(folder / "model.safetensors")
        save_file({**weights, "linear.weight": linear}, folder / "model.safetensors")
    else:
        kinds = {"": "sentence_transformers.models.Transformer", "1_Dense": "pylate.models.Dense.Dense"}
        modules = [{"idx": i, "path": path, "type": kind} for i, (path, kind) in enumerate(kinds.items())]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Dense").mkdir()
        sizes = {"in_features": 16, "out_features": 6, "bias": False}
        activation = {"activation_function": "torch.nn.modules.linear.Identity"}
        (folder / "1_Dense" / "config.json").write_text(json.dumps(sizes | activation))
        save_file({"linear.weight": linear}, folder / "1_Dense" / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    task = served(resolve(str(folder))).task.pooled
    assert task is not None
    assert (task.kind, task.pooling.method, task.size, task.normalize) == ("embed", "all", 6, True)
    _, params = load(resolve(str(folder)))
    np.testing.assert_array_equal(params.pooled[0].weight[:6], linear)


def test_both_forms_of_the_config_of_nomic() -> None:
    raw = raw_config("nomic")
    theirs = {
        "architectures": ["NomicBertModel"],
        "activation_function": "swiglu",
        "causal": False,
        "layer_norm_epsilon": 1e-12,
        "max_trained_positions": 256,
        "n_embd": 16,
        "n_head": 2,
        "n_inner": 24,
        "n_layer": 2,
        "n_positions": 8192,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
        "type_vocab_size": 2,
        "vocab_size": raw["vocab_size"],
    }
    assert parse_model_config(theirs) == parse_model_config(raw)
    longer = parse_model_config(theirs | {"rotary_scaling_factor": 4})
    assert (longer.max_position_embeddings, longer.longest_context, longer.rope.kind) == (256, 1024, "dynamic")


def test_alibabas_form_of_the_config_of_gte() -> None:
    theirs = {"architectures": ["NewModel"], "model_type": "new", "rope_theta": 500_000.0, "type_vocab_size": 0}
    theirs |= {"layer_norm_type": "layer_norm", "pack_qkv": True, "position_embedding_type": "rope"}
    raw = {key: value for key, value in raw_config("gte").items() if key != "rope_parameters"} | theirs
    config = parse_model_config(raw | {"rope_scaling": {"type": "ntk", "factor": 2.0}})
    pairs = np.arange(0, 8, 2)
    expected = (500_000.0 * 2.0) ** (-pairs / 8) / 2.0 ** (2 / 8)
    np.testing.assert_allclose(frequencies(config.rope, 8)[0], expected, rtol=1e-6)
    assert parse_model_config(raw).rope == dataclasses.replace(
        RopeConfig(500_000.0), max_position=256, original_max_position=256
    )


def test_windows_count_the_positions_on_each_side() -> None:
    assert parse_model_config(raw_config("modernbert")).windows == (None, 6, 6, None)
    assert parse_model_config(raw_config("gemma_bidirectional")).windows == (6, 6, None)
    roberta = parse_model_config(raw_config("roberta_labels"))
    assert (roberta.max_position_embeddings, roberta.kv_heads_of(0), roberta.bidirectional) == (256, (2, 8), True)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("bert_mean", {"is_decoder": True}, "is_decoder=True is not supported"),
        ("bert_mean", {"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key' is not"),
        ("bert_mean", {"hidden_act": "mish"}, "hidden_act='mish' is not supported; supported: silu, relu, gelu"),
        ("xlmr_pair", {"max_position_embeddings": 2}, "positions begin at pad_token_id \\+ 1 = 2, but max_pos"),
        ("mpnet", {"relative_attention_num_buckets": 16}, "relative_attention_num_buckets=16 is not supported"),
        ("nomic", {"num_experts": 8, "moe_every_n_layers": 2}, "NomicBERT with a mixture of experts"),
        ("gte", {"logn_attention_scale": True}, "logn_attention_scale=True is not supported"),
        ("modernbert", {"hidden_activation": "swish2"}, "hidden_activation='swish2' is not supported"),
        ("bert_mean", {"architectures": ["DebertaV2ForSequenceClassification"]}, "of encoders, BERT"),
        ("bert_mean", {"architectures": ["BertForTokenClassification"]}, "labels each token, which is not supported"),
        ("qwen3_bidirectional", {"architectures": ["Olmo2Model"]}, "attention to later tokens .is_causal"),
    ],
)
def test_what_is_refused(name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_model_config(raw_config(name) | changes)
