"""Asks a server for the scores of windows: `/v1/completions` with `echo` and `logprobs`, a few requests at once."""

from __future__ import annotations

import asyncio
import dataclasses
import http
from collections.abc import Callable, Mapping, Sequence

import msgspec

from jaxserve.bench.accuracy.scores import (
    NoPromptLogprobsError,
    TokenNumbers,
    WindowScores,
    read_scores,
    read_tokens,
)
from jaxserve.bench.load.backends import COMPLETIONS
from jaxserve.bench.load.client import error_message
from jaxserve.bench.load.http_client import ConnectionPool
from jaxserve.bench.load.target_server import TargetServer, send_request
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.text.tokenizers.tokenizer import Tokenizer

# Tokens of the first window whose texts are compared with the tokenizer's.
_NUM_COMPARED = 64
# Servers show some tokens differently (special ones, parts of characters); with another vocabulary most differ.
_MAX_DIFFERENT = 0.1
# The same tokens under names that are exact, which not every server offers.
_IDS_AS_NAMES = {"return_tokens_as_token_ids": True}
_NO_OPTIONS: Mapping[str, bool] = {}

_encode = msgspec.json.Encoder().encode


@dataclasses.dataclass(frozen=True)
class Scorer:
    """Scores windows on one server with `num_top` alternatives to each token, `max_concurrency` requests at once.

    `seconds` is the time limit of one request.
    """

    server: TargetServer
    pool: ConnectionPool
    model: str
    headers: Mapping[str, str]
    num_top: int
    max_concurrency: int
    seconds: float

    async def check(self, window: Sequence[int], tokenizer: Tokenizer) -> None:
        """Raise `ConfigError` if the server gives no log probabilities of a prompt, or has another vocabulary."""
        ids = window[:_NUM_COMPARED]
        try:
            echoed = read_tokens(await self._ask(ids), len(ids))
        except NoPromptLogprobsError as error:
            raise ConfigError(
                f"{self.server.url} can't be compared: {error}. The server must support echo with logprobs in "
                f"{COMPLETIONS}, as jaxserve, vLLM and SGLang do"
            ) from None
        # Some servers leave out the space before a word.
        pairs = [(tokenizer.token_text(token), name) for token, name in zip(ids, echoed)]
        different = [(text, name) for text, name in pairs if text.strip() != name.strip()]
        if len(different) > max(1, _MAX_DIFFERENT * len(pairs)):
            text, name = different[0]
            raise ConfigError(
                f"{self.server.url} has another vocabulary: {len(different)} of {len(pairs)} token ids mean another "
                f"text there, such as {name!r} for {text!r}. Both sides must have the tokenizer that --tokenizer names"
            )

    async def score(
        self, windows: Sequence[Sequence[int]], numbers: TokenNumbers, on_scored: Callable[[], object]
    ) -> list[WindowScores]:
        """Return the scores of each window; `on_scored` is called after each. Raises `JaxserveError`."""
        options = _IDS_AS_NAMES if await self._names_tokens_by_id(windows[0][:_NUM_COMPARED]) else _NO_OPTIONS
        open_requests = asyncio.Semaphore(self.max_concurrency)

        async def score_one(window: Sequence[int]) -> WindowScores:
            async with open_requests:
                body = await self._ask(window, options)
            try:
                scores = read_scores(body, len(window), numbers)
            except JaxserveError as error:
                raise JaxserveError(f"{self.server.url}: {error}") from None
            on_scored()
            return scores

        tasks = [asyncio.create_task(score_one(window)) for window in windows]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _names_tokens_by_id(self, ids: Sequence[int]) -> bool:
        status, _ = await self._send(ids, _IDS_AS_NAMES)
        return status == http.HTTPStatus.OK

    async def _ask(self, ids: Sequence[int], options: Mapping[str, bool] = _NO_OPTIONS) -> bytes:
        status, body = await self._send(ids, options)
        if status != http.HTTPStatus.OK:
            raise JaxserveError(
                f"{self.server.url} refused a prompt of {len(ids)} tokens with echo and logprobs={self.num_top} "
                f"(HTTP {status}): {error_message(body)}"
            )
        return body

    async def _send(self, ids: Sequence[int], options: Mapping[str, bool]) -> tuple[int, bytes]:
        fields = {"model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 0}
        body = _encode({**fields, "echo": True, "logprobs": self.num_top, **options})
        return await send_request(self.server, self.pool, self.headers, COMPLETIONS, "POST", body, seconds=self.seconds)
