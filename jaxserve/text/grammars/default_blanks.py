"""The blanks between the parts of JSON answers that settings give to requests that name none."""

from __future__ import annotations

import msgspec

from jaxserve.api_types import StructuredOutputs
from jaxserve.config.server_schema import ServerConfig
from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.text.grammars.checking import GrammarChecker

_PATTERN = "constrained_json_whitespace_pattern"


def with_default_blanks(outputs: StructuredOutputs, config: ServerConfig) -> StructuredOutputs:
    """Return a form with the blanks of the settings, unless it names its own."""
    if outputs.disable_any_whitespace or outputs.whitespace_pattern is not None:
        return outputs
    return msgspec.structs.replace(
        outputs,
        whitespace_pattern=config.constrained_json_whitespace_pattern,
        disable_any_whitespace=config.constrained_json_disable_any_whitespace,
    )


def check_default_blanks(grammars: GrammarChecker, config: ServerConfig) -> None:
    """Raise `ConfigError` if no JSON can be written with the blanks of the settings, and close `grammars` then."""
    pattern = config.constrained_json_whitespace_pattern
    if pattern is None:
        return
    if not pattern:
        raise ConfigError(f"{_PATTERN} is empty: set constrained_json_disable_any_whitespace for JSON without blanks")
    try:
        for form in (StructuredOutputs(regex=pattern), StructuredOutputs(json_object=True, whitespace_pattern=pattern)):
            grammars.grammar(form, param=_PATTERN)
    except InvalidRequestError as error:
        grammars.close()
        raise ConfigError(f"{error}; got {pattern!r}") from error
