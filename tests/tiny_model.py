"""A whole model folder in miniature: a two-layer Llama without weights (`--load-format dummy`) that knows bytes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.text.tokenizers.token_bytes import byte_alphabet

EOS_ID = 257
VOCAB_SIZE = 258
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": EOS_ID,
}
SETTINGS = {
    "load_format": "dummy",
    "dtype": "float32",
    "device": "cpu",
    "max_running_requests": 4,
    "cuda_graph_bs": [4],
    "chunked_prefill_size": 16,
    "max_total_tokens": 512,
}
"""What keeps its start short: few programs, little memory."""


def byte_tokenizer(*special: str) -> tokenizers.Tokenizer:
    """Return a tokenizer whose ids are bytes; the special tokens come after them, from 256 on."""
    vocab = {char: value for value, char in byte_alphabet().items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return backend


def write_tiny_model(folder: Path, **changes: Any) -> Path:
    """Write it and return the folder. A byte is its own id; then come `<s>` and `</s>`."""
    byte_tokenizer("<s>", "</s>").save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


def of_this_run(folders: pytest.TempPathFactory) -> Path:
    """Return the folder that all processes of a test run share."""
    own = folders.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@contextlib.contextmanager
def locked(folder: Path, name: str) -> Iterator[None]:
    """Let one process of this run at a time do what has this name: others find the programs that it has compiled."""
    with (folder / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def tiny_settings(folders: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of a tiny model, by name. One folder a test run: its programs are compiled once for all tests."""
    folder = of_this_run(folders) / "tiny-model"
    if not folder.exists():
        with contextlib.suppress(OSError):  # another worker of pytest-xdist was faster
            write_tiny_model(folders.mktemp("tiny-model")).rename(folder)
    return {"model": str(folder), "program_cache_dir": str(folder / "programs"), **SETTINGS}
