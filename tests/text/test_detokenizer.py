from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.text.detokenizer import IncrementalDetokenizer
from jaxserve.text.tokenizers.tokenizer import Tokenizer
from tests.selection import examples
from tests.text import small_tokenizers
from tests.text.small_tokenizers import SCRIPTS

byte_level = functools.cache(small_tokenizers.byte_level)
sentencepiece = functools.cache(small_tokenizers.sentencepiece)
words = functools.cache(small_tokenizers.words)
ALL = pytest.mark.parametrize("make", [byte_level, sentencepiece, words], ids=["byte_level", "sentencepiece", "words"])


def stream(tokenizer: Tokenizer, prompt: list[int], parts: list[list[int]], *, skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*(detokenizer.push(part) for part in parts), detokenizer.flush()]


@ALL
@settings(max_examples=examples(300))
@given(data=st.data())
def test_any_split_of_any_ids_gives_the_decoded_text(make: functools.partial[Tokenizer], data: st.DataObject) -> None:
    tokenizer = make()
    ids = st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30)
    prompt, output, skip = data.draw(ids), data.draw(ids), data.draw(st.booleans())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(output)), max_size=8)))
    parts = [output[start:end] for start, end in zip([0, *cuts], [*cuts, len(output)])]

    texts = stream(tokenizer, prompt, parts, skip=skip)

    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    if before.endswith("\ufffd"):  # the output may complete this character, or the two of half a surrogate pair
        assert whole.endswith("".join(texts))
        assert len(before) + len("".join(texts)) - len(whole) in (0, 1, 2)
    else:
        assert before + "".join(texts) == whole


@ALL
@settings(max_examples=examples(200))
@given(data=st.data())
def test_text_is_returned_as_soon_as_it_is_certain(make: functools.partial[Tokenizer], data: st.DataObject) -> None:
    tokenizer = make()
    prompt = tokenizer.encode("Hello")
    output = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=True)
    shown = ""

    for end, token_id in enumerate(output, start=1):
        shown += detokenizer.push([token_id])
        so_far = tokenizer.decode(prompt + output[:end])[len(tokenizer.decode(prompt)) :]
        # Only the start of a character is held back: one U+FFFD, or two if it could be half a surrogate pair's
        assert shown in (so_far, so_far.removesuffix("\ufffd"), so_far.removesuffix("\ufffd\ufffd"))
        if not so_far.endswith("\ufffd"):
            assert shown == so_far


@pytest.mark.parametrize("text", SCRIPTS)
@pytest.mark.parametrize("make", [byte_level, sentencepiece], ids=["byte_level", "sentencepiece"])
def test_every_script_decodes_token_by_token(make: functools.partial[Tokenizer], text: str) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text)

    texts = stream(tokenizer, tokenizer.encode("x"), [[token_id] for token_id in ids])

    assert "".join(texts).removeprefix(" ") == text.removeprefix(" ")
    assert not any("\ufffd" in part for part in texts)


def test_the_output_completes_the_prompts_last_character() -> None:
    tokenizer = byte_level()
    ids = [tokenizer._backend.token_to_id(char) for char in "ðŁĳį"]  # the four bytes of one emoji
    assert tokenizer.decode(ids) == "👍"

    for cut in range(1, 4):
        assert "".join(stream(tokenizer, [*tokenizer.encode("Hi"), *ids[:cut]], [ids[cut:]])) == "👍"


def test_half_a_surrogate_pair_at_the_prompts_end_is_held_back_as_two_characters() -> None:
    tokenizer = sentencepiece()
    half = [tokenizer._backend.token_to_id(byte) for byte in ("<0xED>", "<0xA0>")]

    assert tokenizer.decode(half) == "\ufffd\ufffd"
    assert stream(tokenizer, half, [[]]) == ["", "\ufffd\ufffd"]


def test_invalid_bytes_are_not_held_back() -> None:
    tokenizer = sentencepiece()
    lead = tokenizer._backend.token_to_id("<0xE4>")
    detokenizer = IncrementalDetokenizer(tokenizer, [3], skip_special_tokens=True)

    texts = [detokenizer.push([lead]) for _ in range(100)]

    assert texts == ["", *["\ufffd"] * 99]
    assert detokenizer.flush() == "\ufffd"


def test_the_leading_space_is_stripped_only_without_a_prompt() -> None:
    tokenizer = sentencepiece()
    world = tokenizer.encode("world")
    bos = tokenizer.bos_id
    assert bos is not None

    assert "".join(stream(tokenizer, tokenizer.encode("Hello"), [world])) == " world"
    assert "".join(stream(tokenizer, [bos], [world])) == "world"
    assert "".join(stream(tokenizer, [bos], [world], skip=False)) == " world"


def test_special_tokens_are_skipped_or_shown() -> None:
    tokenizer = byte_level()
    ids = [*tokenizer.encode("Hello"), tokenizer.eos_ids[0], *tokenizer.encode("世界")]

    assert "".join(stream(tokenizer, [], [ids])) == "Hello世界"
    assert "".join(stream(tokenizer, [], [ids], skip=False)) == "Hello<eos>世界"
