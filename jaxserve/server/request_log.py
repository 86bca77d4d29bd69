"""The log of requests: a line when a request's prompts are known, and one when it has ended.

Owns what the lines say and where they go. What can't be written is lost: no request fails or waits for it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from jaxserve.api_types import EngineRequest, SamplingParams, TokenEvent, Usage
from jaxserve.config.server_schema import ServerConfig
from jaxserve.errors import ConfigError, JaxserveError

if TYPE_CHECKING:
    from jaxserve.text.output import OutputDelta

logger = logging.getLogger("jaxserve.server")

# At these levels, lines have the sampling options, and the texts.
_WITH_OPTIONS, _WITH_TEXTS, _WITH_WHOLE_TEXTS = 1, 2, 3
_MAX_CHARACTERS = 2048
# A character of four bytes may be as many tokens; of a cut prompt, no more are decoded.
_MAX_TOKENS_OF_CHARACTER = 4
# JSON allows these in texts, though some readers take them for the end of a line, or for a terminal's command.
_CONTROLS = re.compile("[\x7f-\x9f\u2028\u2029]")
_NEUTRAL = msgspec.structs.asdict(SamplingParams())

Decode = Callable[[list[int]], str]


class RequestLog:
    """Writes the lines of `log_requests`. Raises `ConfigError` for a folder that can't be written."""

    def __init__(self, config: ServerConfig) -> None:
        self.level = config.log_requests_level
        whole = self.level >= _WITH_WHOLE_TEXTS
        self.max_characters = _MAX_CHARACTERS if config.max_log_len is None and not whole else config.max_log_len
        self._is_json = config.log_requests_format == "json"
        self._logger = _own_logger(config) if config.log_requests_target else logging.getLogger("jaxserve.requests")
        if self._logger.level == logging.NOTSET:
            self._logger.setLevel(logging.INFO)  # whatever the log level: these lines were asked for

    def write(self, event: str, fields: dict[str, Any]) -> None:
        """Write one line."""
        if self._is_json:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            self._logger.info("%s", _as_json({"timestamp": stamp, "event": f"request.{event}", **fields}))
        else:
            shown = ", ".join(f"{name}: {_as_json(value)}" for name, value in fields.items())
            self._logger.info("Request %s. %s", event, shown)


class LoggedRequest:
    """The log of one HTTP request, which computes `requests`. As a context manager, it logs the start and the end.

    `id` is that of the response, `request_id` that of the HTTP request.
    """

    def __init__(
        self,
        log: RequestLog,
        requests: Sequence[EngineRequest],
        decode: Decode,
        *,
        id: str,
        request_id: str,
        route: str,
        stream: bool,
        arrival: float,
    ) -> None:
        self._log = log
        self._n = requests[0].sampling.n
        self._prompts = requests[:: self._n]
        self._decode = decode
        self._head = {"id": id, "request_id": request_id, "route": route}
        self._stream = stream
        self._arrival = arrival
        self._reasons: list[str | None] = [None] * len(requests)
        self._num_tokens = [0] * len(requests)
        self._num_cached = [0] * len(requests)
        self._texts: list[list[str]] = [[] for _ in requests]
        self._queue_seconds: float | None = None
        self._first_token_at: float | None = None

    def record(self, index: int, event: TokenEvent | OutputDelta, queue_seconds: float | None, text: str = "") -> None:
        """Record what is new in a sequence; its first event says how long it has waited in the engine's queue."""
        if queue_seconds is not None:
            self._queue_seconds = max(queue_seconds, self._queue_seconds or 0.0)
        if event.token_ids:
            self._num_tokens[index] += len(event.token_ids)
            if self._first_token_at is None:
                self._first_token_at = time.perf_counter()
        if text and self._log.level >= _WITH_TEXTS:
            self._texts[index].append(text)
        if event.finish_reason is not None:
            self._reasons[index] = event.finish_reason.value
            self._num_cached[index] = (event.usage or Usage(0, 0)).cached_tokens

    def __enter__(self) -> None:
        level, prompts = self._log.level, self._prompts
        fields: dict[str, Any] = {
            **self._head,
            "stream": self._stream,
            "num_prompts": len(prompts),
            "prompt_tokens": sum(len(prompt.prompt_ids) for prompt in prompts),
            "n": self._n,
            "priority": prompts[0].priority,
        }
        if level >= _WITH_OPTIONS and not prompts[0].pooled:
            options = [_options(prompt) for prompt in prompts]
            fields["sampling"] = options[0] if all(each == options[0] for each in options) else options
        if level >= _WITH_TEXTS:
            fields["prompts"] = [self._prompt_text(prompt.prompt_ids) for prompt in prompts]
        self._log.write("received", fields)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        now, unfinished = time.perf_counter(), "error" if isinstance(error, Exception) else "abort"
        fields = {
            **self._head,
            "finish_reasons": [reason or unfinished for reason in self._reasons],
            "output_tokens": sum(self._num_tokens),
            "cached_tokens": sum(self._num_cached[:: self._n]),
        }
        if self._queue_seconds is not None:
            fields["queue_seconds"] = round(self._queue_seconds, 4)
        if self._first_token_at is not None:
            fields["first_token_seconds"] = round(self._first_token_at - self._arrival, 4)
        fields["total_seconds"] = round(now - self._arrival, 4)
        if error is not None:
            fields["error"] = _error_text(error)
        if self._log.level >= _WITH_TEXTS and not self._prompts[0].pooled:
            fields["answers"] = ["".join(parts)[: self._log.max_characters] for parts in self._texts]
        self._log.write("finished", fields)

    def _prompt_text(self, ids: list[int]) -> str:
        limit = self._log.max_characters
        if limit is None:
            return self._decode(ids)
        return self._decode(ids[: limit * _MAX_TOKENS_OF_CHARACTER])[:limit]


