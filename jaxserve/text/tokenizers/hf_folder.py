"""Reads the tokenizer of a Hugging Face folder and its small companion files.

Of several tokenizers in a folder, the first of tokenizer.json, tokenizer.model, tekken.json and XLM-RoBERTa's
sentencepiece.bpe.model counts; transformers makes one from other files, such as vocab.txt. `chat_template_files` finds
the chat templates.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import normalizers
from tokenizers.processors import TemplateProcessing

from jaxserve.errors import ConfigError
from jaxserve.model_source.fields import TOKEN_ID, Fields, read_json
from jaxserve.model_source.sentence_modules import lowercases
from jaxserve.text.tokenizers.chat_template_files import chat_templates
from jaxserve.text.tokenizers.encoder_backends import XLM_ROBERTA
from jaxserve.text.tokenizers.sentencepiece_model import (
    backend_from_sentencepiece,
    backend_from_xlm_roberta,
    read_sentencepiece_model,
)
from jaxserve.text.tokenizers.tekken import SPECIAL_TOKENS as TEKKEN_SPECIAL_TOKENS
from jaxserve.text.tokenizers.tekken import backend_from_tekken
from jaxserve.text.tokenizers.token_bytes import component_steps
from jaxserve.text.tokenizers.tokenizer_parts import TokenizerParts

_XLM_ROBERTA_FILE = "sentencepiece.bpe.model"
# Classes whose settings in tokenizer_config.json have priority over the normalizer in tokenizer.json
_BERT_CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MPNetTokenizer")
_BERT_SETTINGS = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
_TOKEN_TYPES = "token_type_ids"


def tokenizer_from_folder(folder: Path, model: Path | None = None) -> TokenizerParts:
    """Load the folder's tokenizer. `model` is the folder of the model, if that is another. Raises `ConfigError`."""
    model = model or folder
    config = _read_json(folder / "tokenizer_config.json")
    backend, own_tokens, adds_bos = _load_backend(folder, config)
    special_tokens = own_tokens | _special_tokens(_read_json(folder / "special_tokens_map.json"))
    special_tokens |= _special_tokens(config)
    try:
        if adds_bos and config.get("add_bos_token") is None:
            config = config | {"add_bos_token": True}
        _apply_bos_eos(backend, config, special_tokens)
        _apply_normalizing(backend, config, lowercases=lowercases(model))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the bindings raise bare Exception, and BaseException if Rust panics
        raise ConfigError(f"{folder} holds no working tokenizer: {error}") from error
    bos_id = backend.token_to_id(special_tokens.get("bos_token", ""))
    templates = chat_templates(folder, config)
    return TokenizerParts(
        backend=backend,
        eos_ids=end_ids(model, backend.token_to_id(special_tokens.get("eos_token", ""))),
        bos_id=bos_id,
        special_tokens=special_tokens,
        chat_templates=templates,
        has_token_types=_TOKEN_TYPES in (config.get("model_input_names") or _TOKEN_TYPES),
    )


def _load_backend(folder: Path, config: dict[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str], bool]:
    """Return the backend, the special tokens that its file names, and whether BOS comes first unless the folder's other
    files say no."""
    if (folder / "tokenizer.json").is_file():
        return _load_json_tokenizer(folder / "tokenizer.json"), {}, False
    if (folder / "tokenizer.model").is_file():
        model = read_sentencepiece_model(folder / "tokenizer.model")
        declared = {"added_tokens_decoder": _declared_tokens(folder, config)}
        backend = backend_from_sentencepiece(model, config | declared, str(folder / "tokenizer_config.json"))
        return backend, model.special_tokens, True
    if (folder / "tekken.json").is_file():
        return backend_from_tekken(folder / "tekken.json"), dict(TEKKEN_SPECIAL_TOKENS), True
    model_type = _read_json(folder / "config.json").get("model_type")
    if model_type == "xlm-roberta" and (folder / _XLM_ROBERTA_FILE).is_file():
        model = read_sentencepiece_model(folder / _XLM_ROBERTA_FILE, "Unigram")
        return backend_from_xlm_roberta(model, str(folder / _XLM_ROBERTA_FILE)), dict(XLM_ROBERTA), False
    return *_convert(folder), False


def _declared_tokens(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return `added_tokens_decoder`. In older folders, added_tokens.json and special_tokens_map.json hold its facts."""
    declared = Fields(config, str(folder / "tokenizer_config.json")).object("added_tokens_decoder")
    if declared:
        return dict(declared)
    names = _read_json(folder / "special_tokens_map.json")
    more = names.get("additional_special_tokens")
    entries = more if isinstance(more, list) else []
    special = [entry.get("content") if isinstance(entry, dict) else entry for entry in entries]
    special += _special_tokens(names).values()
    added = Fields(_read_json(folder / "added_tokens.json"), str(folder / "added_tokens.json"))
    return {str(added.integer(text, TOKEN_ID)): {"content": text, "special": text in special} for text in added.raw}


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
    # Without them, transformers makes a tokenizer that has special tokens only
    files = tokenizer.vocab_files_names.values()
    if not any((folder / name).is_file() for name in files):
        raise ConfigError(f"{folder} has no tokenizer, none of {', '.join(files)}; add the model's tokenizer.json")
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
        single, second = ([text for text in (texts["bos"], name, texts["eos"]) if text] for name in ("$A", "$B"))
        backend.post_processor = TemplateProcessing(
            single=single,
            pair=[*single, *second],
            special_tokens=[(text, backend.token_to_id(text)) for text in dict.fromkeys(texts.values()) if text],
        )


def _apply_normalizing(backend: tokenizers.Tokenizer, config: dict[str, Any], *, lowercases: bool) -> None:
    """Normalize as tokenizer_config.json says of a BERT, and let all texts be lower case first if `lowercases`."""
    normalizer = backend.normalizer
    if isinstance(normalizer, normalizers.BertNormalizer):
        is_bert = str(config.get("tokenizer_class")).removesuffix("Fast") in _BERT_CLASSES
        for name, attribute in _BERT_SETTINGS.items():
            if is_bert and isinstance(config.get(name), bool):
                setattr(normalizer, attribute, config[name])
        backend.normalizer = normalizer
    steps = component_steps(backend.normalizer)
    if lowercases and not any(step["type"] == "Lowercase" or step.get("lowercase") for step in steps):
        own = [] if normalizer is None else [normalizer]
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])


def end_ids(folder: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Return the end tokens that any file of a model names, and its tokenizer's.

    Raises `ConfigError` for one that the model doesn't have.
    """
    generation = Fields(_read_json(folder / "generation_config.json"), str(folder / "generation_config.json"))
    config = Fields(_read_json(folder / "config.json"), str(folder / "config.json"))
    # A model of images and texts has its text model inside.
    inner = Fields(config.object("text_config"), f"{config.where}: text_config")
    found: list[int] = []
    vocab_size = inner.raw.get("vocab_size", config.raw.get("vocab_size"))
    for fields in (generation, config, inner):
        for token_id in fields.token_ids("eos_token_id"):
            if isinstance(vocab_size, int) and token_id >= vocab_size:
                raise fields.error("eos_token_id", f"an id, or a list of ids, below vocab_size, {vocab_size}")
            found.append(token_id)
    return tuple(dict.fromkeys([*found, *([] if tokenizer_eos is None else [tokenizer_eos])]))
