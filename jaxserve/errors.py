"""The error classes of jaxserve. `server/errors.py` maps them to HTTP responses in one place."""

from __future__ import annotations

import re
import types

# What counts against each limit of the queue.
QUEUE_LIMITS = types.MappingProxyType(
    {
        "max_queued_requests": "requests wait beyond the free slots",
        "max_num_queued_reqs": "requests are open",
        "max_num_queued_tokens": "prompt tokens wait to be computed",
    }
)
_QUEUE_FULL = re.compile(r"queue full: (-?\d+) [a-z ]+?(?:, this one adds (\d+),)? and --([a-z-]+) is (\d+)")


class JaxserveError(Exception):
    """Base class of all errors that jaxserve raises on purpose."""


class ConfigError(JaxserveError, ValueError):
    """An unusable flag, YAML key, model config or checkpoint; the message names the value, the limit and what to do."""


class ModelNotFoundError(JaxserveError, ValueError):
    """`--model` names no model that can be opened from this machine."""


class InvalidRequestError(JaxserveError, ValueError):
    """An invalid request. `param` is the name of the invalid field, or None."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """The prompt and its output, of at least `num_tokens` tokens, do not fit the model's context."""

    def __init__(self, message: str, *, param: str, num_tokens: int) -> None:
        super().__init__(message, param=param)
        self.num_tokens = num_tokens


class QueueFullError(JaxserveError):
    """A limit of the queue refuses a request of `num_sequences`: `setting` is `limit`, and `found` count against it.

    `retry_after` is in how many seconds there may be room.
    """

    def __init__(self, setting: str, found: int, limit: int, num_sequences: int = 1) -> None:
        adds = f", this one adds {num_sequences}," if num_sequences > 1 else ""
        super().__init__(
            f"queue full: {found} {QUEUE_LIMITS[setting]}{adds} and --{setting.replace('_', '-')} is {limit}"
        )
        self.setting = setting
        self.found = found
        self.limit = limit
        self.retry_after = 1

    @classmethod
    def from_text(cls, text: str) -> QueueFullError | None:
        """Return the error whose text this is, as the engine sends it; None if it is another error's."""
        match = _QUEUE_FULL.fullmatch(text)
        if match is None:
            return None
        return cls(match[3].replace("-", "_"), int(match[1]), int(match[4]), int(match[2] or 1))


class EngineDeadError(JaxserveError):
    """The engine process has ended; open requests can't be finished."""


class ForkedProcessError(JaxserveError):
    """An engine is used in a process that was forked from the engine's own."""


class EngineUnresponsiveError(JaxserveError):
    """The engine process runs but makes no progress or sends no sign of life; it may recover."""


class RequestFailedError(JaxserveError):
    """The engine ended one request with an error."""


class BenchRunError(JaxserveError):
    """A server or client that a benchmark started has failed; the message has the last lines of its log."""
