"""Encodings of request bodies: gzip is undone within the limit, everything else but UTF-8 is named in a 415."""

from __future__ import annotations

import gzip
import json
import zlib

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.server.errors import HttpError
from jaxserve.server.http.encodings import gunzip
from tests.server.conftest import ServerUnderTest, over_asgi

BODY = json.dumps({"prompt": "é", "max_tokens": 2}, ensure_ascii=False).encode()
TEXT = BODY.decode()


async def post(server: ServerUnderTest, content: bytes, **headers: str) -> tuple[int, str]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    response = await server.http.post("/v1/completions", content=content, headers=named)
    return response.status_code, response.text


@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "GZIP", "identity, gzip"])
async def test_gzip(server: ServerUnderTest, coding: str):
    for content in (gzip.compress(BODY), gzip.compress(BODY[:5]) + gzip.compress(BODY[5:]) + b"\0\0"):
        status, text = await post(server, content, content_encoding=coding)
        assert (status, json.loads(text)["usage"]["completion_tokens"]) == (200, 2)


async def test_the_limit_counts_what_is_decompressed():
    async with over_asgi(max_body_bytes=10_000) as server:
        padded = BODY + b" " * (10_000 - len(BODY))
        assert (await post(server, gzip.compress(padded), content_encoding="gzip"))[0] == 200
        for content in (gzip.compress(padded + b" "), gzip.compress(padded) + gzip.compress(b" ")):
            assert (await post(server, content, content_encoding="gzip"))[0] == 413


GZIPPED = gzip.compress(BODY, mtime=0)


@pytest.mark.parametrize("content", [b"", BODY, GZIPPED[:-1], GZIPPED[:9], b"\x1f\x8b"])
async def test_damaged_gzip_is_400(server: ServerUnderTest, content: bytes):
    status, text = await post(server, content, content_encoding="gzip")
    assert status == 400
    assert "gzip" in text


def test_many_parts_are_refused():
    with pytest.raises(InvalidRequestError, match="64 parts"):
        gunzip(gzip.compress(b"") * 100, 100)
    with pytest.raises(HttpError, match="larger than 1000000"):
        gunzip(gzip.compress(bytes(10**8)), 10**6)


@pytest.mark.parametrize(
    ("header", "named"),
    [
        ({"content_encoding": "br"}, "br"),
        ({"content_encoding": "deflate"}, "deflate"),
        ({"content_encoding": "zstd"}, "zstd"),
        ({"content_encoding": "gzip, br"}, "gzip, br"),
        ({"content_encoding": "gzip, gzip"}, "gzip, gzip"),
        ({"transfer_encoding": "deflate, chunked"}, "deflate"),
        ({"content_type": "application/json; charset=utf-16"}, "charset utf-16"),
        ({"content_type": 'application/json; charset="ISO-8859-1"'}, "charset ISO-8859-1"),
    ],
)
async def test_other_encodings_are_415(server: ServerUnderTest, header: dict[str, str], named: str):
    status, text = await post(server, zlib.compress(BODY), **header)
    assert status == 415
    assert f"not supported: {named};" in json.loads(text)["error"]["message"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
async def test_other_unicode_is_415(server: ServerUnderTest, encoding: str):
    status, text = await post(server, TEXT.encode(encoding))
    assert status == 415
    assert "UTF-16" in text


@pytest.mark.parametrize("charset", ["utf-8", "UTF8", '"utf-8"', "us-ascii"])
async def test_utf_8_may_be_named_and_marked(server: ServerUnderTest, charset: str):
    for content in (BODY, TEXT.encode("utf-8-sig")):
        assert (await post(server, content, content_type=f"application/json; charset={charset}"))[0] == 200
    gzipped = gzip.compress(TEXT.encode("utf-8-sig"))
    assert (await post(server, gzipped, transfer_encoding="gzip, chunked"))[0] == 200
