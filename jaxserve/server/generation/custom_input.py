"""Reads the input of a custom tool out of the arguments of its call, `{"input": "…"}`, while they are written."""

from __future__ import annotations

import json
import re

from jaxserve.server.generation.tools import INPUT

_BEGIN = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_LOW = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
# Characters of a JSON text, as far as they are whole: the second half of a pair may still come.
_CHARACTERS = re.compile(
    rf'(?:[^"\\]|\\[^u]|{_HIGH}{_LOW}|(?!{_HIGH})\\u[0-9a-fA-F]{{4}}|{_HIGH}(?=[^\\]|\\[^u]|.{{6}}))*+', re.DOTALL
)


class CustomInputReader:
    """Reads one input. Arguments of another form, as a model may write that no grammar holds, are the input themselves
    if they have no text `input`."""

    def __init__(self) -> None:
        self._text = ""
        self._is_inside = self._has_ended = False

    def push(self, text: str) -> str:
        """Return what a piece of the arguments adds to the input."""
        self._text += text
        if not self._is_inside and (begin := _BEGIN.match(self._text)) is not None:
            self._text, self._is_inside = self._text[begin.end() :], True
        if not self._is_inside or self._has_ended:
            return ""
        found = _CHARACTERS.match(self._text)
        assert found is not None
        self._text = self._text[found.end() :]
        self._has_ended = self._text.startswith('"')
        return _as_unicode(json.loads(f'"{found[0]}"', strict=False))

    def finish(self) -> str:
        """Return the rest of the input, after the last piece."""
        if self._is_inside:
            return ""
        try:
            arguments = json.loads(self._text)
        except (ValueError, RecursionError):
            return self._text
        found = arguments.get(INPUT) if isinstance(arguments, dict) else None
        return _as_unicode(found) if isinstance(found, str) else self._text


def _as_unicode(text: str) -> str:
    """Return a text whose single halves of pairs are replaced."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
