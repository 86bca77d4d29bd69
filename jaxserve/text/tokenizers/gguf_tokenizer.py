"""Builds a tokenizer from the metadata of a GGUF file.

Supports byte-level BPE (`tokenizer.ggml.model` "gpt2") with the pre-tokenizer named by `tokenizer.ggml.pre`,
SentencePiece BPE ("llama"), whose merges follow from the scores of its pieces, and of encoders WordPiece ("bert") and
Unigram ("t5"). Any other kind is an error that names it. The names and regular expressions of pre-tokenizers are those
of llama.cpp's converter.
"""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import Regex, decoders, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from jaxserve.errors import ConfigError
from jaxserve.model_source.gguf_config import token_id
from jaxserve.model_source.gguf_metadata import GGUFMetadata
from jaxserve.text.tokenizers.chat_template_files import DEFAULT
from jaxserve.text.tokenizers.encoder_backends import frame_texts, unigram_backend, wordpiece_backend
from jaxserve.text.tokenizers.sentencepiece_backend import (
    SPACE,
    Piece,
    PieceKind,
    add_whole_tokens,
    bpe_backend,
    sentencepiece_backend,
)
from jaxserve.text.tokenizers.tokenizer_parts import HARMONY_ENDS, TokenizerParts

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CASELESS + r"\p{N}{1,3}" + _TAIL
_QWEN2 = _CASELESS + r"\p{N}" + _TAIL
# As Qwen2's, with the marks of a letter in its word
_QWEN35 = _QWEN2.replace(r"?\p{L}+|", r"?[\p{L}\p{M}]+|").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_SEED = _CASELESS + r"\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
# A word that may begin with capitals, and one of capitals
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = "|".join((*_CASED, r"\p{N}")) + _CASED_TAIL
_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = "|".join((*(word + _SUFFIX for word in _CASED), r"\p{N}{1,3}")) + _CASED_TAIL
# Numbers, then Chinese and Japanese; then a word may begin with a mark of ASCII
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_DIGITS = (r"\p{N}", _GPT2)
# The regular expressions that split a text before merging, applied in order; each match becomes a word
_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "gpt2", "olmo", "exaone4", "modern-bert", "roberta-bpe"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), (_QWEN2,)),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), (_GPT4O,)),
    "qwen35": (_QWEN35,),
    "seed-coder": (_SEED,),
    "tekken": (_TEKKEN,),
    "deepseek-v3": _DEEPSEEK_V3,
    "default": _DEFAULT,
}
_IGNORE_MERGES = _BOS_BY_DEFAULT = {"llama-bpe", "llama3", "llama-v3", "tekken"}
_NFC_NORMALIZED = {"qwen2", "qwen35", "deepseek-r1-qwen", "command-r", "modern-bert"}
# Phi-3's other whole tokens swallow the white space after them; GGUF files don't say so
_PHI3_UNSTRIPPED = {"<unk>", "<s>", "<|endoftext|>"}
_NAMES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "cls_token": "cls",
    "sep_token": "seperator",
}
_ENCODERS = ("bert", "jina-bert-v2", "modern-bert", "nomic-bert")
# Files from older converters name only the end-of-text token as EOS; these tokens always end a turn too
_TURN_ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|eom_id|>",
    "<|END_OF_TURN_TOKEN|>",
    "[|endofturn|]",
)


