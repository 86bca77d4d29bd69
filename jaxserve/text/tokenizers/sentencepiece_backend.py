"""Builds a `tokenizers` backend that encodes as SentencePiece's BPE does, from the pieces of a model.

Owns the merges, which follow from the scores, and how spaces and whole tokens are treated. Reads no files:
`sentencepiece_model` and `gguf_tokenizer` do.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from jaxserve.errors import ConfigError

SPACE = "▁"


class PieceKind(enum.IntEnum):
    """The kinds of pieces, by their numbers in SentencePiece models and GGUF files."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Piece(NamedTuple):
    """A piece and its kind. One that isn't normal and is found whole in a text may take the white space beside it along
    (`lstrip`, `rstrip`)."""

    text: str
    score: float
    kind: int
    lstrip: bool = False
    rstrip: bool = False


def sentencepiece_backend(
    pieces: Sequence[Piece],
    *,
    space_prefix: Literal["always", "first", "never"],
    normalizing: Sequence[Any] = (),
    where: str,
) -> tokenizers.Tokenizer:
    """Return the backend; a piece's index is its id. `normalizing` comes before spaces are replaced.

    `space_prefix` says where a space is put before a text: at each stretch between whole tokens, at the text's start,
    or nowhere. Raises `ConfigError`, naming the file `where`, if the pieces contradict each other.
    """
    vocab = {piece.text: index for index, piece in enumerate(pieces)}
    normal = {text: index for text, index in vocab.items() if pieces[index].kind == PieceKind.NORMAL}
    backend = bpe_backend(
        where,
        vocab=vocab,
        merges=_merges(normal, pieces),
        unk_token=next((piece.text for piece in pieces if piece.kind == PieceKind.UNKNOWN), None),
        fuse_unk=True,
        byte_fallback=True,
    )
    steps = list(normalizing)
    if space_prefix == "first":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    else:
        steps += [normalizers.Prepend(SPACE)] if space_prefix == "always" else []
        steps += [normalizers.Replace(" ", SPACE)]
    if steps:
        backend.normalizer = normalizers.Sequence(steps) if len(steps) > 1 else steps[0]
    decoding: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix != "never":
        decoding.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(decoding)
    add_whole_tokens(backend, pieces)
    return backend


def bpe_backend(where: str, **arguments: Any) -> tokenizers.Tokenizer:
    """Return a backend with a BPE model. Raises `ConfigError` if vocabulary and merges contradict each other."""
    try:
        return tokenizers.Tokenizer(models.BPE(**arguments))
    except Exception as error:  # the bindings raise bare Exception
        raise ConfigError(f"{where}: its tokenizer is inconsistent: {error}") from error


def add_whole_tokens(backend: tokenizers.Tokenizer, pieces: Sequence[Piece]) -> None:
    """Let the backend find control, unknown and user-defined pieces whole in a text, before anything else."""
    for kind, special in ((PieceKind.CONTROL, True), (PieceKind.UNKNOWN, True), (PieceKind.USER_DEFINED, False)):
        backend.add_tokens(
            [
                AddedToken(piece.text, special=special, normalized=False, lstrip=piece.lstrip, rstrip=piece.rstrip)
                for piece in pieces
                if piece.kind == kind
            ]
        )


def _merges(vocab: dict[str, int], pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """Return the BPE merges equal to SentencePiece's, which merges neighbours into the piece with the best score: every
    split of a piece into two pieces is a merge, ranked by the piece's score."""
    ranked = []
    for text, index in vocab.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in vocab and right in vocab:
                ranked.append((-pieces[index].score, index, vocab[left], vocab[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]
