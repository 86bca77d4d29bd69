"""Compiles and tries grammars in a child process with limits on time and memory, before any engine gets them.

Some grammars of a few characters take hours to compile, and a thread can't be stopped. The child limits itself: a
kernel timer ends it when a grammar takes too long. `GrammarChecker` starts a new child when the old one has ended.

A grammar is tried by outputs drawn at random: one that leads to where no token may follow would end a request with an
error in its middle.

Both the parent's and the child's side of their messages are in this module.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable

from jaxserve import host
from jaxserve.api_types import StructuredOutputs
from jaxserve.errors import InvalidRequestError
from jaxserve.framing import FrameFormat
from jaxserve.text.grammars.formats import grammar_of
from jaxserve.text.grammars.json_grammar import LEFT_TO_CLIENT
from jaxserve.text.grammars.lark import parts_of
from jaxserve.text.grammars.vocabulary import Tokens, tokens_of
from jaxserve.text.tokenizers.tokenizer import Tokenizer

logger = logging.getLogger("jaxserve.server")

CPU_SECONDS = 5.0
MEMORY_BYTES = 2 << 30
MAX_CHILDREN = 4
# Seconds of wall time, for a child that gets no processor time or is stopped.
_ANSWER_TIMEOUT = 60.0
_KEPT_ANSWERS = 1024
_FRAMES = FrameFormat(num_kinds=1)


class GrammarChecker:
    """Checks grammars for the vocabulary of one tokenizer. Any thread may call it; few grammars are checked at once."""

    def __init__(self, tokenizer: Tokenizer, *, cpu_seconds: float = CPU_SECONDS) -> None:
        self._tokenizer = tokenizer
        self._cpu_seconds = cpu_seconds
        self._vocabulary: bytes | None = None
        self._idle: list[subprocess.Popen[bytes]] = []
        self._answers: OrderedDict[str, str] = OrderedDict()
        self._lock, self._free = threading.Lock(), threading.Semaphore(MAX_CHILDREN)

    def grammar(self, outputs: StructuredOutputs, *, param: str = "structured_outputs") -> str:
        """Return the grammar of a form, checked.

        Raises `InvalidRequestError` naming `param` if llguidance can't express it or compile it within the limits.
        """
        return self.check(lambda: grammar_of(outputs), param=param)

    def check(self, make: Callable[[], str], *, param: str) -> str:
        """Return the grammar that `make` returns, checked; "" is none. `make` may raise as `grammar_of` does."""
        try:
            text = make()
        except InvalidRequestError:
            raise
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InvalidRequestError(f"{param} can't be used: {error}", param=param) from error
        if text and (answer := self._answer(text)):
            raise InvalidRequestError(f"{param} can't be used: {answer}", param=param)
        return text

    def close(self) -> None:
        """End the children."""
        with self._lock:
            idle, self._idle = self._idle, []
        for child in idle:
            child.kill()  # it may not see the end of its input: processes that were forked from this one have the pipe
            _end(child)

    def _answer(self, grammar: str) -> str:
        """Return why a grammar can't be compiled within the limits; nothing if it can."""
        answer = self._answers.get(grammar)
        if answer is not None:
            return answer
        with self._free:
            with self._lock:
                child = self._idle.pop() if self._idle else None
            if child is not None and child.poll() is not None:
                _end(child)
                child = None
            if child is None:
                child = self._spawn()
            answer = _ask(child, grammar)
            with self._lock:
                if answer is not None:
                    self._idle.append(child)
                else:
                    answer = self._failure(_end(child))
                self._answers[grammar] = answer
                if not answer:
                    _log_left(grammar)
                if len(self._answers) > _KEPT_ANSWERS:
                    self._answers.popitem(last=False)
        return answer

    def _failure(self, code: int) -> str:
        if code == -signal.SIGPROF:
            return f"it takes more than {self._cpu_seconds:g} s to compile"
        return f"the process that compiles it ended with code {code}; it may need too much memory"

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = pickle.dumps((tokens_of(self._tokenizer), self._cpu_seconds))
        child = subprocess.Popen(
            [sys.executable, "-m", "jaxserve.text.grammars.checking"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # the server handles Ctrl-C in a terminal
        )
        assert child.stdin is not None
        with contextlib.suppress(OSError):
            child.stdin.write(_FRAMES.encode(self._vocabulary))
            child.stdin.flush()
        return child


def _log_left(grammar: str) -> None:
    for part in parts_of(grammar):
        for place in LEFT_TO_CLIENT.findall(part):
            logger.info("%s is left to the client: a grammar can't hold it", place)


def _ask(child: subprocess.Popen[bytes], grammar: str) -> str | None:
    """Return the child's answer, or None if it ended instead."""
    assert child.stdin is not None
    assert child.stdout is not None
    timer = threading.Timer(_ANSWER_TIMEOUT, child.kill)
    timer.daemon = True
    timer.start()
    try:
        child.stdin.write(_FRAMES.encode(grammar.encode(errors="surrogatepass")))
        child.stdin.flush()
        return _FRAMES.read(child.stdout.read)[1].decode()
    except (OSError, EOFError):
        return None
    finally:
        timer.cancel()


def _end(child: subprocess.Popen[bytes]) -> int:
    assert child.stdin is not None
    assert child.stdout is not None
    with contextlib.suppress(OSError):
        child.stdin.close()
    child.stdout.close()
    return child.wait()


def _main() -> None:
    """Run the child: read a vocabulary, then check grammars until the input ends."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # service managers signal every process; the server still drains
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    from jaxserve.text.grammars.trials import GrammarTester  # llguidance is loaded in the child only

    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    with contextlib.suppress(EOFError):
        tokens, cpu_seconds = pickle.loads(_FRAMES.read(requests.read)[1])
        assert isinstance(tokens, Tokens)
        tester = GrammarTester(tokens)
        host.limit_memory(MEMORY_BYTES)
        while True:
            grammar = _FRAMES.read(requests.read)[1].decode(errors="surrogatepass")
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
            error = tester.problem(grammar)
            signal.setitimer(signal.ITIMER_PROF, 0)
            answers.write(_FRAMES.encode(error.encode(errors="replace")))
            answers.flush()


if __name__ == "__main__":
    _main()
