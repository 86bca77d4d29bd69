"""What a checkpoint is for, from small folders; tests/models/test_pooled.py has whole checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.config.served_checkpoint import fetch_served_checkpoint, merged
from jaxserve.errors import ConfigError
from jaxserve.model_source import ModelSource
from jaxserve.model_source.pooling import ModelTask, PooledLayer, PooledTask, Pooling
from jaxserve.model_source.tasks import read_task
from tests.model_source.gguf_files import HIDDEN, write_gguf

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 8, "vocab_size": 10}
TOKENS = {"a": 0, "no": 3, "yes": 4}
SENTENCES = "sentence_transformers.models"
POOLING = {"word_embedding_dimension": 8, "pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
DENSE = {"in_features": 8, "out_features": 6}


def write(folder: Path, files: dict[str, Any]) -> ModelSource:
    """Write a folder with a tokenizer of a few tokens, and these JSON files."""
    files = {"config.json": CONFIG, "tokenizer.json": {"model": {"vocab": TOKENS}}, **files}
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return ModelSource(folder, "folder", "model")


def modules(*kinds: str, package: str = SENTENCES, **files: Any) -> dict[str, Any]:
    """Return modules.json with a Transformer and these modules, and the config of each that `files` has."""
    paths = ["", *(f"{i}_{kind}" for i, kind in enumerate(kinds, 1))]
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"{package}.{kind}"}
        for i, (path, kind) in enumerate(zip(paths, ("Transformer", *kinds)))
    ]
    configs = {f"{path}/config.json": files[kind] for path, kind in zip(paths[1:], kinds) if kind in files}
    return {"modules.json": entries, **configs}


def task_of(folder: Path, raw: dict[str, Any], files: dict[str, Any] | None = None, **asked: Any) -> ModelTask:
    """Return the task of a folder whose config has these fields besides the common ones."""
    return read_task(write(folder, files or {}), CONFIG | raw, **asked)


def pooled_of(*args: Any, **asked: Any) -> PooledTask:
    task = task_of(*args, **asked)
    assert task.pooled is not None
    return task.pooled


EMBEDDER = modules("Pooling", "Normalize", Pooling=POOLING)


@pytest.mark.parametrize(
    ("raw", "files", "asked", "generates", "kind"),
    [
        ({}, {}, {}, True, None),
        ({}, {}, {"runner": "generate"}, True, None),
        ({}, {}, {"runner": "pooling"}, False, "embed"),
        ({}, {}, {"convert": "embed"}, False, "embed"),
        ({}, {}, {"runner": "generate", "convert": "embed"}, True, "embed"),
        ({}, {}, {"convert": "classify"}, False, "classify"),
        ({}, {}, {"runner": "generate", "convert": "classify"}, True, "classify"),
        ({}, {}, {"convert": "none"}, True, None),
        ({}, EMBEDDER, {}, False, "embed"),
        ({}, EMBEDDER, {"runner": "generate"}, True, None),
        ({}, EMBEDDER, {"convert": "none"}, True, None),
        ({}, EMBEDDER, {"runner": "generate", "convert": "embed"}, True, "embed"),
        ({"architectures": ["Qwen3Model"]}, {}, {}, False, "embed"),
        ({"architectures": ["LlamaForSequenceClassification"]}, {}, {}, False, "classify"),
        ({"architectures": ["LlamaForSequenceClassification"]}, {}, {"convert": "embed"}, False, "embed"),
        ({"architectures": ["LlamaForSequenceClassification"]}, EMBEDDER, {}, False, "embed"),
        ({"architectures": ["Qwen2ForRewardModel"]}, {}, {"runner": "pooling"}, False, "classify"),
        ({"classifier_from_token": ["a"]}, {}, {}, False, "classify"),
        ({"classifier_from_token": ["a"]}, {}, {"runner": "generate"}, True, None),
        ({}, modules("LogitScore", LogitScore={"true_token_id": 4}), {}, False, "classify"),
    ],
)
def test_what_is_served(
    raw: dict[str, Any], files: dict[str, Any], asked: dict[str, Any], generates: bool, kind: str | None, tmp_path: Path
) -> None:
    task = task_of(tmp_path, raw, files, **asked)

    assert task.generates == generates
    assert (None if task.pooled is None else task.pooled.kind) == kind


@pytest.mark.parametrize(
    ("raw", "files", "asked", "says"),
    [
        ({"architectures": ["Qwen3Model"]}, {}, {"runner": "generate"}, "runner=generate: Qwen3Model has no head"),
        ({"architectures": ["Qwen3Model"]}, {}, {"convert": "none"}, "convert=none: Qwen3Model has no head"),
        ({}, {}, {"runner": "pooling", "convert": "none"}, "convert=none asks for neither"),
        ({"architectures": ["LlamaForCausalLM"]}, {}, {"convert": "classify"}, "LlamaForCausalLM has no head of"),
        (
            {},
            {"tokenizer.json": {"model": {"vocab": {"no": 1}}}},
            {"convert": "classify"},
            "--hf-overrides '{\"classifier_from_token\"",
        ),
        ({}, {}, {"convert": "classify", "pooling": "mean"}, "pooling=mean makes vectors; how labels"),
        ({"architectures": ["Qwen2ForProcessRewardModel"]}, {}, {}, "Qwen2ForProcessRewardModel has a head that"),
        ({"architectures": ["Qwen3ForTokenClassification"]}, {}, {}, "labels each token, which is not supported yet"),
        ({"is_causal": False}, {}, {"runner": "generate"}, "tokens of Qwen3ForCausalLM attend to later"),
        ({"use_bidirectional_attention": True}, {}, {"runner": "generate"}, "ForCausalLM attend to later ones"),
        ({"architectures": ["BertModel"]}, {}, {"runner": "generate"}, "tokens of BertModel attend to later ones"),
        ({}, {}, {"convert": "embed", "pooling": "cls"}, "pooling cls is not supported for Qwen3ForCausalLM, whose"),
        ({"classifier_from_token": ["maybe"]}, {}, {}, "'maybe' is no token of the vocabulary"),
        (
            {"classifier_from_token": ["a"]},
            {"tokenizer.json": {"model": {"vocab": {"a": "0"}}}},
            {},
            "tokens whose ids are no numbers",
        ),
        (
            {"classifier_from_token": ["a"]},
            {"tokenizer.json": {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 0}]}},
            {},
            "the vocabulary can't be read",
        ),
        ({"classifier_from_token": []}, {}, {}, "should be a list with the text of a token for each label"),
        ({"classifier_from_token": ["a"], "method": "other"}, {}, {}, "method should be from_2_way_softmax or no_post"),
        ({"classifier_from_token": ["a"], "is_original_qwen3_reranker": True}, {}, {}, "two tokens for one score"),
        ({"classifier_from_token": ["yes"], "vocab_size": 4}, {}, {}, "token 4 scores, but vocab_size is 4"),
        (
            {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "a", "2": "b"}},
            {},
            {},
            "id2label should be an object with a label for each id from 0 to 1",
        ),
        (
            {"architectures": ["LlamaForSequenceClassification"], "problem_type": "ranking"},
            {},
            {},
            "problem_type should be one of regression",
        ),
        (
            {
                "architectures": ["LlamaForSequenceClassification"],
                "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"},
            },
            {},
            {},
            "activation_fn should be one of torch.nn.modules' Identity, Sigmoid, Softmax",
        ),
        (
            {"final_logit_softcapping": 30.0},
            modules("LogitScore", LogitScore={"true_token_id": 4}),
            {},
            "final_logit_softcapping is not supported with scores",
        ),
        ({}, modules("CNN"), {}, "module 'CNN' at '1_CNN' is not supported there"),
        ({}, modules("Normalize"), {}, "module 'Normalize' at '1_Normalize' is not supported there"),
        ({}, modules("Pooling", "Pooling", Pooling=POOLING), {}, "module 'Pooling' at '2_Pooling' is not"),
        ({}, {"modules.json": [{"type": "x.Pooling", "path": "../../etc"}]}, {}, "is outside of the model's folder"),
        ({}, {"modules.json": {}}, {}, "should hold a list of objects"),
        ({}, modules("Pooling"), {}, "1_Pooling/config.json can't be read"),
        (
            {},
            modules("Pooling", Pooling={"pooling_mode_cls_token": True}),
            {},
            "pooling cls is not supported for Qwen3ForCausalLM, whose first",
        ),
        ({}, modules("Pooling", Pooling={"pooling_mode": ["mean", "max"]}), {}, "pooling_mode mean \\+ max is not"),
        (
            {},
            {
                **modules("Pooling", Pooling=POOLING | {"include_prompt": False}),
                "config_sentence_transformers.json": {"prompts": {"query": "q: "}},
            },
            {},
            "include_prompt=false is not supported with prompts",
        ),
        (
            {},
            {**EMBEDDER, "config_sentence_transformers.json": {"prompts": {"query": 1}}},
            {},
            "prompts: query should be a string, it is 1",
        ),
        (
            {},
            {**EMBEDDER, "config_sentence_transformers.json": {"default_prompt_name": "x"}},
            {},
            "default_prompt_name='x' is none of its prompts",
        ),
        (
            {},
            modules("Pooling", "Dense", Pooling=POOLING, Dense=DENSE | {"activation_function": "torch.nn.Mish"}),
            {},
            "activation_function='torch.nn.Mish' is not supported; Identity, Tanh",
        ),
        (
            {},
            modules("Pooling", "Dense", Pooling=POOLING, Dense=DENSE | {"module_input_name": "token_embeddings"}),
            {},
            "module_input_name='token_embeddings' is not supported",
        ),
        (
            {},
            modules("Pooling", "Dense", Pooling=POOLING, Dense=DENSE | {"use_residual": True}),
            {},
            "use_residual=true is not supported",
        ),
        (
            {},
            modules("Pooling", "Dense", Pooling=POOLING, Dense=DENSE | {"in_features": 7}),
            {},
            "2_Dense: in_features=7, but vectors have 8 numbers",
        ),
        ({"matryoshka_dimensions": [9]}, EMBEDDER, {}, "matryoshka_dimensions\\[0\\] should be a number in \\[1, 8\\]"),
        ({"architectures": ["BertModel"]}, {}, {"convert": "classify"}, "has no head of labels; its …ForSequence"),
    ],
)  # fmt: skip
def test_what_is_refused(
    raw: dict[str, Any], files: dict[str, Any], asked: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        task_of(tmp_path, raw, files, **asked)


@pytest.mark.parametrize(
    ("files", "asked", "pooling"),
    [
        ({}, {"runner": "pooling"}, Pooling("last")),
        ({}, {"runner": "pooling", "pooling": "mean"}, Pooling("mean")),
        (EMBEDDER, {}, Pooling("last")),
        (EMBEDDER, {"pooling": "mean"}, Pooling("mean")),
        (modules("Pooling", Pooling={"pooling_mode": "cls"}), {"pooling": "last"}, Pooling("last")),
        (modules("Pooling", Pooling={}), {}, Pooling("mean")),
        (
            modules("Pooling", package="sentence_transformers.sentence_transformer.modules.pooling",
                    Pooling={"pooling_mode": ["lasttoken"]}),
            {},
            Pooling("last"),
        ),
        (
            modules("Pooling", "Dense", Pooling=POOLING,
                    Dense=DENSE | {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}),
            {},
            Pooling("last", (PooledLayer("2_Dense/linear", 8, 6),)),
        ),
    ],
)  # fmt: skip
def test_how_sequences_are_pooled(
    files: dict[str, Any], asked: dict[str, Any], pooling: Pooling, tmp_path: Path
) -> None:
    assert pooled_of(tmp_path, {}, files, **asked).pooling == pooling


def test_vectors_are_normalized_if_the_modules_say_so(tmp_path: Path) -> None:
    assert pooled_of(tmp_path, {}, EMBEDDER).normalize
    assert not pooled_of(tmp_path, {}, modules("Pooling", Pooling=POOLING)).normalize


@pytest.mark.parametrize(
    ("raw", "labels", "activation"),
    [
        ({}, ("LABEL_0", "LABEL_1"), "softmax"),
        ({"num_labels": 1}, ("LABEL_0",), "sigmoid"),
        ({"id2label": {"0": "bad", "1": "good"}, "num_labels": 7}, ("bad", "good"), "softmax"),
        ({"num_labels": 1, "problem_type": "regression"}, ("LABEL_0",), "none"),
        ({"problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1"), "sigmoid"),
        ({"num_labels": 1, "problem_type": "single_label_classification"}, ("LABEL_0",), "softmax"),
        (
            {"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            ("LABEL_0",),
            "none",
        ),
        (
            {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"},
            ("LABEL_0", "LABEL_1"),
            "sigmoid",
        ),
    ],
)
def test_labels(raw: dict[str, Any], labels: tuple[str, ...], activation: str, tmp_path: Path) -> None:
    task = pooled_of(tmp_path, {"architectures": ["LlamaForSequenceClassification"], **raw})

    assert (task.labels, task.activation) == (labels, activation)
    assert task.scores_pairs == (len(labels) == 1)
    assert task.pooling.layers == (PooledLayer("score", 8, len(labels)),)


IDENTITY = {"activation_fn": "torch.nn.modules.linear.Identity"}


@pytest.mark.parametrize(
    ("raw", "files"),
    [
        (
            {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1,
             "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}},
            {"modules.json": []},
        ),
        ({}, modules("LogitScore", LogitScore={"true_token_id": 4})),
        ({}, modules("LogitScore", LogitScore={"true_token_id": 4, "false_token_id": 3})),
    ],
)  # fmt: skip
def test_scores_of_sentence_transformers_may_be_logits(
    raw: dict[str, Any], files: dict[str, Any], tmp_path: Path
) -> None:
    files = {**files, "config_sentence_transformers.json": IDENTITY}

    assert pooled_of(tmp_path, raw, files).activation == "none"


def test_what_a_template_of_pairs_is_rendered_with(tmp_path: Path) -> None:
    limits = {"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}}
    files = {**modules("LogitScore", LogitScore={"true_token_id": 4}), "sentence_bert_config.json": limits}

    assert pooled_of(tmp_path, {}, files).template_arguments == (("add_generation_prompt", True),)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer.json": {"model": {"vocab": {}}, "added_tokens": [{"id": 7, "content": "ok"}]}},
        {"tokenizer.json": {"model": {"vocab": [["a", 0.0], *[["b", 0.0]] * 6, ["ok", 0.0]]}}},
    ],
)
def test_tokens_of_any_vocabulary(files: dict[str, Any], tmp_path: Path) -> None:
    [layer] = pooled_of(tmp_path, {"classifier_from_token": ["ok"]}, files).pooling.layers

    assert layer == PooledLayer("lm_head", 8, 1, tokens=(7,))


def test_tokens_of_a_vocabulary_in_files_of_its_own(tmp_path: Path) -> None:
    source = write(tmp_path, {"vocab.json": {"ok": 1}, "added_tokens.json": {"<ok>": 2}})
    (tmp_path / "tokenizer.json").unlink()
    task = read_task(source, CONFIG | {"classifier_from_token": ["<ok>", "ok"]}).pooled

    assert task is not None
    assert task.pooling.layers[0].tokens == (2, 1)


@pytest.mark.parametrize(
    ("number", "pooling", "kind"),
    [(0, "last", None), (1, "mean", "embed"), (3, "last", "embed"), (4, "last", "classify")],
)
def test_a_gguf_file_says_how_it_pools(number: int, pooling: str, kind: str | None, tmp_path: Path) -> None:
    tokens = ["a", "no", "yes"]
    values = {"qwen3.pooling_type": number, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1, 1, 1]}
    path = write_gguf(tmp_path / "model.gguf", "qwen3", values=values)
    served = fetch_served_checkpoint(EngineConfig(model=str(path)))

    assert (None if served.task.pooled is None else served.task.pooled.kind) == kind
    if served.task.pooled is not None:
        layers = (PooledLayer("lm_head", HIDDEN, 2, tokens=(1, 2)),) if kind == "classify" else ()
        assert served.task.pooled.pooling == Pooling(pooling, layers)  # type: ignore[arg-type]


def test_a_gguf_file_with_another_pooling_is_refused_unless_one_is_chosen(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "qwen3", values={"qwen3.pooling_type": 2})

    with pytest.raises(ConfigError, match="pooling cls is not supported for Qwen3ForCausalLM"):
        fetch_served_checkpoint(EngineConfig(model=str(path)))
    assert fetch_served_checkpoint(EngineConfig(model=str(path), pooling="mean")).task.pooled is not None


def test_a_config_by_itself_tells_the_shapes(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | {"classifier_from_token": ["x", "y", "z"]}))
    served = fetch_served_checkpoint(EngineConfig(model=str(path)))

    assert served.task.pooled is not None
    assert served.task.pooled.pooling.layers == (PooledLayer("lm_head", 8, 3, tokens=(0, 1, 2)),)


def test_overrides_replace_fields_where_they_are(tmp_path: Path) -> None:
    raw = {"a": 1, "text_config": {"b": 2, "c": {"d": 3}}}

    assert merged(raw, {"text_config": {"c": {"d": 4}}, "e": 5}) == {
        "a": 1, "text_config": {"b": 2, "c": {"d": 4}}, "e": 5
    }  # fmt: skip
    assert merged(raw, {"text_config": None}) == {"a": 1, "text_config": None}
    write(tmp_path, {})
    served = fetch_served_checkpoint(EngineConfig(model=str(tmp_path), hf_overrides={"architectures": ["LlamaModel"]}))
    assert served.raw == CONFIG | {"architectures": ["LlamaModel"]}
    assert not served.task.generates


def test_drafts_need_a_model_that_generates(tmp_path: Path) -> None:
    write(tmp_path, EMBEDDER)
    settings: dict[str, Any] = {"model": str(tmp_path), "speculative_method": "ngram"}

    with pytest.raises(ConfigError, match="speculative_method=ngram drafts tokens"):
        fetch_served_checkpoint(EngineConfig(**settings))
    with pytest.raises(ConfigError, match="runner=pooling generates none"):
        EngineConfig(**settings, runner="pooling")
    assert fetch_served_checkpoint(EngineConfig(**settings, runner="generate")).task.generates


@pytest.mark.parametrize(
    ("limits", "tokenizer", "most"),
    [
        ({"max_seq_length": 7}, 9, 7),
        ({}, 9, 9),
        ({"max_seq_length": None}, 10**30, None),
    ],
)
def test_how_many_tokens_a_text_may_have(
    limits: dict[str, Any], tokenizer: int, most: int | None, tmp_path: Path
) -> None:
    files = {"sentence_bert_config.json": limits, "tokenizer_config.json": {"model_max_length": tokenizer}}

    assert pooled_of(tmp_path, {}, EMBEDDER | files).max_tokens == most
