"""The record of one request. All times are in seconds of `time.perf_counter()`."""

from __future__ import annotations

import dataclasses
from typing import Literal

Status = Literal["open", "ok", "failed", "unfinished"]


@dataclasses.dataclass(slots=True)
class RequestRecord:
    """Times, token counts and outcome of one request; the client fills it in while the response arrives.

    `token_times` are the arrival times of chunks, which may hold several tokens each; `end` is when the last token or
    the finish reason arrived. `output_tokens` are counted by the server (`counted_by` "usage"), by the tokenizer, or,
    without either, as chunks. The end of the run makes open requests "unfinished"; every other error makes them
    "failed".
    """

    id: str
    wanted_tokens: int
    prompt_tokens: int | None
    queued: float = 0.0
    start: float = 0.0
    token_times: list[float] = dataclasses.field(default_factory=list)
    end: float = 0.0
    output_tokens: int = 0
    counted_by: Literal["usage", "tokenizer", "chunks"] = "usage"
    status: Status = "open"
    error: str = ""
    http_status: int | None = None
    finish_reason: str | None = None
    text: str = ""

    @property
    def first_token(self) -> float | None:
        """The time of the first token."""
        return self.token_times[0] if self.token_times else None

    @property
    def ttft(self) -> float | None:
        """Seconds from sending the request to the first token."""
        return self.token_times[0] - self.start if self.token_times else None

    @property
    def e2el(self) -> float:
        """Seconds from sending the request to `end`."""
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None when there is only one token."""
        if self.output_tokens < 2 or not self.token_times:
            return None
        return (self.end - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        """Seconds between chunks."""
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:])]
