"""The form in which reasoning is sent to clients that send it back without showing it (`encrypted_content`).

It is no secret. What is read is never more than reasoning: texts of special tokens, which could begin a message of
another role, are replaced.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence

_PREFIX = "jaxserve-reasoning-1:"


def packed(reasoning: str) -> str:
    """Return reasoning in this form."""
    return _PREFIX + base64.b64encode(reasoning.encode(errors="replace")).decode()


def unpacked(content: str, special_texts: Sequence[str]) -> str | None:
    """Return the reasoning that a content holds, or None for a content of another form, such as another server's."""
    if not content.startswith(_PREFIX):
        return None
    try:
        text = base64.b64decode(content.removeprefix(_PREFIX), validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    special = re.compile("|".join(map(re.escape, special_texts)) or "(?!)")
    return special.sub("\ufffd", text)  # without anything in its place, what is left could spell another one
