"""`text_offset` of log probabilities: an index into the returned text, for all kinds of tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import hypothesis.strategies as st
from hypothesis import example, given, settings

from tests.selection import examples
from tests.server.conftest import ServerUnderTest, over_asgi
from tests.server.openai.test_completions import events
from tests.server.tiny import BOS_ID, START_ID, VOCAB_SIZE

# Each byte is a token: characters of one to four bytes, whole or incomplete, and special tokens between them.
WHOLE = st.sampled_from(["a", "b", " ", "é", "世", "🙂", "\ufffd"]).map(lambda char: list(char.encode()))
ODD = st.sampled_from([[0xE6], [0xF0, 0x9F], [0x80], [0xFF], [BOS_ID], [START_ID]])
TOKENS = st.lists(st.one_of(WHOLE, ODD), min_size=1, max_size=10).map(lambda parts: [t for part in parts for t in part])


def check(text: str, logprobs: dict[str, list[Any]], *, cut: bool) -> None:
    """Check that each token is in the text at its offset."""
    offsets, tokens = logprobs["text_offset"], logprobs["tokens"]
    assert len(offsets) == len(tokens)
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(text) for offset in offsets)
    for token, offset in zip(tokens, offsets):
        if not token.startswith(("bytes:", "<")) and not cut:
            assert text.startswith(token, offset), (text, token, offset)


async def both(server: ServerUnderTest, body: dict[str, Any]) -> tuple[dict[str, Any], str, dict[str, list[Any]]]:
    """Return the choice of a whole response, and the text and log probabilities of the streamed one."""
    response = await server.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    [whole] = response.json()["choices"]
    parts = [
        chunk["choices"][0] for chunk in events(await server.http.post("/v1/completions", json=body | {"stream": True}))
    ]
    logprobs: dict[str, list[Any]] = {name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    for part in parts:
        for name, values in (part["logprobs"] or {}).items():
            logprobs[name] += values
    return whole, "".join(part["text"] for part in parts), logprobs


@settings(max_examples=examples(150))
@given(
    prompt=TOKENS,
    output=TOKENS,
    as_text=st.booleans(),
    tokens_per_step=st.sampled_from([1, 3]),
    options=st.fixed_dictionaries(
        {"echo": st.booleans(), "skip_special_tokens": st.booleans()},
        optional={"stop": st.sampled_from(["ab", "b", "世a", "aa🙂"]), "stop_regex": st.just("[ab]{2} ")},
    ),
)
@example([0xE6, ord("a")], [0x97, 0xA5, ord("b")], False, 1, {"echo": True, "skip_special_tokens": True})
@example([ord("a")], [*"世a".encode(), ord("b")], True, 1, {"echo": True, "skip_special_tokens": True, "stop": "世a"})
def test_offsets_index_the_text(
    prompt: list[int], output: list[int], as_text: bool, tokens_per_step: int, options: dict[str, Any]
):
    async def run() -> None:
        engine = {"rule": lambda _: output, "tokens_per_step": tokens_per_step}
        async with over_asgi(engine=engine) as server:
            ids: list[int] | str = prompt
            if as_text:
                ids = bytes(token for token in prompt if token < 256).decode(errors="ignore") or "a"
            body = {"prompt": ids, "logprobs": 1, "max_tokens": len(output), **options}
            whole, text, logprobs = await both(server, body)
            assert text == whole["text"]
            assert logprobs == whole["logprobs"]
            check(text, logprobs, cut="stop" in options or "stop_regex" in options)

    asyncio.run(run())


async def test_two_former_failures(server: ServerUnderTest):
    body = {"prompt": "a世b", "max_tokens": 1, "echo": True, "logprobs": 0}
    whole, _, _ = await both(server, body)
    assert whole["logprobs"]["text_offset"] == [0, 1, 1, 1, 2, 3]
    skipped = body | {"prompt": [BOS_ID, ord("a"), START_ID, ord("b")]}
    whole, _, _ = await both(server, skipped)
    assert (whole["text"], whole["logprobs"]["text_offset"]) == ("abu", [0, 0, 1, 1, 2])
    whole, _, _ = await both(server, skipped | {"skip_special_tokens": False})
    assert (whole["text"], whole["logprobs"]["text_offset"]) == ("<s>a<|im_start|>bu", [0, 3, 4, 16, 17])


async def test_an_id_beyond_the_tokenizer_has_no_text():
    async with over_asgi(engine={"rule": lambda _: [ord("x"), VOCAB_SIZE + 5, ord("y")]}) as server:
        whole, _, _ = await both(server, {"prompt": "a", "max_tokens": 3, "logprobs": 0})
    assert (whole["text"], whole["logprobs"]["text_offset"]) == ("xy", [0, 1, 1])
