"""Reading a body of any shape within the limit takes little more processor time than reading a plain one."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable

import msgspec
import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.server.http.decoding import decode_body
from jaxserve.server.openai.protocol import ChatRequest, CompletionRequest
from tests.server.conftest import ServerUnderTest

SIZE = 16 * 2**20
# Just within the limits on the number of values, and of strings, lists and objects.
VALUES = 2**21 - 40
PARTS = 2**18 - 40

# Each has the item that stands where @ is, and how often, within the limits.
H = '"messages":[{"role":"user","content":"a"}]'
SHAPES = {
    "name": ('{"prompt":"a","@":1}', "x" * (SIZE - 40), 1),
    "names": ('{"prompt":"a",@}', '"%d":1', PARTS),
    "deep": ('{"prompt":"a","user":@}', "[" * (SIZE // 2 - 40) + "]" * (SIZE // 2 - 40), 1),
    "ids": ('{"prompt":[@]}', "%d", VALUES),
    "float ids": ('{"prompt":[@]}', "%d.0", VALUES),
    "lists of float ids": ('{"prompt":[@]}', "[%d.0]", PARTS),
    "float ids and a fault": ('{"prompt":[@,1.5]}', "%d.0", VALUES),
    "huge id": ('{"prompt":[@,1e400]}', "%d", VALUES),
    "NaN": ('{"prompt":[@,NaN]}', "%d", VALUES),
    "stop ids": ('{"prompt":"a","stop_token_ids":[@]}', "%d.0", VALUES),
    "prompts": ('{"prompt":[@]}', '"%d"', PARTS),
    "inert lists": ('{"prompt":"a","user":[@]}', "[%d]", PARTS),
    "inert objects": ('{"prompt":"a","user":[@]}', '{"%d":1}', PARTS // 2),
    "inert keys and a float": ('{"prompt":"a","max_tokens":1.0,"user":{@}}', '"%d":1', PARTS),
    "bias": ('{"prompt":"a","logit_bias":{@}}', '"%d":1', PARTS),
    "bound": ('{"prompt":"a","temperature":1e9,"user":{@}}', '"%d":1', PARTS),
    "same field": ("{@}", '"prompt":"%d"', PARTS // 2),
    "quotes": ('{"prompt":"a","user":"@"}', r"\"" * (SIZE // 2 - 40), 1),
    "open string": ('{"prompt":"@', r"\"" * (SIZE // 2 - 40), 1),
    "commas": ('{"prompt":"@"}', "," * (SIZE - 40), 1),
    "messages": ('{"messages":[@]}', '{"role":"user","content":"%d"}', PARTS // 5),
    "content": ('{"messages":[{"role":"user","content":[@]}]}', '{"type":"text","text":"%d"}', PARTS // 5),
    "tools": ("{" + H + ',"tools":[@]}', '{"type":"function","function":{"name":"f%d"}}', PARTS // 7),
    "schema": (
        "{" + H + ',"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{"properties":{@}}}}}',
        *('"%d":{}', PARTS // 2 - 10),
    ),
    "template arguments": ("{" + H + ',"chat_template_kwargs":{@}}', '"k%d":1', PARTS),
}


def body_of(shape: tuple[str, str, int], scale: int) -> bytes:
    """Return a body with `scale` times as many values as the limits allow, cut off at the limit of its size."""
    template, item, count = shape
    few = ",".join(item.replace("%d", str(number)) for number in range(min(count, 1000)))
    return template.replace("@", ",".join([few] * max(1, count * scale // 1000))).encode()[:SIZE]


def seconds(act: Callable[[], object]) -> float:
    """Return the processor time of this thread."""
    started = time.thread_time()
    act()
    return time.thread_time() - started


def read(body: bytes) -> None:
    kind = ChatRequest if b'"messages"' in body[:4000] + body[-4000:] else CompletionRequest
    with contextlib.suppress(InvalidRequestError):
        decode_body(msgspec.json.Decoder(kind), body, kind)


def test_no_shape_takes_long_to_read():
    plain = b'{"prompt":"%b"}' % (b"a" * (SIZE - 20))
    unit = min(seconds(lambda: read(plain)) for _ in range(5))
    slow = {}
    for name, shape in SHAPES.items():
        for scale in (1, 9):  # within the limits, and as much as the body holds
            body = body_of(shape, scale)
            for _ in range(3):
                units = seconds(lambda body=body: read(body)) / unit
                if units < 20:
                    break
            else:
                slow[name, scale] = units
    assert not slow


@pytest.mark.parametrize("field", ["x" * 10**6, "x`y", "é" * 10**5, "max_tokenz"])
async def test_an_unknown_field_is_named_shortly(server: ServerUnderTest, field: str):
    response = await server.http.post("/v1/completions", json={"prompt": "a", field: 1})
    error = response.json()["error"]
    assert response.status_code == 400
    assert len(error["message"]) < 300
    assert field.startswith(error["param"].split("`")[0])
    assert ("did you mean 'max_tokens'?" in error["message"]) == (field == "max_tokenz")


@pytest.mark.parametrize("prompt", ["[1.0, 2.0 , 3]", "[1.0,2e0,3]", "[[1.0],[2, 3.00]]", f"[{'1.0,' * 100_000}1]"])
def test_integers_may_be_written_as_floats(prompt: str):
    body = b'{"max_tokens": 7.0, "n": 2.0, "prompt": %b, "seed": 1e2}' % prompt.encode()
    request = decode_body(msgspec.json.Decoder(CompletionRequest), body, CompletionRequest)
    assert (request.max_tokens, request.n, request.seed) == (7, 2, 100)
    assert request.prompt == json.loads(prompt)
    for wrong in (b'{"prompt": [1.5]}', b'{"prompt": "a", "max_tokens": 1.5}', b'{"prompt": "a", "seed": 1e30}'):
        with pytest.raises(InvalidRequestError, match=r"prompt\[0\]|max_tokens|seed"):
            decode_body(msgspec.json.Decoder(CompletionRequest), wrong, CompletionRequest)
