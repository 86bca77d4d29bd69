"""Reads the text of a compiled program."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (?P<types>.*?) (?P<opcode>[a-z][a-z0-9-]*)\(")
_ARRAY = re.compile(r"\b(?P<dtype>pred|[a-z]+(?P<bits>\d+)\w*)\[(?P<dims>[\d,]*)\]")


def instructions(text: str) -> Iterator[tuple[str, int]]:
    """Of each instruction, also of those inside fusions: its opcode, and the bytes of the largest array it gives."""
    for line in text.splitlines():
        if found := _INSTRUCTION.match(line):
            yield found["opcode"], max(map(_nbytes, _ARRAY.finditer(found["types"])), default=0)


def _nbytes(array: re.Match[str]) -> int:
    dims = [int(size) for size in array["dims"].split(",") if size]
    return math.prod(dims) * int(array["bits"] or 8) // 8
