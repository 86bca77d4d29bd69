"""Finds tokens in a model's vocabulary by their texts, without building its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxserve.errors import ConfigError
from jaxserve.model_source.fields import TOKEN_ID, Fields, read_json
from jaxserve.model_source.gguf_metadata import GGUFMetadata
from jaxserve.model_source.source import ModelSource


def token_ids(source: ModelSource, texts: Sequence[str]) -> list[int | None]:
    """Return the id of each text as the vocabulary has it, None for one that is no token.

    Raises `ConfigError` for a model whose tokens can't be read.
    """
    vocabulary = _of_gguf(source.path) if source.kind == "gguf" else _of_folder(source.path)
    found = [vocabulary.get(text) for text in texts]
    if not all(one is None or (isinstance(one, int) and one in TOKEN_ID) for one in found):
        raise ConfigError(f"{source.path}: the vocabulary has tokens whose ids are no numbers: fetch its files again")
    return found


def _of_gguf(path: Path) -> Mapping[str, int]:
    tokens = GGUFMetadata(path).array("tokenizer.ggml.tokens") or []
    return {str(text): i for i, text in enumerate(tokens)}


def _of_folder(folder: Path) -> Mapping[str, int]:
    file = folder / "tokenizer.json"
    if file.is_file():
        fields = Fields(read_json(file), str(file))
        vocabulary = fields.object("model").get("vocab", {})
        try:
            if isinstance(vocabulary, list):  # Unigram's, with a score for each
                vocabulary = {each[0]: i for i, each in enumerate(vocabulary)}
            return {**vocabulary, **{each["content"]: each["id"] for each in fields.get("added_tokens", [])}}
        except (LookupError, TypeError) as error:
            raise ConfigError(f"{file}: the vocabulary can't be read ({error!r}): fetch the file again") from error
    file = folder / "vocab.json"
    if not file.is_file():
        raise ConfigError(f"{folder} has no tokenizer.json and no vocab.json, in which tokens could be looked up")
    added_file = folder / "added_tokens.json"
    return {**read_json(file), **(read_json(added_file) if added_file.is_file() else {})}
