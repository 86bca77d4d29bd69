"""Saves a model's tokenizer to another folder, as files that any reader of Hugging Face folders understands.

A folder's files are copied unchanged. A GGUF's tokenizer is written as tokenizer.json with its small companion files,
so that ids, end-of-generation ids and chat prompts stay the same.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from jaxserve.model_source import ModelSource, find_tokenizer_files
from jaxserve.model_source.generation_config import GENERATION_CONFIG, read_generation_config
from jaxserve.model_source.gguf_metadata import GGUFMetadata
from jaxserve.text.tokenizers.chat_template_files import DEFAULT
from jaxserve.text.tokenizers.tokenizer_parts import TokenizerParts


def save_tokenizer(source: ModelSource, folder: Path) -> None:
    """Save the tokenizer and generation_config.json to `folder`. Raises `ConfigError` if a GGUF's can't be built."""
    if source.kind != "gguf":
        for file in find_tokenizer_files(source.path):
            copy = folder / file.relative_to(source.path)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
        return
    from jaxserve.text.tokenizers.gguf_tokenizer import tokenizer_from_gguf

    parts = tokenizer_from_gguf(GGUFMetadata(source.path))
    parts.backend.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", _config(parts))
    _write(folder / GENERATION_CONFIG, {**read_generation_config(source)[0], "eos_token_id": list(parts.eos_ids)})


def _config(parts: TokenizerParts) -> dict[str, Any]:
    # The template goes here and not into its own file, since reading a text file converts its line ends
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **parts.special_tokens}
    templates: Any = [{"name": name, "template": text} for name, text in parts.chat_templates.items()]
    if list(parts.chat_templates) == [DEFAULT]:
        templates = parts.chat_templates[DEFAULT]
    return {**config, "chat_template": templates} if templates else config


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
