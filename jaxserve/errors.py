"""The error tree. Every error a person can cause is named here; `server/errors.py` maps them to HTTP in one place."""


class JaxserveError(Exception):
    """Anything jaxserve raises on purpose."""


class ConfigError(JaxserveError, ValueError):
    """A flag, YAML key, model config or checkpoint that can't be served; says the value, the limit and what to do."""


class ModelNotFoundError(JaxserveError, ValueError):
    """`--model` names nothing that can be opened from here."""


class InvalidRequestError(JaxserveError, ValueError):
    """A request that can't be served as it stands. `param` names the field at fault, where there is one."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFullError(JaxserveError):
    """More requests wait than `--max-queued-requests` allows."""


class EngineDeadError(JaxserveError):
    """The engine process has ended; nothing that was open can be finished."""


class EngineUnresponsiveError(JaxserveError):
    """The engine process is there but makes no progress, or gives no sign of life; it may go on later."""


class RequestFailedError(JaxserveError):
    """The engine ended one request with an error."""


class BenchRunError(JaxserveError):
    """A server or a client that a benchmark started has failed; says the last lines of its log."""