def tokenizer_from_gguf(metadata: GGUFMetadata) -> TokenizerParts:
    """Return the tokenizer of the file. Raises `ConfigError` naming a kind or pre-tokenizer that is not supported."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    kinds = metadata.array("tokenizer.ggml.token_type") or [PieceKind.NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise ConfigError(f"{metadata.path}: tokenizer.ggml.token_type should be a number for each token")
    if kind == "gpt2":
        backend = _byte_level(metadata, tokens, kinds)
    elif kind == "llama":
        backend = _sentencepiece(metadata, tokens, kinds)
    elif kind == "bert":
        backend = _wordpiece(metadata, tokens, kinds)
    elif kind == "t5":
        unknown = token_id(metadata, "unknown", len(tokens))
        pieces = _scored_pieces(metadata, tokens, kinds)
        backend = unigram_backend(pieces, unknown, _character_map(metadata), str(metadata.path))
    else:
        raise ConfigError(
            f"{metadata.path}: tokenizer model {kind!r} is not supported in GGUF files; supported: gpt2, llama, bert, "
            "t5. Use the model's Hugging Face folder instead"
        )
    ids = {name: token_id(metadata, name, len(tokens)) for name in _NAMES.values()}
    if metadata.get("general.architecture") in _ENCODERS:
        return _encoder_parts(backend, metadata, tokens, ids)
    add_bos = metadata.get("tokenizer.ggml.add_bos_token")
    if add_bos is None:
        add_bos = kind == "llama" or metadata.get("tokenizer.ggml.pre") in _BOS_BY_DEFAULT
    _add_bos_eos(
        backend,
        tokens[ids["bos"]] if add_bos and ids["bos"] is not None else None,
        tokens[ids["eos"]] if metadata.get("tokenizer.ggml.add_eos_token") and ids["eos"] is not None else None,
    )
    return TokenizerParts(
        backend=backend,
        eos_ids=gguf_end_ids(metadata),
        bos_id=ids["bos"],
        special_tokens=_special_tokens(tokens, ids),
        chat_templates=_chat_templates(metadata),
    )


def gguf_end_ids(metadata: GGUFMetadata) -> tuple[int, ...]:
    """Return the ids that end a generation. Raises `ConfigError` for one that the model doesn't have."""
    if metadata.get("general.architecture") in _ENCODERS:
        return ()
    tokens = list(map(str, metadata.array("tokenizer.ggml.tokens") or ()))
    ends_of_turns = HARMONY_ENDS if set(HARMONY_ENDS).issubset(tokens) else _TURN_ENDS
    named = [token_id(metadata, name, len(tokens)) for name in ("eos", "eot", "eom")]
    turn_ends = [index for index, token in enumerate(tokens) if token in ends_of_turns]
    return tuple(dict.fromkeys(found for found in (*named, *turn_ends) if found is not None))


def _special_tokens(tokens: list[str], ids: dict[str, int | None]) -> dict[str, str]:
    return {name: tokens[index] for name, key in _NAMES.items() if (index := ids[key]) is not None}


def _chat_templates(metadata: GGUFMetadata) -> dict[str, str]:
    keys = {DEFAULT: "tokenizer.chat_template"}
    for name in metadata.array("tokenizer.chat_templates") or []:
        keys[str(name)] = f"tokenizer.chat_template.{name}"
    found = {name: metadata.get(key) for name, key in keys.items()}
    return {name: template for name, template in found.items() if isinstance(template, str)}


def _strings(metadata: GGUFMetadata, key: str) -> list[str]:
    values = metadata.array(key)
    if values is None:
        raise ConfigError(
            f"{metadata.path} has no {key}, so it holds no tokenizer. Use the model's Hugging Face folder"
        )
    return [str(value) for value in values]


