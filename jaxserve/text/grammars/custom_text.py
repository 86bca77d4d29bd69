"""The grammars that clients give to custom tools, as schemas of texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CustomText:
    """A JSON schema of texts in the grammar `definition`, in Lark or as a regular expression.

    It is no JSON value, so no schema of a client can have it.
    """

    syntax: Literal["lark", "regex"]
    definition: str
