"""The arguments that the server's owner gives to the chat template of all requests."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from jaxserve.errors import ConfigError
from jaxserve.text.template_arguments import RESERVED_ARGUMENTS, default_arguments

SOURCE = "{{ messages }}{{ tools }}{% if enable_thinking %}{{ mood }}{% endif %}"


def test_defaults_are_those_that_the_template_reads() -> None:
    given = {"enable_thinking": False, "mood": {"a": [1]}}
    assert default_arguments(given, SOURCE, reasons=True) == given
    assert default_arguments({"enable_thinking": True}, "{{ messages }}", reasons=True) == {}
    assert default_arguments(None, None, reasons=False) == {}


@pytest.mark.parametrize(
    ("given", "source", "words"),
    [
        *(({name: 1}, SOURCE, rf"kwargs\.{name}: {name} is a field of the request") for name in RESERVED_ARGUMENTS),
        ({"mod": 1}, SOURCE, r"default_chat_template_kwargs\.mod: this model's chat template does not use it"),
        ({"thinking": True}, SOURCE, r"kwargs\.thinking: .* it uses enable_thinking instead"),
        ({"enable_thinking": True}, "{{ messages }}", "never reasons"),
        ({3: 1}, SOURCE, r"kwargs\.3: "),
        ({"mood": datetime.date(2026, 1, 1)}, SOURCE, "can't be written as JSON"),
        ({"mood": 1}, None, "this model has no chat template"),
    ],
)
def test_what_a_request_may_not_send_is_no_default(given: dict[Any, Any], source: str | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        default_arguments(given, source, reasons=False)
