"""Encodings of request bodies: undoes gzip, and refuses everything else that isn't JSON in UTF-8."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable

from jaxserve.errors import InvalidRequestError
from jaxserve.server.errors import body_too_large, unsupported_encoding

# A gzip body may be several compressed parts in a row.
_MAX_GZIP_PARTS = 64
_GZIP = 16 + zlib.MAX_WBITS

_CHARSET = re.compile(rb"""charset\s*=\s*["']?([^\s"';]+)""", re.IGNORECASE)
_CHARSETS = (b"utf-8", b"utf8", b"us-ascii", b"ascii")


def is_gzip(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether a body with these headers is compressed. Raises `HttpError` 415 naming any other encoding."""
    codings: list[str] = []
    for name, value in headers:
        if name in (b"content-encoding", b"transfer-encoding"):
            codings += [one for part in value.decode("latin-1").lower().split(",") if (one := part.strip())]
        elif name == b"content-type" and (found := _CHARSET.search(value)) and found[1].lower() not in _CHARSETS:
            raise unsupported_encoding(f"charset {found[1].decode('latin-1')[:80]}")
    codings = [coding for coding in codings if coding not in ("chunked", "identity")]
    if codings in ([], ["gzip"], ["x-gzip"]):
        return bool(codings)
    raise unsupported_encoding(", ".join(codings)[:80])


def gunzip(body: bytes, limit: int) -> bytes:
    """Return a body without its compression. Raises `HttpError` 413 past `limit` bytes, `InvalidRequestError` if it is
    damaged or incomplete."""
    parts: list[bytes] = []
    try:
        while len(parts) < _MAX_GZIP_PARTS:
            part = zlib.decompressobj(_GZIP)
            parts.append(part.decompress(body, max(1, limit - sum(map(len, parts)) + 1)))
            if sum(map(len, parts)) > limit:
                raise body_too_large(limit)
            if not part.eof:
                raise InvalidRequestError("The gzip body is incomplete")
            body = part.unused_data
            if not body.strip(b"\0"):
                return b"".join(parts)
    except zlib.error as error:
        raise InvalidRequestError(f"The body is not valid gzip: {error}") from error
    raise InvalidRequestError(f"The gzip body has more than {_MAX_GZIP_PARTS} parts")


def without_mark(body: bytes) -> bytes:
    """Return a body without a mark of UTF-8 at its start. Raises `HttpError` 415 if it is UTF-16 or UTF-32."""
    if body.startswith(b"\xef\xbb\xbf"):
        return body[3:]
    # The first character of JSON is ASCII, so only these encodings have a NUL beside it.
    if body.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in body[:2]:
        raise unsupported_encoding("UTF-16 or UTF-32")
    return body
