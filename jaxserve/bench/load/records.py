"""What was seen of one request. All times are by `time.perf_counter()`, in seconds."""

from __future__ import annotations

import dataclasses
from typing import Literal

Status = Literal["open", "ok", "failed", "unfinished"]


@dataclasses.dataclass(slots=True)
class Record:
    """Filled in by the client while the answer comes.

    `token_times` are those of the chunks, which may hold several tokens each; `end` is when the last token or the
    reason to end came. `output_tokens` are counted by the server (`counted_by` "usage"), by the tokenizer, or, where
    there is neither, as chunks. "unfinished" requests were cut by the run's end, "failed" ones by anything else.
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
        """When the first token came."""
        return self.token_times[0] if self.token_times else None

    @property
    def ttft(self) -> float | None:
        """Seconds from sending to the first token."""
        return self.token_times[0] - self.start if self.token_times else None

    @property
    def e2el(self) -> float:
        """Seconds from sending to the end."""
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None where there is only one."""
        if self.output_tokens < 2 or not self.token_times:
            return None
        return (self.end - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        """Seconds between chunks."""
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:])]