def _byte_level(metadata: GGUFMetadata, tokens: list[str], kinds: list[Any]) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre") or "default"
    if pre not in _SPLITS:
        raise ConfigError(
            f"{metadata.path}: pre-tokenizer {pre!r} is not supported; supported: {', '.join(_SPLITS)}. "
            "Use the model's Hugging Face folder instead"
        )
    pairs = [merge.split(" ", 1) for merge in _strings(metadata, "tokenizer.ggml.merges")]
    backend = bpe_backend(
        str(metadata.path),
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[(pair[0], pair[1]) for pair in pairs if len(pair) == 2],
        ignore_merges=pre in _IGNORE_MERGES,
    )
    if pre in _NFC_NORMALIZED:
        backend.normalizer = normalizers.NFC()
    splits: list[Any] = [pre_tokenizers.Split(Regex(split), "isolated") for split in _SPLITS[str(pre)]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    add_whole_tokens(backend, [Piece(token, 0.0, kind) for token, kind in zip(tokens, kinds)])
    return backend


def _sentencepiece(metadata: GGUFMetadata, tokens: list[str], kinds: list[Any]) -> tokenizers.Tokenizer:
    strips = metadata.get("general.architecture") == "phi3"
    pieces = _scored_pieces(metadata, tokens, kinds)
    return sentencepiece_backend(
        [piece._replace(rstrip=strips and piece.text not in _PHI3_UNSTRIPPED) for piece in pieces],
        space_prefix="never" if metadata.get("tokenizer.ggml.add_space_prefix") is False else "always",
        where=str(metadata.path),
    )


def _scored_pieces(metadata: GGUFMetadata, tokens: list[str], kinds: list[Any]) -> list[Piece]:
    scores = metadata.array("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ConfigError(f"{metadata.path}: tokenizer.ggml.scores is missing or not as long as the vocabulary")
    if not all(isinstance(score, int | float) for score in scores):
        raise ConfigError(f"{metadata.path}: tokenizer.ggml.scores should be a number for each token")
    return [Piece(token, float(score), kind) for token, score, kind in zip(tokens, scores, kinds)]


def _character_map(metadata: GGUFMetadata) -> bytes:
    values = metadata.array("tokenizer.ggml.precompiled_charsmap") or []
    if not all(isinstance(value, int) for value in values):
        raise ConfigError(f"{metadata.path}: tokenizer.ggml.precompiled_charsmap should hold bytes")
    return bytes(int(value) & 0xFF for value in values)


def _wordpiece(metadata: GGUFMetadata, tokens: list[str], kinds: list[Any]) -> tokenizers.Tokenizer:
    """Return the backend of a vocabulary in which the pieces that begin a word have a mark of a space."""
    unknown = token_id(metadata, "unknown", len(tokens))
    pieces = []
    for token, kind in zip(tokens, kinds, strict=True):
        is_whole = kind in (PieceKind.CONTROL, PieceKind.UNKNOWN) or (token[:1] == "[" and token[-1:] == "]")
        word = token[1:] if token.startswith(SPACE) else f"##{token}"
        pieces.append(Piece(token if is_whole else word, 0.0, kind))
    strips = metadata.get("tokenizer.ggml.normalizer.strip_accents")
    return wordpiece_backend(
        pieces,
        "[UNK]" if unknown is None else tokens[unknown],
        lowercase=metadata.get("tokenizer.ggml.normalizer.lowercase") is not False,
        strip_accents=strips if isinstance(strips, bool) else None,
    )


def _encoder_parts(
    backend: tokenizers.Tokenizer, metadata: GGUFMetadata, tokens: list[str], ids: dict[str, int | None]
) -> TokenizerParts:
    """Return the tokenizer of an encoder, whose texts stand between two special tokens."""
    special = _special_tokens(tokens, ids)
    first = special.get("cls_token") or special.get("bos_token") or "[CLS]"
    last = special.get("sep_token") or special.get("eos_token") or "[SEP]"
    for text in (first, last):
        if backend.token_to_id(text) is None:
            raise ConfigError(f"{metadata.path}: its vocabulary has no token {text!r}, which stands beside each text")
    # Only the RoBERTas have this token, and they have no types
    frame_texts(backend, first, last, has_token_types=last != "</s>")
    return TokenizerParts(backend, (), None, special | {"cls_token": first, "sep_token": last}, {})


def _add_bos_eos(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    if bos is None and eos is None:
        return
    backend.post_processor = TemplateProcessing(
        single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
        special_tokens=[(text, backend.token_to_id(text)) for text in dict.fromkeys((bos, eos)) if text],
    )
