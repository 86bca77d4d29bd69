"""Reads the tokenizer of a Hugging Face folder: tokenizer.json and its small companion files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from jaxserve.errors import ConfigError
from jaxserve.model_source.fields import Fields, read_json
from jaxserve.text.tokenizer_parts import TokenizerParts


def tokenizer_from_folder(folder: Path) -> TokenizerParts:
    """Load the folder's tokenizer; without a tokenizer.json, transformers converts other files. Raises
    `ConfigError`."""
    config = _read_json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(_read_json(folder / "special_tokens_map.json")) | _special_tokens(config)
    if (folder / "tokenizer.json").is_file():
        backend = _load_json_tokenizer(folder / "tokenizer.json")
        try:
            _apply_bos_eos(backend, config, special_tokens)
        except Exception as error:  # the bindings raise bare Exception
            raise ConfigError(f"{folder / 'tokenizer.json'} holds no working tokenizer: {error}") from error
    else:
        backend, special_tokens = _convert(folder)
    bos_id = backend.token_to_id(special_tokens.get("bos_token", ""))
    return TokenizerParts(
        backend=backend,
        eos_ids=_eos_ids(folder, backend.token_to_id(special_tokens.get("eos_token", ""))),
        bos_id=bos_id,
        special_tokens=special_tokens,
        chat_template=_chat_template(folder, config),
    )


def _load_json_tokenizer(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the bindings raise bare Exception, and BaseException if Rust panics
        raise ConfigError(f"{path} can't be read as a tokenizer: {error}") from error


def _convert(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    # Imported here because it takes seconds, which only folders without a tokenizer.json need to spend
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        backend = tokenizer.backend_tokenizer
    except Exception as error:  # damaged files can raise any error
        raise ConfigError(
            f"{folder} has no tokenizer.json, and transformers can't make one from its files: {error}. "
            "Add the model's tokenizer.json to the folder"
        ) from error
    return backend, {name: str(text) for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    texts = {
        name: token.get("content") if isinstance(token, dict) else token
        for name, token in config.items()
        if name.endswith("_token") and not name.startswith("add_")
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _apply_bos_eos(backend: tokenizers.Tokenizer, config: dict[str, Any], special_tokens: dict[str, str]) -> None:
    """Add or omit BOS and EOS as tokenizer_config.json says; it has priority over tokenizer.json."""
    bare, framed = (backend.encode("a", add_special_tokens=added).ids for added in (False, True))
    first, last = (framed[0], framed[-1]) if framed else (None, None)
    texts: dict[str, str | None] = {}
    changed = False
    for end, outermost in (("bos", first), ("eos", last)):
        text = special_tokens.get(f"{end}_token", "")
        token_id = backend.token_to_id(text)
        added_now = len(framed) > len(bare) and outermost == token_id
        wanted = config.get(f"add_{end}_token")
        if not isinstance(wanted, bool) or token_id is None:
            wanted = added_now
        changed |= wanted != added_now
        texts[end] = text if wanted else None
    if changed:
        backend.post_processor = TemplateProcessing(
            single=[text for text in (texts["bos"], "$A", texts["eos"]) if text],
            special_tokens=[(text, backend.token_to_id(text)) for text in dict.fromkeys(texts.values()) if text],
        )


def _eos_ids(folder: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    # config.json counts only if generation_config.json, the newer file, has no end tokens
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        ids = ids or Fields(_read_json(folder / name), str(folder / name)).token_ids("eos_token_id")
    return tuple(dict.fromkeys([*ids, *([] if tokenizer_eos is None else [tokenizer_eos])]))


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} can't be read: {error}") from error
    template = config.get("chat_template")
    if template is None or isinstance(template, str):
        return template
    by_name = _named_templates(template)
    if by_name is None:
        fields = Fields(config, str(folder / "tokenizer_config.json"))
        raise fields.error("chat_template", "a string, or a list of objects with a name and a template")
    return by_name.get("default") or (next(iter(by_name.values())) if len(by_name) == 1 else None)


def _named_templates(template: Any) -> dict[str, str] | None:
    named: dict[str, str] = {}
    for entry in template if isinstance(template, list) else [None]:
        name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str):
            return None
        named[name] = text
    return named
