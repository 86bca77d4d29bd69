from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from jaxserve.text.tokenizers.min_tokens import MinTokenCounter
from jaxserve.text.tokenizers.token_bytes import byte_alphabet
from tests.selection import examples
from tests.text import small_tokenizers

SHORTENED = ["\u212a", "\U0001d400", "a\u0308\u0304", "\u1100\u1161\u11a8", "\uff21", "A", " ", "▁", "<pad>", "日本"]


def byte_level_bpe(normalizer: Any = None, missing: int | None = None, **added: bool) -> tokenizers.Tokenizer:
    """Return a tokenizer of all bytes, `aaaaaaaa` and two added tokens."""
    alphabet = [char for value, char in byte_alphabet().items() if value != missing]
    vocab = [*alphabet, "aa", "aaaa", "aaaaaaaa"]
    merges = [("a", "a"), ("aa", "aa"), ("aaaa", "aaaa")]
    backend = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(vocab)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_tokens([AddedToken("<pad>", normalized=False, **added), AddedToken("日本", normalized=True)])
    return backend


BOUNDED = {
    "bytes": byte_level_bpe(),
    "nfc": byte_level_bpe(normalizers.NFC()),
    "nfkc lower": byte_level_bpe(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "replace": byte_level_bpe(normalizers.Replace("aaaa", "a")),
    "no token for a byte": byte_level_bpe(missing=ord("A")),
    "strips": byte_level_bpe(rstrip=True),
    "byte fallback": small_tokenizers.sentencepiece()._backend,
    "trained": small_tokenizers.byte_level()._backend,
}


@pytest.mark.parametrize("name", BOUNDED)
def test_the_bound_holds_for_any_text(name: str) -> None:
    backend, lengths = BOUNDED[name], MinTokenCounter(BOUNDED[name])

    @settings(max_examples=examples(100))
    @given(st.lists(st.sampled_from(SHORTENED) | st.text(max_size=4), max_size=8), st.integers(1, 40))
    def check(parts: list[str], times: int) -> None:
        text = "".join(parts) * times
        assert lengths.min_num_tokens(text) <= len(backend.encode(text, add_special_tokens=False))

    check()
    assert lengths.min_num_tokens("b" * 10_000) > 100


@pytest.mark.parametrize(
    "backend",
    [
        small_tokenizers.words()._backend,
        byte_level_bpe(normalizers.StripAccents()),
        byte_level_bpe(normalizers.Replace("a", "")),
        byte_level_bpe(normalizers.NFKC(), missing=ord("A")),
        byte_level_bpe(normalizers.Replace(tokenizers.Regex("a+"), "a")),
    ],
    ids=["words", "strip accents", "replace by nothing", "drop what is normalized", "replace a pattern"],
)
def test_a_tokenizer_that_may_drop_text_has_no_bound(backend: tokenizers.Tokenizer) -> None:
    assert MinTokenCounter(backend).min_num_tokens("b" * 10_000) == 0


def test_an_added_token_may_absorb_white_space() -> None:
    assert MinTokenCounter(byte_level_bpe()).min_num_tokens("<pad>" + " " * 10_000) > 1000
    assert MinTokenCounter(byte_level_bpe(rstrip=True)).min_num_tokens("<pad>" + " " * 10_000) == 1


def test_other_threads_run_while_a_text_is_tokenized() -> None:
    tokenizer, ticks, done = small_tokenizers.byte_level(), 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.is_set():
            ticks += 1
            time.sleep(0.0001)

    thread = threading.Thread(target=tick)
    thread.start()
    before = ticks
    tokenizer.encode("Hello world, " * 20_000)
    during = ticks - before
    done.set()
    thread.join()

    assert during > 20