class _Target(logging.Handler):
    """Appends lines to stdout, or to a file, which may be moved or removed meanwhile. Says once when it can't be
    written."""

    def __init__(self, path: Path | None) -> None:
        super().__init__()
        self._path = path
        self._has_failed = False

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{self.format(record)}\n".encode(errors="backslashreplace")
        try:
            if self._path is None:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
            else:
                with self._path.open("ab") as file:
                    file.write(line)
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                target = self._path or "stdout"
                logger.error("The log of requests loses lines: %s can't be written: %s", target, error)
            self._has_failed = True


def _own_logger(config: ServerConfig) -> logging.Logger:
    """Return a logger that is no other's parent or child, and writes to the targets."""
    own = logging.Logger("jaxserve.requests")
    form = "%(message)s" if config.log_requests_format == "json" else "[%(asctime)s] %(message)s"
    for target in config.log_requests_target:
        if target.lower() == "stdout" and sys.stdout is None:
            raise ConfigError("--log-requests-target stdout can't be written: it is closed; name a folder")
        handler = _Target(None if target.lower() == "stdout" else _file_in(Path(target).expanduser()))
        handler.setFormatter(logging.Formatter(form, "%Y-%m-%d %H:%M:%S"))
        own.addHandler(handler)
    return own


def _file_in(folder: Path) -> Path:
    """Return the path of this process's file in a folder, which is made if it doesn't exist."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"--log-requests-target {folder} can't be written: {error}; name a folder that can, or stdout"
        ) from error
    return folder / f"requests-{socket.gethostname()}-{os.getpid()}.log"


def _options(request: EngineRequest) -> dict[str, Any]:
    """Return the sampling options that aren't neutral. A grammar may hold contents of the request: only its presence is
    told."""
    given = msgspec.structs.asdict(request.sampling)
    options = {name: value for name, value in given.items() if name == "max_tokens" or value != _NEUTRAL[name]}
    if request.grammar:
        options["grammar"] = True
    if request.thinking is not None:
        options["thinking_tokens"] = request.thinking.num_tokens
    return options


def _error_text(error: BaseException) -> str:
    if not isinstance(error, Exception):
        return "cancelled: the client has disconnected, or the server has ended"
    return str(error) if isinstance(error, JaxserveError) else type(error).__name__


def _as_json(value: object) -> str:
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))
