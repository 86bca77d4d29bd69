"""Scores that a real server sends over HTTP, whose model is a known table."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import numpy as np
import pytest

from jaxserve.bench.accuracy.figures import compare
from jaxserve.bench.accuracy.scores import TokenNumbers, WindowScores
from jaxserve.bench.accuracy.scoring import Scorer
from jaxserve.bench.load.target_server import parse_base_url
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.text.tokenizers.tokenizer import Tokenizer
from tests.bench.accuracy.bigram_server import VOCAB_SIZE, BigramServer, bigram_table, serving

WINDOWS = [np.random.default_rng(i).integers(VOCAB_SIZE, size=20).tolist() for i in range(12)]


@contextlib.asynccontextmanager
async def scorer_of(server: BigramServer, *, num_top: int = 20) -> AsyncIterator[Scorer]:
    with serving(server) as url:
        target = parse_base_url(url)
        with contextlib.closing(target.pool()) as pool:
            yield Scorer(target, pool, "bigram", {}, num_top=num_top, max_concurrency=3, seconds=30)


async def scores_of(server: BigramServer, numbers: TokenNumbers, *, num_top: int = 20) -> list[WindowScores]:
    async with scorer_of(server, num_top=num_top) as scorer:
        return await scorer.score(WINDOWS, numbers, lambda: None)


@pytest.mark.parametrize("names_ids", [False, True])
async def test_figures_of_two_known_models(tokenizer: Tokenizer, names_ids: bool) -> None:
    first, second = (bigram_table(seed) for seed in (1, 2))
    second = 0.9 * first + 0.1 * second
    second -= np.log(np.exp(second).sum(axis=1, keepdims=True))
    numbers = TokenNumbers(tokenizer)
    base, other = BigramServer(first, names_ids=names_ids), BigramServer(second)
    found = compare(
        await scores_of(base, numbers, num_top=VOCAB_SIZE), await scores_of(other, numbers, num_top=VOCAB_SIZE)
    )
    lasts, nexts = (np.array([window[cut] for window in WINDOWS]) for cut in (slice(None, -1), slice(1, None)))
    assert found.num_scored_tokens == nexts.size
    assert np.log(found.base_perplexity.value) == pytest.approx(-first[lasts, nexts].mean())
    assert np.log(found.other_perplexity.value) == pytest.approx(-second[lasts, nexts].mean())
    same = (first.argmax(axis=1) == second.argmax(axis=1))[lasts]
    assert found.top1_agreement.value == pytest.approx(same.mean())
    exact = (np.exp(first) * (first - second)).sum(axis=1)[lasts].mean()
    assert found.kl_divergence.value == pytest.approx(exact, rel=1e-3)


async def test_requests_have_token_ids_and_stay_within_the_limit(tokenizer: Tokenizer) -> None:
    server = BigramServer(bigram_table(1), names_ids=True)
    await scores_of(server, TokenNumbers(tokenizer))
    asked = server.bodies[1:]
    assert sorted(body["prompt"] for body in asked) == sorted(WINDOWS)
    assert all(body["echo"] and body["logprobs"] == 20 and body["return_tokens_as_token_ids"] for body in asked)
    assert server.most_open <= 3


async def test_a_server_without_echo_is_refused(tokenizer: Tokenizer) -> None:
    async with scorer_of(BigramServer(bigram_table(1), fault="no echo")) as scorer:
        with pytest.raises(ConfigError, match=r"log probabilities of 0 tokens for a prompt of 20.* must support echo"):
            await scorer.check(WINDOWS[0], tokenizer)


async def test_another_vocabulary_is_refused(tokenizer: Tokenizer) -> None:
    async with scorer_of(BigramServer(bigram_table(1), shift=1)) as scorer:
        with pytest.raises(ConfigError, match=r"has another vocabulary: \d+ of 3 token ids .* 'b' for 'a'"):
            await scorer.check(list(b"abc"), tokenizer)
    async with scorer_of(BigramServer(bigram_table(1))) as scorer:
        await scorer.check(list(b"abc"), tokenizer)


async def test_nan_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(JaxserveError, match="has NaN as a log probability"):
        await scores_of(BigramServer(bigram_table(1), fault="nan"), TokenNumbers(tokenizer))


async def test_a_refused_request_names_the_reason(tokenizer: Tokenizer) -> None:
    with pytest.raises(JaxserveError, match=r"logprobs=301 \(HTTP 400\): logprobs must be at most 300"):
        await scores_of(BigramServer(bigram_table(1)), TokenNumbers(tokenizer), num_top=301)
