"""Writes the HTTP request for each kind of server."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from jaxserve.bench.datasets.prompts import Content
from jaxserve.errors import ConfigError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

BACKENDS = {
    **dict.fromkeys(("openai", "vllm", "sglang-oai", "lmdeploy"), COMPLETIONS),
    **dict.fromkeys(("openai-chat", "vllm-chat", "sglang-oai-chat", "lmdeploy-chat"), CHAT),
}
"""Backend names of vLLM's and SGLang's tools, with the route each stands for."""

_encode = msgspec.json.Encoder().encode


@dataclasses.dataclass(frozen=True)
class RequestWriter:
    """Writes complete HTTP messages. `fields` are sampling parameters; `extra_body` overrides every field, and a null
    in it removes the field."""

    path: str
    host: str
    model: str
    chat: bool
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    extra_body: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def write(
        self, content: Content, history: list[dict[str, Any]], output_tokens: int, request_id: str, seed: int | None
    ) -> bytes:
        """Return the message that sends `content` after the conversation in `history`."""
        body: dict[str, Any] = {
            "model": self.model,
            **self._content_fields(content, history),
            "max_tokens": output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }
        if seed is not None:
            body["seed"] = seed
        body = {key: value for key, value in {**body, **self.extra_body}.items() if value is not None}
        return http_message("POST", self.path, self.host, {**self.headers, "X-Request-Id": request_id}, _encode(body))

    def _content_fields(self, content: Content, history: list[dict[str, Any]]) -> dict[str, Any]:
        if self.chat:
            if isinstance(content, str):
                return {"messages": [*history, {"role": "user", "content": content}]}
            if isinstance(content[0], dict):
                return {"messages": [*history, *content]}
            raise ConfigError("token ids can't be sent to a chat route: use --backend openai, or a dataset of texts")
        if isinstance(content, str):
            return {"prompt": "\n".join([*(turn["content"] for turn in history), content])}
        return {"prompt": content}


def http_message(method: str, path: str, host: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
    """Return an HTTP/1.1 message. `headers` override the default headers."""
    all_headers = {
        "Host": host,
        "Accept": "text/event-stream, application/json",
        "Content-Type": "application/json",
        **headers,
        "Content-Length": str(len(body)),
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in all_headers.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body
