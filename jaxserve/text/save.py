"""Takes a model's tokenizer along to another folder, as files that any reader of Hugging Face folders understands.

A folder's files are copied as they are. A GGUF's tokenizer is written as tokenizer.json with the small files around it,
so that the same text gives the same ids, ends of a generation and prompts of a conversation.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from jaxserve.model_source import ModelSource, tokenizer_files
from jaxserve.model_source.gguf_metadata import GGUFMetadata
from jaxserve.text.tokenizer_parts import TokenizerParts


def save_tokenizer(source: ModelSource, folder: Path) -> None:
    """Write it into `folder`, generation_config.json with it. Raises `ConfigError` where a GGUF's can't be built."""
    if source.kind != "gguf":
        for file in tokenizer_files(source.path):
            shutil.copyfile(file, folder / file.name)
        return
    from jaxserve.text.gguf_tokenizer import tokenizer_from_gguf

    parts = tokenizer_from_gguf(GGUFMetadata(source.path))
    parts.backend.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", _config(parts))
    _write(folder / "generation_config.json", {"eos_token_id": list(parts.eos_ids)})


def _config(parts: TokenizerParts) -> dict[str, Any]:
    # The template stands here and not in a file of its own: reading text turns its line ends into others
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **parts.special_tokens}
    return config if parts.chat_template is None else {**config, "chat_template": parts.chat_template}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
