"""Finds the tokens that may follow in requests with a grammar, in threads while the device runs.

Grammars are texts of llguidance, which compiles them and follows the output of each request. All of that happens in
threads, and llguidance holds no interpreter lock meanwhile: a slow grammar delays only its own request. A request's
grammar belongs to one thread at a time: to a job from `submit` on until its future is done, then to the engine's.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, NamedTuple

from jaxserve.api_types import MAX_LEXER_STATES
from jaxserve.engine.scheduling.thinking import ThinkingCounter

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Compiled grammars that are kept, and for each the unused matchers, which know their grammar's states already.
_KEPT_GRAMMARS = 64
_KEPT_MATCHERS = 16
_MAX_THREADS = 4
_SLOW_THREADS = 2
# A request that needs more processor time for a token is no longer waited for, and goes to threads for such requests.
_SLOW_SECONDS = 0.01
# One that needs more than this ends, if its grammar was compiled before.
_MAX_SECONDS = 1.0


class Allowed(NamedTuple):
    """The tokens that may follow: first `forced`, then one whose bit is set in `tokens`; or the output is `complete`.

    `error` says why the grammar can't be followed any further.
    """

    forced: tuple[int, ...] = ()
    tokens: bytes = b""
    complete: bool = False
    error: str | None = None


class RequestGrammar:
    """The grammar of one request and what it allows next.

    With `one_by_one`, `next` has no forced tokens, but allows only the first of them: its log probability is wanted, or
    penalties count it. Before the output has `min_tokens` tokens, `stop_ids` are not allowed while anything else is.
    When `thinking` says that the budget for reasoning is used up, the end of the reasoning is forced as soon as the
    grammar allows it.
    """

    def __init__(
        self, text: str, *, stop_ids: Iterable[int], min_tokens: int, ignore_eos: bool, one_by_one: bool
    ) -> None:
        self.text = text
        self.stop_ids = tuple(stop_ids)
        self.min_tokens = min_tokens
        self.ignore_eos = ignore_eos
        self.one_by_one = one_by_one
        self.thinking: ThinkingCounter | None = None
        self.matcher: LLMatcher | None = None
        self.num_tokens = 0
        self.unread: list[int] = []
        self.found = Allowed()
        self.job: Future[None] | None = None
        self.is_slow = False
        self._queue: list[int] = []

    def next(self) -> Allowed | None:
        """Return the tokens that may follow those pushed so far, or None if they aren't known yet."""
        if self._queue:
            return Allowed(tokens=_only(self._queue[0]))
        if self.job is None or not self.job.done():
            return None
        found = self.found
        if self.one_by_one and found.forced:
            self._queue, self.found = list(found.forced), found._replace(forced=())
            return Allowed(tokens=_only(self._queue[0]))
        return found

    def push(self, token: int) -> bool:
        """Add a token that was drawn; return whether to submit the grammar."""
        if self._queue:
            assert token == self._queue.pop(0), "a token was drawn that its grammar does not allow"
            return False
        self.unread.append(token)
        return True


