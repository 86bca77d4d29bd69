from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers.processors import ByteLevel, Sequence, TemplateProcessing

from jaxserve.errors import ConfigError, ContextLengthError, InvalidRequestError
from jaxserve.text.pooled_texts import TextLimits, check_not_empty, encode_texts, first_tokens, with_prompt
from jaxserve.text.tokenizers.hf_folder import tokenizer_from_folder
from jaxserve.text.tokenizers.tokenizer import Tokenizer
from jaxserve.text.tokenizers.tokenizer_parts import TokenizerParts
from tests.server.pooling.tasks import EMBED
from tests.tiny_model import byte_tokenizer

BOS, END = 256, 257
SHORTER = dataclasses.replace(EMBED, max_tokens=8)
TASK = dataclasses.replace(EMBED, prompts=(("query", "Q: "), ("document", "")), default_prompt="query")


def backend(single: str | None, pair: str | None = None) -> tokenizers.Tokenizer:
    """Return a tokenizer of bytes that adds special tokens in these forms."""
    made = byte_tokenizer("<s>", "</s>")
    if single is not None:
        forms: dict[str, Any] = {"single": single} | ({} if pair is None else {"pair": pair})
        template = TemplateProcessing(**forms, special_tokens=[("<s>", BOS), ("</s>", END)])
        made.post_processor = Sequence([ByteLevel(trim_offsets=False), template])
    return made


def tokenizer(single: str | None, pair: str | None = None) -> Tokenizer:
    return Tokenizer(TokenizerParts(backend(single, pair), (END,), BOS, {}, {}))


@pytest.mark.parametrize("single", [None, "$A </s>", "<s> $A", "<s> $A </s> </s>"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_truncated_text_keeps_its_special_tokens(single: str | None, side: Any):
    """The reference is the truncation of `tokenizers` itself."""
    reference = backend(single)
    reference.enable_truncation(6, direction=side)
    own = tokenizer(single)
    texts = ["a", "abcdef", "abcdefghijkl", "ab<s>defghijkl</s>"]
    limits = TextLimits.of(100, EMBED, 6, side)
    found = encode_texts(own, texts, own.special_tokens_around(1), limits, texts)
    assert found == [reference.encode(text).ids for text in texts]


def test_special_tokens_around_texts():
    assert tokenizer("<s> $A </s>", "<s> $A </s> <s> $B </s>").special_tokens_around(2) == [[BOS], [END, BOS], [END]]
    assert tokenizer("<s> $A </s>").special_tokens_around(2) == [[], [], []]
    assert tokenizer(None).special_tokens_around(1) == [[], []]
    with pytest.raises(ConfigError, match="post-processor"):
        tokenizer("$A", "$B $A").special_tokens_around(2)


def test_a_longer_text_is_an_error_unless_it_is_truncated():
    own = tokenizer("$A </s>")
    around = own.special_tokens_around(1)
    limits = TextLimits.of(4, EMBED, None)
    assert encode_texts(own, ["abc"], around, limits, ["input"]) == [[97, 98, 99, END]]
    with pytest.raises(ContextLengthError, match=r"is 4 tokens. However, your input\[1\] resulted in 5") as error:
        encode_texts(own, ["a", "abcd"], around, limits, ["input[0]", "input[1]"])
    assert (error.value.param, error.value.num_tokens) == ("input[1]", 5)


def test_texts_are_truncated_to_the_limit_of_the_model_unless_the_context_is_smaller():
    own = tokenizer("<s> $A </s>")
    around = own.special_tokens_around(1)
    for side, kept in ((None, b"abcdef"), ("left", b"cdefgh")):
        limits = TextLimits.of(8, SHORTER, None, side)
        assert encode_texts(own, ["abcdefgh"], around, limits, ["input"]) == [[BOS, *kept, END]]
    assert TextLimits.of(7, SHORTER, None) == TextLimits(7)


def test_ids_of_a_client_are_truncated_only_if_it_asks_for_that():
    assert TextLimits.of(100, SHORTER, 3).fit_ids([*range(9)], "input") == [0, 1, 2]
    assert TextLimits.of(100, SHORTER, None).fit_ids([*range(8)], "input") == [*range(8)]
    with pytest.raises(ContextLengthError, match="your input resulted in 9"):
        TextLimits.of(100, SHORTER, None).fit_ids([*range(9)], "input")


def test_what_may_be_asked_for():
    assert TextLimits.of(100, EMBED, -1) == TextLimits(100, True, truncates_ids=True)
    assert TextLimits.of(100, SHORTER, -1, "left") == TextLimits(8, True, "left", truncates_ids=True)
    assert [TextLimits.of(100, SHORTER, asked).longest for asked in (None, 5, 9)] == [8, 5, 8]
    assert TextLimits.of(8, EMBED, None) == TextLimits(8)
    for wrong in (0, -2, 101):
        with pytest.raises(InvalidRequestError, match=r"in \[1, 100\]"):
            TextLimits.of(100, SHORTER, wrong)
    with pytest.raises(InvalidRequestError, match="2 tokens stand around"):
        TextLimits.of(100, EMBED, 2).fit([1], [5], [2], "input")
    with pytest.raises(InvalidRequestError, match="input is empty"):
        check_not_empty("", "input")


def test_prompts_come_first():
    assert with_prompt(TASK, ["a", "b"], None) == with_prompt(TASK, ["a", "b"], "query") == ["Q: a", "Q: b"]
    assert with_prompt(TASK, ["a"], "") == with_prompt(TASK, ["a"], "document") == ["a"]
    assert with_prompt(EMBED, ["a"], None) == ["a"]
    with pytest.raises(InvalidRequestError, match=r"no prompt 'passage'; it has 'query', 'document'"):
        with_prompt(TASK, ["a"], "passage")


def test_first_tokens():
    own = tokenizer("<s> $A </s>")
    assert [first_tokens(own, "abc", count) for count in (1, 2, 3, 9)] == ["a", "ab", "abc", "abc"]
    assert first_tokens(own, "aé", 2) == "a", "half a character is none"
    assert first_tokens(own, "éa", 1) == "é", "but a text isn't empty"


def test_a_folder_that_adds_both_ends_adds_them_to_both_texts_of_a_pair(tmp_path: Path):
    backend(None).save(str(tmp_path / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    own = Tokenizer(tokenizer_from_folder(tmp_path))
    assert own.special_tokens_around(1) == [[BOS], [END]]
    assert own.special_tokens_around(2) == [[BOS], [END, BOS], [END]]
