"""Encoders in GGUF files, as llama.cpp's converter writes them: their vectors are those of the folder they were made
from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map
from safetensors.numpy import load_file

from jaxserve.errors import ConfigError
from jaxserve.model_source import ModelSource, read_config
from jaxserve.model_source.tasks import read_task
from tests.models.encoding import difference, load
from tests.models.pooled import POOLED, cases, served
from tests.weights.gguf_converter import Tensors, write

NAMES = ("bert_mean", "xlmr_pair", "roberta_labels", "distilbert_labels", "nomic", "modernbert", "gemma_bidirectional")
_KINDS = {
    "bert": "BERT",
    "distilbert": "BERT",
    "gemma3_text": "GEMMA_EMBEDDING",
    "modernbert": "MODERN_BERT",
    "nomic_bert": "NOMIC_BERT",
    "roberta": "BERT",
    "xlm-roberta": "BERT",
}
_MEAN, _CLS, _RANK = 1, 2, 4
_POOLING = {"bert_mean": _MEAN, "nomic": _MEAN, "gemma_bidirectional": _MEAN, "modernbert": _CLS}
_OF_DISTILBERT = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
}
_LEFT_OUT = ("cls.", "pooler.", "embeddings.position_ids")

pytestmark = pytest.mark.slow


def converted(name: str, path: Path) -> ModelSource:
    """Write a fixture as a GGUF file."""
    raw = json.loads((POOLED / name / "config.json").read_text())
    config = {_OF_DISTILBERT.get(field, field): value for field, value in raw.items()}
    kind = MODEL_ARCH[_KINDS[config["model_type"]]]
    offset = config["pad_token_id"] + 1 if "roberta" in config["model_type"] else 0
    values = _metadata(config, offset) | {"pooling_type": _POOLING.get(name, _RANK)}
    names = get_tensor_name_map(kind, values["block_count"])
    tensors: Tensors = {}
    weights = load_file(POOLED / name / "model.safetensors")
    is_roberta = "classifier.dense.weight" in weights
    for stored, data in weights.items():
        own = stored
        for prefix in ("bert.", "distilbert.", "roberta."):
            own = own.removeprefix(prefix)
        if not is_roberta and own.startswith("classifier."):
            own = own.replace("classifier.", "classifier.out_proj.")
        own = own.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        if own.startswith(_LEFT_OUT):
            continue
        data = data[offset:] if own == "embeddings.position_embeddings.weight" else data
        if config["model_type"] == "gemma3_text":
            data, own = data + np.float32("norm" in own), f"model.{own}"
        found = names.get_name(own, try_suffixes=(".weight", ".bias"))
        assert found is not None, own
        tensors[found] = np.ascontiguousarray(data), None
    for module in (POOLED / name).glob("[23]_Dense"):
        dense = load_file(module / "model.safetensors")
        tensors[f"dense_{module.name[0]}.weight"] = dense["linear.weight"], None
    named = {key.replace(".", "__"): value for key, value in values.items()}
    return ModelSource(write(path, tensors, MODEL_ARCH_NAMES[kind], **named), "gguf", name)


def _metadata(config: dict[str, Any], offset: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"] - offset,
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
    }
    if config["model_type"] == "gemma3_text":
        rms = {"attention.layer_norm_rms_epsilon": 1e-6, "attention.key_length": 8, "attention.value_length": 8}
        window = {"attention.sliding_window": config["sliding_window"], "rope.freq_base": 1e6}
        pattern = {"attention.sliding_window_pattern": [True, True, False]}
        return {**found, **rms, **window, **pattern, "attention.head_count_kv": config["num_key_value_heads"]}
    found |= {"attention.causal": False, "attention.layer_norm_epsilon": config.get("layer_norm_eps", 1e-12)}
    if config["model_type"] == "modernbert":
        bases = {"rope.freq_base": config["global_rope_theta"], "rope.freq_base_swa": config["local_rope_theta"]}
        windows = {
            "attention.sliding_window": config["local_attention"],
            "attention.sliding_window_pattern": config["global_attn_every_n_layers"],
        }
        return {**found, **bases, **windows, "attention.layer_norm_epsilon": 1e-5, "rope.scaling.type": "none"}
    if config["model_type"] == "nomic_bert":
        found["rope.freq_base"] = config["rope_parameters"]["rope_theta"]
    labels = {"classifier.output_labels": list(config["id2label"].values())} if "id2label" in config else {}
    return {**found, **labels, "token_type_count": config.get("type_vocab_size", 1)}


@pytest.mark.parametrize("name", NAMES)
def test_vectors_of_a_file_are_those_of_the_folder(name: str, tmp_path: Path) -> None:
    source = converted(name, tmp_path / "m.gguf")
    model, params = load(source)
    assert difference(model, params, cases(name)) < 1e-4
    folder, file = (served(each).task.pooled for each in (ModelSource(POOLED / name, "folder", name), source))
    assert folder is not None
    assert file is not None
    assert (file.pooling.method, file.labels, file.size) == (folder.pooling.method, folder.labels, folder.size)


def test_a_config_made_of_a_file_says_how_it_pools(tmp_path: Path) -> None:
    raw = read_config(converted("bert_mean", tmp_path / "m.gguf"))
    pooled = read_task(None, raw).pooled
    assert pooled is not None
    assert pooled.pooling.method == "mean"


def test_labels_without_a_pooler_are_refused(tmp_path: Path) -> None:
    source = converted("bert_labels", tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match="converter leaves out the pooler of a BERT with labels; serve the folder"):
        served(source)