class Grammars:
    """Compiles and follows grammars. `load_vocabulary` is called in a thread when the first one comes."""

    def __init__(self, load_vocabulary: Callable[[], LLTokenizer]) -> None:
        self._load_vocabulary = load_vocabulary
        self._vocabulary: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, list[LLMatcher]] = OrderedDict()
        self._num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(self._num_threads, "jaxserve-grammar")
        self._slow_threads = ThreadPoolExecutor(_SLOW_THREADS, "jaxserve-slow-grammar")

    def submit(self, grammars: Sequence[RequestGrammar]) -> None:
        """Start to find the tokens that may follow in these grammars. One that must be compiled counts as slow."""
        for grammar in grammars:
            if grammar.matcher is None:
                grammar.is_slow = grammar.text not in self._kept
        quick = [grammar for grammar in grammars if not grammar.is_slow]
        slow = [grammar for grammar in grammars if grammar.is_slow]  # now, as a job makes quick ones slow
        size = -(-len(quick) // self._num_threads) or 1
        for at in range(0, len(quick), size):
            job = self._threads.submit(self._follow_all, quick[at : at + size])
            for grammar in quick[at : at + size]:
                grammar.job = job
        for grammar in slow:
            grammar.job = self._slow_threads.submit(self._follow_all, [grammar])

    def wait(self, grammars: Iterable[RequestGrammar], seconds: float, *, also_slow: bool) -> None:
        """Wait up to `seconds` until the next tokens of all quick grammars are known; with `also_slow`, of any one."""
        jobs = {one.job for one in grammars if one.job is not None and (also_slow or not one.is_slow)}
        if jobs:
            wait(jobs, seconds, return_when="FIRST_COMPLETED" if also_slow else "ALL_COMPLETED")

    def release(self, grammar: RequestGrammar) -> None:
        """Take back the grammar of a request that has ended."""
        matcher = grammar.matcher
        if matcher is None or grammar.job is None or not grammar.job.done() or grammar.found.error:
            return
        with self._lock:
            kept = self._kept.get(grammar.text)
            if kept is not None and len(kept) < _KEPT_MATCHERS and matcher.reset():
                kept.append(matcher)
        grammar.matcher = None

    def _follow_all(self, grammars: Sequence[RequestGrammar]) -> None:
        for grammar in grammars:
            start = time.thread_time()
            was_compiled = grammar.matcher is not None
            try:
                grammar.found = self._follow(grammar)
            except Exception as error:  # a vocabulary that can't be loaded; llguidance itself raises nothing
                grammar.found = Allowed(error=f"{type(error).__name__}: {error}")
            seconds = time.thread_time() - start
            grammar.is_slow = was_compiled and seconds > _SLOW_SECONDS
            if was_compiled and seconds > _MAX_SECONDS:
                grammar.found = Allowed(error=f"it takes more than {_MAX_SECONDS:g} s to find the next token")

    def _follow(self, grammar: RequestGrammar) -> Allowed:
        if grammar.matcher is None:
            grammar.matcher = self._matcher(grammar.text)
        matcher = grammar.matcher
        tokens, grammar.unread = grammar.unread, []
        matcher.consume_tokens(tokens)
        forced = _take_forced(matcher)
        if grammar.thinking is not None:
            grammar.thinking.push([*tokens, *forced])
            forced += _end_thinking(grammar.thinking, matcher)
            if grammar.thinking.is_over:
                grammar.thinking = None
        grammar.num_tokens += len(tokens) + len(forced)
        complete = matcher.is_stopped()
        mask = b"" if complete else matcher.compute_bitmask()
        if matcher.is_error():
            return Allowed(error=_first_line(matcher.get_error()))
        if complete:
            return Allowed(forced, complete=True)
        assert self._vocabulary is not None
        if not grammar.ignore_eos and _has_any(mask, self._vocabulary.eos_tokens):
            mask = _with(mask, grammar.stop_ids)  # the server knows more ends than the vocabulary does
        held_back = set(self._vocabulary.eos_tokens) if grammar.ignore_eos else set()
        if grammar.num_tokens < grammar.min_tokens:
            held_back.update(grammar.stop_ids)
        rest = _without(mask, held_back) if held_back else mask
        if any(rest):
            return Allowed(forced, rest)
        if any(mask):  # only tokens that end the output
            return Allowed(forced, complete=True)
        return Allowed(error="no token of the vocabulary continues the output within the grammar")

    def _matcher(self, text: str) -> LLMatcher:
        """Return a matcher at the start of a grammar."""
        from llguidance import LLMatcher, LLParserLimits

        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._load_vocabulary()
            if kept := self._kept.get(text):
                self._kept.move_to_end(text)
                return kept.pop() if len(kept) > 1 else kept[0].deep_copy()
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        matcher = LLMatcher(self._vocabulary, text, log_level=0, limits=limits)
        if not matcher.is_error():
            with self._lock:
                self._kept[text] = [matcher.deep_copy()]
                while len(self._kept) > _KEPT_GRAMMARS:
                    self._kept.popitem(last=False)
        return matcher


def _take_forced(matcher: LLMatcher) -> tuple[int, ...]:
    """Consume and return the tokens that a grammar leaves no choice for."""
    forced = () if matcher.is_stopped() else tuple(matcher.compute_ff_tokens())
    if forced:
        matcher.consume_tokens(list(forced))
    return forced


def _end_thinking(counter: ThinkingCounter, matcher: LLMatcher) -> tuple[int, ...]:
    """Consume and return what ends the reasoning, if its budget is used up, and the tokens that must follow."""
    if not counter.is_used_up or matcher.is_stopped():
        return ()
    closing = counter.closing()
    if matcher.validate_tokens(list(closing)) < len(closing):  # not here, perhaps within a character
        return ()
    matcher.consume_tokens(list(closing))
    counter.close()
    following = _take_forced(matcher)
    counter.push(following)
    return closing + following


def _only(token: int) -> bytes:
    """Return the mask that allows one token."""
    return bytes(token // 8) + bytes((1 << token % 8,))


def _has_any(mask: bytes, tokens: Iterable[int]) -> bool:
    """Return whether the mask allows any of some tokens."""
    return any(token // 8 < len(mask) and mask[token // 8] >> token % 8 & 1 for token in tokens)


def _with(mask: bytes, tokens: Iterable[int]) -> bytes:
    """Return the mask with some more tokens."""
    changed = bytearray(mask)
    for token in tokens:
        if token // 8 < len(changed):
            changed[token // 8] |= 1 << token % 8
    return bytes(changed)


def _without(mask: bytes, tokens: Iterable[int]) -> bytes:
    """Return the mask without some tokens."""
    changed = bytearray(mask)
    for token in tokens:
        if token // 8 < len(changed):
            changed[token // 8] &= ~(1 << token % 8)
    return bytes(changed)


def _first_line(error: str) -> str:
    return error.strip().split("\n", 1)[0][:500]
