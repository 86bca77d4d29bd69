"""The schema of a text that a client describes by a grammar: the input of a custom tool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MAX_CHARACTERS = 1 << 18
"""The most characters that a client's grammar may have."""


@dataclass(frozen=True)
class CustomText:
    """A JSON schema of the texts in the grammar `definition`, in Lark or as a regular expression (`syntax`).

    It may stand wherever a schema is read. It is no JSON value, so that no request can contain one.
    """

    syntax: Literal["lark", "regex"]
    definition: str
