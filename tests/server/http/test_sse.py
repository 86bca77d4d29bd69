from __future__ import annotations

import json
from collections.abc import Iterable

from jaxserve.api_types import EngineRequest
from tests.server.conftest import over_asgi
from tests.server.tiny import END_ID

TEXT = "a\u2028b\u2029c\x85d\r\ne\x0bf\x1cg"


async def test_a_line_of_an_event_has_no_other_line_break():
    """As Python's `splitlines`, and so httpx, would see one."""

    def rule(request: EngineRequest) -> Iterable[int]:
        return [*TEXT.encode(), END_ID]

    async with over_asgi(engine={"rule": rule}) as server:
        body = {"prompt": "x", "max_tokens": 99, "temperature": 0, "stream": True}
        async with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = [line async for line in response.aiter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    assert "".join(json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines) == TEXT
