"""Turns the engine's events of one request into the client's output: text, token counts, finish reason.

The engine knows ids only, so stop strings are found here, in the server's process. Sends nothing itself: when a stop
string ends the output, `OutputDelta.abort` tells the caller to abort the request in the engine.
"""

from __future__ import annotations

import msgspec

from jaxserve.api_types import EngineRequest, FinishReason, TokenEvent, TokenLogprobs, Usage
from jaxserve.text.detokenizer import IncrementalDetokenizer
from jaxserve.text.stop_strings import StopMatcher
from jaxserve.text.tokenizers.tokenizer import Tokenizer


class OutputDelta(msgspec.Struct):
    """The output that one event adds. Text is held back while it could still become a character or a stop string.

    `text_offsets[i]` is where the text of token i begins in the whole output, before a stop string is cut off.
    `stop_reason` is the stop string, pattern, or id from the request's `stop_token_ids` that ended the output; None for
    the model's EOS, which only `matched_stop` names. `usage` is set together with `finish_reason`, and `cached_tokens`,
    the number of the prompt's tokens that were found in the prefix cache, when the engine says it. `abort`: the request
    has ended here and is to be aborted in the engine.
    """

    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    text_offsets: list[int] = []
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    matched_stop: int | str | None = None
    usage: Usage | None = None
    cached_tokens: int | None = None
    error: str | None = None
    abort: bool = False

    def extend(self, following: OutputDelta) -> None:
        """Add the output that follows this one, which has not ended."""
        self.text += following.text
        self.token_ids += following.token_ids
        self.logprobs += following.logprobs
        self.text_offsets += following.text_offsets
        if following.prompt_logprobs is not None:
            self.prompt_logprobs = following.prompt_logprobs
        if following.cached_tokens is not None:
            self.cached_tokens = following.cached_tokens
        self.finish_reason, self.usage = following.finish_reason, following.usage
        self.stop_reason, self.matched_stop = following.stop_reason, following.matched_stop
        self.error, self.abort = following.error, following.abort


class OutputSoFar:
    """The output of one request so far, as if it had come at once. Offsets come with log probabilities only."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._delta = OutputDelta()

    def add(self, delta: OutputDelta) -> None:
        """Add the next output."""
        kept = self._delta
        self._texts.append(delta.text)
        kept.token_ids += delta.token_ids
        if delta.logprobs:
            kept.logprobs += delta.logprobs
            kept.text_offsets += delta.text_offsets
        if delta.prompt_logprobs is not None:
            kept.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            kept.finish_reason, kept.usage = delta.finish_reason, delta.usage
            kept.stop_reason, kept.matched_stop = delta.stop_reason, delta.matched_stop

    @property
    def delta(self) -> OutputDelta:
        """All that was added."""
        self._delta.text = "".join(self._texts)
        self._texts = [self._delta.text]
        return self._delta


class OutputProcessor:
    """The state of one request's output. Events must be pushed in order, and none after `finished`.

    A stop string matches only in the text after the first `min_tokens` tokens. A stop id's token is counted but has no
    text.
    """

    def __init__(self, tokenizer: Tokenizer, request: EngineRequest) -> None:
        sampling = request.sampling
        self._request = request
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, request.prompt_ids, skip_special_tokens=sampling.skip_special_tokens
        )
        self._stops = (
            StopMatcher(sampling.stop, sampling.include_stop_str_in_output, sampling.stop_regex)
            if sampling.stop or sampling.stop_regex
            else None
        )
        self._num_tokens = 0
        self._num_chars = 0
        self._cached_tokens = 0
        self._finished = False

    @property
    def finished(self) -> bool:
        """Whether the last delta has been returned."""
        return self._finished

    def push(self, event: TokenEvent) -> OutputDelta:
        """Return the output that the event adds."""
        assert not self._finished, f"request {self._request.request_id} got an event after its end"
        delta = OutputDelta(prompt_logprobs=event.prompt_logprobs, error=event.error)
        if event.usage is not None:
            self._cached_tokens = delta.cached_tokens = event.usage.cached_tokens
        matched = self._push_tokens(event, delta)
        if matched is None and event.finish_reason is not None:
            matched = self._push_rest(delta)
        if matched is not None:
            delta.finish_reason, delta.error = FinishReason.STOP, None
            delta.stop_reason = delta.matched_stop = matched
            delta.abort = event.finish_reason is None
        elif event.finish_reason is not None:
            delta.finish_reason, delta.matched_stop = event.finish_reason, event.stop_id
            if event.stop_id in self._request.sampling.stop_token_ids:
                delta.stop_reason = event.stop_id
        if delta.finish_reason is not None:
            self._finished = True
            delta.usage = Usage(len(self._request.prompt_ids), self._num_tokens, self._cached_tokens)
        return delta

    def _push_tokens(self, event: TokenEvent, delta: OutputDelta) -> str | None:
        """Add the event's tokens up to one that completes a stop string, and return that string or None."""
        matched, last = None, len(event.token_ids) - 1
        for index, token_id in enumerate(event.token_ids):
            self._num_tokens += 1
            delta.token_ids.append(token_id)
            ends = index == last and token_id == event.stop_id
            delta.text_offsets.append(
                self._num_chars + (0 if ends else self._detokenizer.num_chars_from_held_bytes(token_id))
            )
            if ends:
                break
            matched = self._show(self._detokenizer.push((token_id,)), delta)
            if matched is not None:
                break
        if event.logprobs is not None:
            delta.logprobs = event.logprobs[: len(delta.token_ids)]
        return matched

    def _push_rest(self, delta: OutputDelta) -> str | None:
        """Add the held-back text at the end of the tokens, and return the stop string that it completes, or None."""
        matched = self._show(self._detokenizer.flush(), delta)
        if matched is None and self._stops is not None:
            delta.text += self._stops.flush()
        return matched

    def _show(self, text: str, delta: OutputDelta) -> str | None:
        self._num_chars += len(text)
        if self._stops is None or self._num_tokens <= self._request.sampling.min_tokens:
            delta.text += text
            return None
        shown, matched = self._stops.push(text)
        delta.text += shown
        return matched
