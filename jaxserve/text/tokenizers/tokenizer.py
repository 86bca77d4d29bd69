"""Encodes text to token ids and decodes them, for every file format of models.

Owns a `tokenizers` backend and the facts around it (the ids that end a generation, the chat template's source).
`hf_folder` and `gguf_tokenizer` read the files; `detokenizer` decodes streams.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.model_source import ModelSource
from jaxserve.model_source.gguf_metadata import GGUFMetadata
from jaxserve.text.tokenizers.chat_template_files import default_chat_template
from jaxserve.text.tokenizers.min_tokens import MinTokenCounter
from jaxserve.text.tokenizers.token_bytes import TokenByteTable, token_byte_table
from jaxserve.text.tokenizers.tokenizer_parts import HARMONY_ENDS, TokenizerParts

_ID_OUT_OF_RANGE = "token ids must be in [0, 2^32)"


def load_tokenizer(source: ModelSource, model: ModelSource | None = None) -> Tokenizer:
    """Load the tokenizer of these files. `model` is the model whose texts it encodes, by default of the same files.

    The model's own end tokens end a generation, too. Raises `ConfigError` if the files have no usable tokenizer.
    """
    folder = None if model is None or model.kind == "gguf" else model.path
    if source.kind == "gguf":
        from jaxserve.text.tokenizers.gguf_tokenizer import tokenizer_from_gguf

        parts = tokenizer_from_gguf(GGUFMetadata(source.path))
    else:
        from jaxserve.text.tokenizers.hf_folder import tokenizer_from_folder

        parts = tokenizer_from_folder(source.path, folder)
    if model is not None and "gguf" in (model.kind, source.kind):
        parts = dataclasses.replace(parts, eos_ids=tuple(dict.fromkeys((*_end_ids(model), *parts.eos_ids))))
    return Tokenizer(parts)


def _end_ids(model: ModelSource) -> tuple[int, ...]:
    """Return the ids that end a generation, as the files of a model say it beside its tokenizer."""
    if model.kind == "gguf":
        from jaxserve.text.tokenizers.gguf_tokenizer import gguf_end_ids

        return gguf_end_ids(GGUFMetadata(model.path))
    from jaxserve.text.tokenizers.hf_folder import end_ids

    return end_ids(model.path, None)


class TextEncoder(Protocol):
    """Encodes texts: a tokenizer, or its escaped marks."""

    def min_num_tokens(self, text: str) -> int:
        """Return the smallest number of tokens that `text` can have; 0 if there is no bound."""
        ...

    def encode_batch(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        check_count: Callable[[int], None] | None = None,
    ) -> list[list[int]]:
        """Return the ids of each text; see `Tokenizer.encode_batch`."""
        ...


class Tokenizer:
    """Encodes and decodes text. `eos_ids` end a generation; `special_tokens` are variables of chat templates."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self.eos_ids = parts.eos_ids
        self.bos_id = parts.bos_id
        self.special_tokens = parts.special_tokens
        self.chat_templates = parts.chat_templates
        self._has_token_types = parts.has_token_types
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self.skipped_ids = frozenset(
            token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        self.byte_table: TokenByteTable | None = token_byte_table(self._backend)

    @property
    def largest_id(self) -> int:
        """The largest id of a token."""
        return max(self._backend.get_vocab(with_added_tokens=True).values())

    @property
    def chat_template(self) -> str | None:
        """The model's default chat template."""
        return default_chat_template(self.chat_templates)

    def with_turn_end(self, written: str) -> Tokenizer:
        """Return this tokenizer with one more id in `eos_ids`: the special token that begins `written`, the text after
        an assistant's turn in the chat template. gpt-oss gets none, because its token also ends parts of a turn."""
        ids = self.encode(written.lstrip(), add_special_tokens=False)
        is_harmony = all(self._backend.token_to_id(text) is not None for text in HARMONY_ENDS)
        if not ids or ids[0] not in self._backend.get_added_tokens_decoder() or is_harmony:
            return self
        changed = copy.copy(self)
        changed.eos_ids = tuple(dict.fromkeys((*self.eos_ids, ids[0])))
        return changed

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. `add_special_tokens` adds BOS (and EOS) if the model uses it; special tokens
        written in the text are always recognized. Raises `InvalidRequestError` if the text is not valid Unicode."""
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        check_count: Callable[[int], None] | None = None,
    ) -> list[list[int]]:
        """Return the token ids of each text. `check_count` is called with each number of tokens, before the lists of
        ids are made, and may raise.

        Other threads can run meanwhile, unlike with the backend's `encode`, which holds the interpreter lock.
        """
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            if any(not isinstance(text, str) for text in texts):
                raise
            raise InvalidRequestError("the text holds half a surrogate pair, so it is not valid Unicode") from error
        if check_count is not None:
            try:
                for encoding in encodings:
                    check_count(len(encoding))
            except Exception:
                encodings.clear()  # the error's traceback keeps this frame alive
                raise
        return [encoding.ids for encoding in encodings]

    def special_tokens_around(self, num_texts: int) -> list[list[int]]:
        """Return the special tokens that are added before one text, or before each of two that are encoded as a pair,
        and last those after them. Raises `ConfigError` for another form."""
        encoding = self._backend.encode("a") if num_texts == 1 else self._backend.encode("a", "a")
        around, texts = [list[int]()], list[int]()
        for token_id, number in zip(encoding.ids, encoding.sequence_ids):
            if number is None:
                around[-1].append(token_id)
            elif number not in texts[-1:]:
                around.append([])
                texts.append(number)
        if texts != list(range(num_texts)):
            raise ConfigError("the tokenizer's post-processor doesn't write each text once, in their order")
        return around

    def second_type_offset(self) -> int | None:
        """Return where the tokens of type 1 begin in a pair of texts, counted from the end of the first text.

        None if all are of type 0. Raises `ConfigError` for types in another order.
        """
        encoding = self._backend.encode("a", "a")
        if not self._has_token_types or 1 not in encoding.type_ids:
            return None
        start = encoding.type_ids.index(1)
        if encoding.type_ids != sorted(encoding.type_ids) or 0 in encoding.sequence_ids[start:]:
            raise ConfigError("the tokenizer's post-processor doesn't give type 0 to a first text and 1 to a second")
        return start - (len(encoding) - 1 - encoding.sequence_ids[::-1].index(0)) - 1

    def text_offsets(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return where in `text` each token of `encode(text)` begins, in non-decreasing order. An added special token
        begins where the next token does."""
        [encoding] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        offsets, end = [], 0
        for (start, stop), is_special in zip(encoding.offsets, encoding.special_tokens_mask):
            # The backend may leave spaces out of a token's range, and gives an added token an empty range.
            offsets.append(end if is_special and start == stop else min(start, end))
            end = max(end, stop)
        return offsets

    def min_num_tokens(self, text: str) -> int:
        """Return the smallest number of tokens that `text` can have, from its length alone; 0 if there is no bound."""
        return self._min_token_counter.min_num_tokens(text)

    @functools.cached_property
    def _min_token_counter(self) -> MinTokenCounter:
        return MinTokenCounter(self._backend)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of the ids, with U+FFFD for invalid UTF-8.

        Equals the decoding of `tokenizers` with one exception: in an invalid run of SentencePiece byte tokens, valid
        characters are kept, so that a stream can emit them before the run ends.
        """
        if self.byte_table is None or self.byte_table.byte_level:
            return self._decode_backend(list(ids), skip_special_tokens)
        return self._decode_bytes(ids, self.byte_table, skip_special_tokens)

    def _decode_backend(self, ids: list[int], skip_special_tokens: bool) -> str:
        try:
            # Unlike `decode`, it releases the interpreter lock
            return str(self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0])
        except OverflowError as error:
            raise InvalidRequestError(_ID_OUT_OF_RANGE) from error

    def _decode_bytes(self, ids: Iterable[int], byte_table: TokenByteTable, skip_special_tokens: bool) -> str:
        skipped = self.skipped_ids if skip_special_tokens else frozenset[int]()
        try:
            joined = b"".join([byte_table[token_id] for token_id in ids if token_id not in skipped])
        except OverflowError as error:
            raise InvalidRequestError(_ID_OUT_OF_RANGE) from error
        text = joined.decode(errors="replace")
        return text.removeprefix(" ") if byte_table.strips_leading_space else text

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token that is written so, or None; texts of answers leave these out."""
        token_id = self._backend.token_to_id(text)
        return token_id if token_id in self.skipped_ids else None

    def special_texts(self) -> list[str]:
        """Return how the special tokens are written."""
        return [text for token_id in self.skipped_ids if (text := self._backend.id_to_token(token_id))]

    def ordinary_ids(self, text: str) -> list[int]:
        """Return ids whose bytes are those of `text` and none of which is an added token: the longest tokens first.

        The tokenizer must have a `byte_table`.
        """
        assert self.byte_table is not None
        added = self._backend.get_added_tokens_decoder()
        data, ids, at = text.encode(), list[int](), 0
        while at < len(data):
            for end in range(len(data), at, -1):
                found = map(self._backend.token_to_id, self.byte_table.spellings(data[at:end]))
                ordinary = [token_id for token_id in found if token_id is not None and token_id not in added]
                if ordinary:
                    ids.append(ordinary[0])
                    at = end
                    break
            else:
                raise ConfigError(f"no ordinary tokens of this model write {text!r}, so escape_marks can't be used")
        return ids

    def to_json(self) -> str:
        """Return the content of a tokenizer.json."""
        return str(self._backend.to_str())

    def has_token(self, token_id: int) -> bool:
        """Return whether the id is a token: a model's vocabulary may be padded beyond the tokenizer's."""
        return self._backend.id_to_token(token_id) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, special or not."""
        if self.byte_table is not None:
            return self.byte_table[token_id]
        return self._decode_backend([token_id], False).encode()

    def token_text(self, token_id: int) -> str:
        r"""Return one token as text, for log probabilities; `bytes:\xe4\xb8` for part of a character, as OpenAI
        does."""
        piece = self.token_bytes(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{value:02x}" for value in piece)
