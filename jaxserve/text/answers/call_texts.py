"""The texts around calls of tools and in them, and calls written with such texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class ParameterText(NamedTuple):
    """The texts around a parameter: `begin`, its name, `middle`, its value, `end`; and `between` two of them.

    A text as a value is between two `quote`, and ends where one of `stops` begins. Without `stops`, texts are JSON and
    names are Python's.
    """

    begin: str
    middle: str
    end: str
    between: str = ""
    stops: tuple[str, ...] = ()
    quote: str = ""


class CallText(NamedTuple):
    """The texts around calls and in them: `opening`, then for each call `begin`, its name, `middle`, its arguments and
    `end`, with `between` from one call to the next; then `closing`.

    Arguments are JSON, or written as `parameters`. A call is read wherever one of `marks` is, or where the answer
    begins as the regular expression `answer` says. `example` says how to read an example of a call.
    """

    opening: str
    begin: str
    middle: str
    end: str
    between: str
    closing: str
    marks: tuple[str, ...] = ()
    answer: str = ""
    parameters: ParameterText | None = None
    example: str = "like this"


CALL_LIST = CallText("[", '{"name": "', '", "arguments": ', "}", ", ", "]")


def written(form: CallText, calls: Sequence[tuple[str, Mapping[str, Any] | str]]) -> str:
    """Return calls as a model writes them: functions with their arguments, or with a text that should be these."""
    texts = (f"{form.begin}{name}{form.middle}{_arguments(form, arguments)}{form.end}" for name, arguments in calls)
    return f"{form.opening}{form.between.join(texts)}{form.closing}"


def _arguments(form: CallText, arguments: Mapping[str, Any] | str) -> str:
    parameters = form.parameters
    if isinstance(arguments, str):
        return arguments
    if parameters is None:
        return json.dumps(arguments, ensure_ascii=False)
    found = []
    for name, value in arguments.items():
        is_text = isinstance(value, str) and parameters.stops
        shown = f"{parameters.quote}{value}{parameters.quote}" if is_text else json.dumps(value, ensure_ascii=False)
        found.append(f"{parameters.begin}{name}{parameters.middle}{shown}{parameters.end}")
    return parameters.between.join(found)
