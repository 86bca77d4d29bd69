"""Finds the chat templates of a Hugging Face folder, by name, and the one that `--chat-template` names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.model_source.fields import Fields, read_json

DEFAULT = "default"
"""The name of the template that is used unless another is chosen."""
QWEN3_RERANKER = "qwen3_reranker"
"""The name of Qwen3-Reranker's prompt, in `PooledTask.pair_template` and for `--chat-template`: a form of pairs, beside
which conversations have the model's own template."""


def chat_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the sources of all templates by name. Raises `ConfigError` for files that can't be read.

    Of several with one name, the first of these counts: chat_template.jinja and additional_chat_templates/NAME.jinja,
    tokenizer_config.json, and chat_template.json, which image models have.
    """
    templates = _listed(folder / "chat_template.json", _read_if_present(folder / "chat_template.json"))
    templates |= _listed(folder / "tokenizer_config.json", tokenizer_config)
    files = {file.stem: file for file in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files[DEFAULT] = folder / "chat_template.jinja"
    templates |= {name: _read_text(file) for name, file in files.items()}
    return templates


def default_chat_template(templates: Mapping[str, str]) -> str | None:
    """Return the template named default, or the only one; None if there is neither."""
    return templates.get(DEFAULT) or (next(iter(templates.values())) if len(templates) == 1 else None)


def choose_chat_template(wanted: str | None, templates: Mapping[str, str]) -> str | None:
    """Return the source of the template that `--chat-template` means: the name of one of the model's, or a file; by
    default the model's default. Raises `ConfigError` if there is no such template, or it can't be read."""
    if wanted in (None, QWEN3_RERANKER):
        return default_chat_template(templates)
    if wanted in templates:
        return templates[wanted]
    try:
        return Path(wanted).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--chat-template {wanted} can't be read: {error}. It should be a file, or the name of one of the model's "
            f"own templates: {', '.join(templates) or 'it has none'}"
        ) from error


def _read_if_present(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template {path} can't be read: {error}") from error


def _listed(path: Path, content: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates in a file's field `chat_template`: one, or a list of named ones."""
    value = content.get("chat_template")
    if value is None or isinstance(value, str):
        return {} if value is None else {DEFAULT: value}
    named: dict[str, str] = {}
    for entry in value if isinstance(value, list) else [None]:
        name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str):
            raise Fields(content, str(path)).error(
                "chat_template", "a string, or a list of objects with a name and a template"
            )
        named[name] = text
    return named
