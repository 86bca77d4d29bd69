"""Which arguments a chat template takes: what it reads, and what says only what the model does anyway."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Mapping
from typing import Any, Literal, get_args

from jaxserve.errors import ConfigError, InvalidRequestError

RESERVED_ARGUMENTS = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
THINKING_SWITCHES = ("enable_thinking", "thinking")
"""The variables by which templates turn reasoning on and off."""
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
_EFFORTS: tuple[str, ...] = get_args(Effort)
_DEFAULTS = "default_chat_template_kwargs"


@functools.lru_cache(4)
def template_words(source: str) -> frozenset[str]:
    """Return all words of a template, among them its variables."""
    return frozenset(re.findall(r"[^\W\d]\w*", source))


def idle_arguments(words: Collection[str], *, reasons: bool) -> dict[str, tuple[bool | str, ...]]:
    """Return arguments that a template with these words doesn't read, with the values that ask for what the model does
    anyway: it always reasons, or never does. There are none if the template reads another argument of reasoning."""
    names = (*THINKING_SWITCHES, "reasoning_effort")
    if any(name in words for name in names):
        return {}
    efforts = [effort for effort in _EFFORTS if (effort != "none") == reasons]
    return dict.fromkeys(THINKING_SWITCHES, (reasons,)) | {"reasoning_effort": tuple(efforts)}


def read_arguments(
    given: Mapping[str, Any], source: str, *, reasons: bool, where: str = "chat_template_kwargs"
) -> dict[str, Any]:
    """Return the arguments that a template reads. Raises `InvalidRequestError` for others, unless they are idle."""
    words = template_words(source) if given else frozenset[str]()
    for name, value in given.items():
        param = f"{where}.{name[:100]}"
        if name in RESERVED_ARGUMENTS:
            raise InvalidRequestError(
                f"{param}: {name} is a field of the request, not of the template; send it there", param=param
            )
        if name not in words:
            _check_idle(param, name, value, words, reasons=reasons)
    return {name: value for name, value in given.items() if name in words}


def default_arguments(given: Mapping[str, Any] | None, source: str | None, *, reasons: bool) -> dict[str, Any]:
    """Return the arguments of the setting `default_chat_template_kwargs` that a template reads.

    Raises `ConfigError` for what a request may not send, and if there is no template.
    """
    if not given:
        return {}
    if source is None:
        raise ConfigError(f"{_DEFAULTS}: this model has no chat template; leave it out, or give chat_template")
    try:
        json.dumps(given)
    except (TypeError, ValueError) as error:  # YAML has dates
        raise ConfigError(f"{_DEFAULTS} can't be written as JSON: {error}") from error
    try:
        return read_arguments(
            {str(name): value for name, value in given.items()}, source, reasons=reasons, where=_DEFAULTS
        )
    except InvalidRequestError as error:
        raise ConfigError(str(error)) from error


def _check_idle(param: str, name: str, value: Any, words: Collection[str], *, reasons: bool) -> None:
    """Raise `InvalidRequestError` for an argument that the template doesn't read, unless it asks for nothing new."""
    others = [other for other in (*THINKING_SWITCHES, "reasoning_effort") if other in words]
    values = idle_arguments(words, reasons=reasons).get(name, ())
    if any(value is one or (isinstance(value, str) and value == one) for one in values):
        return
    problem = f"{param}: this model's chat template does not use it"
    if name not in (*THINKING_SWITCHES, "reasoning_effort"):
        raise InvalidRequestError(f"{problem}; leave it out", param=param)
    if others:
        raise InvalidRequestError(f"{problem}; it uses {others[0]} instead", param=param)
    if reasons and value in (False, "none"):
        raise InvalidRequestError(
            f"{problem}, so the model always reasons; leave it out, or send thinking_token_budget: 0 instead, which "
            "ends the reasoning at once",
            param=param,
        )
    does = "always" if reasons else "never"
    raise InvalidRequestError(f"{problem}, as the model {does} reasons; leave it out", param=param)
