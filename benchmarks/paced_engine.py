"""An engine process that computes nothing: it speaks the real engine's ZeroMQ protocol, and sends every open request
one token per step, a fixed number of times per second, all in one message.

`api_process.py` starts servers over it. The folder named by $PACED_ENGINE holds `settings.json` (`steps_per_second`,
and the `token_ids` to send in turn). At its end the engine writes `steps.json` there: when each step's message was sent
(`time.monotonic`, one clock for all processes of a machine) and which step gave each request its first token.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from jaxserve.api_types import EngineInfo, EngineRequest, EngineStats, FinishReason, TokenEvent, TokenLogprobs, Usage
from jaxserve.engine.process.launch_protocol import Started, read_order, write_message
from jaxserve.engine.process.transport import Abort, Add, Command, EngineTransport, ReadStats, StatsReading, StepEvents

FOLDER = "PACED_ENGINE"


class PacedEngine:
    """The open requests, and the clock of the steps."""

    def __init__(self, transport: EngineTransport, steps_per_second: float, token_ids: list[int]) -> None:
        self._transport = transport
        self._interval = 1 / steps_per_second
        self._token_ids = token_ids
        self._open: dict[str, tuple[EngineRequest, int]] = {}
        self._ended: list[tuple[int, TokenEvent]] = []
        self._stats = EngineStats(num_pages=1 << 16, num_free_pages=1 << 16)
        self.sent: list[float] = []
        self.first_step: dict[str, int] = {}

    def run(self) -> None:
        """Run until told to stop, or until the parent process ends."""
        due = time.monotonic()
        while True:
            wait = due - time.monotonic()
            commands = self._transport.receive(
                wait=not self._open or wait > 0, timeout=max(wait, 0.0) if self._open else None
            )
            if commands is None or not all(self._obey(command) for command in commands):
                return
            now = time.monotonic()
            if (self._open and now >= due) or self._ended:
                self._step()
                # Late steps are not made up for: this would send bursts.
                due = max(due + self._interval, now)

    def _obey(self, command: Command) -> bool:
        match command:
            case Add(requests):
                self._open |= {request.request_id: (request, 0) for request in requests}
            case Abort(request_ids):
                for request_id in request_ids:
                    if request_id in self._open:
                        request, given = self._open.pop(request_id)
                        self._ended.append((request.client, _last(request, [], given, FinishReason.ABORT)))
            case ReadStats(client, number):
                self._transport.send(client, StatsReading(number, self._stats))
            case _:
                return False
        return True

    def _logprobs(self, request: EngineRequest, tokens: list[int]) -> list[TokenLogprobs] | None:
        count = request.sampling.logprobs
        if count is None:
            return None
        values = [-1.25 - 0.5 * rank for rank in range(count)]
        return [TokenLogprobs(token, values[0], [token, *self._token_ids[: count - 1]], values) for token in tokens]

    def _step(self) -> None:
        outbox: list[list[TokenEvent]] = [[] for _ in range(self._transport.num_clients)]
        for client, event in self._ended:
            outbox[client].append(event)
        self._ended.clear()
        step, ids = len(self.sent), self._token_ids
        for number, (request_id, (request, given)) in enumerate(list(self._open.items())):
            events = outbox[request.client]
            tokens = [ids[(step + 7 * number) % len(ids)]]
            if not given:
                self.first_step[request_id] = step
            if given + 1 < request.sampling.max_tokens:
                queued = None if given else 0.0
                events.append(
                    TokenEvent(request_id, tokens, logprobs=self._logprobs(request, tokens), queue_seconds=queued)
                )
                self._open[request_id] = (request, given + 1)
            else:
                events.append(_last(request, tokens, given + 1, FinishReason.LENGTH))
                del self._open[request_id]
        self.sent.append(time.monotonic())
        for client, events in enumerate(outbox):
            self._transport.send(client, StepEvents(events, self._stats))


def _last(request: EngineRequest, tokens: list[int], given: int, reason: FinishReason) -> TokenEvent:
    return TokenEvent(request.request_id, tokens, reason, usage=Usage(len(request.prompt_ids), given))


def main() -> None:
    """Run the engine process that the order on stdin describes."""
    order = read_order(sys.stdin.fileno())
    if order is None:
        sys.exit("got no order to start on stdin: this module is run by benchmarks/api_process.py")
    folder = Path(os.environ[FOLDER])
    settings = json.loads((folder / "settings.json").read_text())
    info = EngineInfo(
        max_model_len=8192,
        vocab_size=1 << 17,
        page_size=16,
        num_pages=1 << 16,
        max_running_requests=1024,
        chunked_prefill_size=2048,
        device="none",
        dtype="none",
        attention_backend="none",
        num_programs=0,
        startup_seconds={},
    )
    with EngineTransport(order.command_address, order.client_addresses, sys.stdin.fileno()) as transport:
        write_message(order.report_fd, Started(info))
        engine = PacedEngine(transport, settings["steps_per_second"], settings["token_ids"])
        engine.run()
    (folder / "steps.json").write_text(json.dumps({"sent": engine.sent, "first_step": engine.first_step}))


if __name__ == "__main__":
    main()
