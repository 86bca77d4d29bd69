"""The error classes of jaxserve. `server/errors.py` maps them to HTTP responses in one place."""


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


class QueueFullError(JaxserveError):
    """More requests wait than `--max-queued-requests` allows."""


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
