"""A server whose model is a table: the next token's distribution depends on the last token alone, and is known.

It answers `/v1/models` and `/v1/completions` with `echo` and `logprobs`, in the shape of OpenAI's servers.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

SPECIAL = {256: "<s>", 257: "</s>"}
VOCAB_SIZE = 258


def bigram_table(seed: int) -> np.ndarray:
    """Return log probabilities `[last token, next token]`."""
    logits = 2 * np.random.default_rng(seed).standard_normal((VOCAB_SIZE, VOCAB_SIZE))
    table: np.ndarray = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return table


class BigramServer:
    """`names_ids`: it knows `return_tokens_as_token_ids`; `shift` is added to every id before its text is looked up;
    `fault` may be "no echo" or "nan"."""

    def __init__(self, table: np.ndarray, *, names_ids: bool = False, shift: int = 0, fault: str = "") -> None:
        self.table, self.names_ids, self.shift, self.fault = table, names_ids, shift, fault
        self.bodies: list[dict[str, Any]] = []
        self.open = self.most_open = 0
        self.lock = threading.Lock()

    def complete(self, body: dict[str, Any]) -> tuple[int, object]:
        """Return the status and body of a response."""
        by_id = body.get("return_tokens_as_token_ids", False)
        if by_id and not self.names_ids:
            return 400, {"error": {"message": "return_tokens_as_token_ids is not supported"}}
        if body["logprobs"] > 300:
            return 400, {"error": {"message": "logprobs must be at most 300"}}
        if self.fault == "no echo":
            return 200, {"choices": [{"text": "x", "logprobs": None}]}
        ids = [*body["prompt"], 0]
        rows = [self.table[last] for last in ids[:-1]]
        values: list[float | None] = [None, *(float(row[token]) for row, token in zip(rows, ids[1:]))]
        if self.fault == "nan":
            values[len(values) // 2] = float("nan")
        tops = [
            {self.name(int(token), by_id): float(row[token]) for token in np.argsort(-row)[: body["logprobs"]]}
            for row in rows
        ]
        tokens = [self.name(token, by_id) for token in ids]
        logprobs = {"tokens": tokens, "token_logprobs": values, "top_logprobs": [None, *tops], "text_offset": []}
        return 200, {"choices": [{"text": "x", "logprobs": logprobs}]}

    def name(self, token: int, by_id: bool) -> str:
        """Return an id, or the text that `Tokenizer.token_text` gives: of a byte, or of a special token."""
        if by_id:
            return f"token_id:{token}"
        token += self.shift
        return f"bytes:\\x{token:02x}" if 128 <= token < 256 else SPECIAL.get(token, chr(token))


@contextlib.contextmanager
def serving(server: BigramServer) -> Iterator[str]:
    """Yield the URL of a running server."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(200, {"data": [{"id": "bigram"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                server.bodies.append(body)
                server.open += 1
                server.most_open = max(server.most_open, server.open)
            try:
                self.answer(*server.complete(body))
            finally:
                with server.lock:
                    server.open -= 1

        def answer(self, status: int, value: object) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
