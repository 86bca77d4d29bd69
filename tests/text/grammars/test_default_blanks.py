from __future__ import annotations

import pytest

from jaxserve.api_types import StructuredOutputs
from jaxserve.config.server_schema import ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.text.grammars.checking import GrammarChecker
from jaxserve.text.grammars.default_blanks import check_default_blanks, with_default_blanks
from tests.server.tiny import tiny_tokenizer

NONE = ServerConfig(constrained_json_disable_any_whitespace=True)
SPACE = ServerConfig(constrained_json_whitespace_pattern=" ?")


def test_a_form_that_names_no_blanks_gets_the_default() -> None:
    plain = StructuredOutputs(json_object=True)
    assert with_default_blanks(plain, ServerConfig()) == plain
    assert with_default_blanks(plain, NONE).disable_any_whitespace
    assert with_default_blanks(plain, SPACE).whitespace_pattern == " ?"
    for own in ({"whitespace_pattern": "\n"}, {"disable_any_whitespace": True}):
        given = StructuredOutputs(json_object=True, **own)
        assert [with_default_blanks(given, config) for config in (NONE, SPACE)] == [given, given]


def test_both_settings_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="constrained_json_whitespace_pattern and constrained_json_disable_any"):
        ServerConfig(constrained_json_whitespace_pattern=" ", constrained_json_disable_any_whitespace=True)


@pytest.mark.process
@pytest.mark.parametrize(
    ("pattern", "problem"),
    [("(", r"can't be used: the group at 0 doesn't end; got '\('"), ("", "is empty: set constrained_json_disable")],
)
def test_a_pattern_that_is_not_valid_is_named(pattern: str, problem: str) -> None:
    grammars = GrammarChecker(tiny_tokenizer())
    check_default_blanks(grammars, ServerConfig(constrained_json_whitespace_pattern="[ \n]?"))
    with pytest.raises(ConfigError, match=f"constrained_json_whitespace_pattern {problem}"):
        check_default_blanks(grammars, ServerConfig(constrained_json_whitespace_pattern=pattern))
    grammars.close()
