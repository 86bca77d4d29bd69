"""Text to token ids and back, for whatever files the model came with.

Owns nothing but a `tokenizers` backend and the facts around it (which ids end a generation, the chat template's text).
Reading files is `hf_folder` and `gguf_tokenizer`; putting a stream together is `detokenizer`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

from jaxserve.errors import InvalidRequestError
from jaxserve.model_source import ModelSource
from jaxserve.text.min_tokens import TextLengths
from jaxserve.text.token_bytes import PieceTable, piece_table
from jaxserve.text.tokenizer_parts import TokenizerParts

_ID_OUT_OF_RANGE = "token ids must be in [0, 2^32)"


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer of a model. Raises `ConfigError` if its files hold none that can be used."""
    if source.kind == "gguf":
        from jaxserve.model_source.gguf_metadata import GGUFMetadata
        from jaxserve.text.gguf_tokenizer import tokenizer_from_gguf

        return Tokenizer(tokenizer_from_gguf(GGUFMetadata(source.path)))
    from jaxserve.text.hf_folder import tokenizer_from_folder

    return Tokenizer(tokenizer_from_folder(source.path))


class Tokenizer:
    """Encodes and decodes. `eos_ids` are all ids that end a generation; `special_tokens` what chat templates know."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self.eos_ids = parts.eos_ids
        self.bos_id = parts.bos_id
        self.special_tokens = parts.special_tokens
        self.chat_template = parts.chat_template
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self.skipped_ids = frozenset(
            token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        self.pieces: PieceTable | None = piece_table(self._backend)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids. `add_special_tokens` puts BOS (and EOS) where the model wants it; special tokens written in the
        text are always recognized. Raises `InvalidRequestError` if the text can't be written as UTF-8."""
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        check_count: Callable[[int], None] | None = None,
    ) -> list[list[int]]:
        """Token ids of each text, in parallel where there are several. `check_count` gets each text's number of tokens
        before any ids are made, and may raise.

        Other threads go on meanwhile: the backend's `encode` of a single text would hold the interpreter lock.
        """
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            if any(not isinstance(text, str) for text in texts):
                raise
            raise InvalidRequestError("the text holds half a surrogate pair, which is no Unicode text") from error
        if check_count is not None:
            try:
                for encoding in encodings:
                    check_count(len(encoding))
            except Exception:
                encodings.clear()  # the error's traceback holds this frame for as long as it is handled
                raise
        return [encoding.ids for encoding in encodings]

    def text_offsets(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Where in `text` each token of `encode(text)` begins, never before the token ahead of it. A token that was
        added begins where the next one does."""
        [encoding] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        offsets, end = [], 0
        for (start, stop), is_special in zip(encoding.offsets, encoding.special_tokens_mask):
            # A tokenizer may leave a token's spaces out of its place, and has none for a token that it adds.
            offsets.append(end if is_special and start == stop else min(start, end))
            end = max(end, stop)
        return offsets

    def least_tokens(self, text: str) -> int:
        """The fewest tokens that `text` can have, from its length alone; 0 if the tokenizer has no such bound."""
        return self._lengths.least_tokens(text)

    @functools.cached_property
    def _lengths(self) -> TextLengths:
        return TextLengths(self._backend)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the ids, bytes that are no UTF-8 as U+FFFD.

        Equals `tokenizers`' own decoding with one exception: in a run of SentencePiece byte tokens that isn't valid as
        a whole, valid characters are kept, so that a stream can emit them before it knows how the run ends.
        """
        if self.pieces is None or self.pieces.byte_level:
            return self._decode_backend(list(ids), skip_special_tokens)
        return self._decode_pieces(ids, self.pieces, skip_special_tokens)

    def _decode_backend(self, ids: list[int], skip_special_tokens: bool) -> str:
        try:
            # Unlike `decode`, it lets other threads go on
            return str(self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0])
        except OverflowError as error:
            raise InvalidRequestError(_ID_OUT_OF_RANGE) from error

    def _decode_pieces(self, ids: Iterable[int], pieces: PieceTable, skip_special_tokens: bool) -> str:
        skipped = self.skipped_ids if skip_special_tokens else frozenset[int]()
        try:
            joined = b"".join([pieces[token_id] for token_id in ids if token_id not in skipped])
        except OverflowError as error:
            raise InvalidRequestError(_ID_OUT_OF_RANGE) from error
        text = joined.decode(errors="replace")
        return text.removeprefix(" ") if pieces.strips_leading_space else text

    def has_token(self, token_id: int) -> bool:
        """Whether the id stands for a token; a model's vocabulary may be padded beyond the tokenizer's."""
        return self._backend.id_to_token(token_id) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, special tokens included."""
        if self.pieces is not None:
            return self.pieces[token_id]
        return self._decode_backend([token_id], False).encode()

    def token_text(self, token_id: int) -> str:
        r"""One token as text, for log probabilities; `bytes:\xe4\xb8` for part of a character, as OpenAI writes it."""
        piece = self.token_bytes(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{value:02x}" for value in piece)
