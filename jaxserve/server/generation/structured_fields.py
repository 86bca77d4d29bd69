"""The fields of a request that ask for an output of a given form: OpenAI's, vLLM's old and new ones, and SGLang's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from jaxserve.api_types import StructuredOutputs
from jaxserve.errors import InvalidRequestError
from jaxserve.server.generation.unsupported_fields import UnsupportedOpenAIFields, UnsupportedSamplingFields
from jaxserve.server.http.fields import Text, accepts_only

_Schema = dict[str, Any] | str

# The names in `StructuredOutputs` of vLLM's older fields and of SGLang's.
_FORMS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The schema of a `response_format`, which is held either way; `strict` refuses what only the client can check."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's form of an output, and `structural_tag` of vLLM and SGLang, which has a `format`, or `structures` and
    `triggers`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("`json_schema` is missing")
        if self.type == "structural_tag" and self.format is None and None in (self.structures, self.triggers):
            raise ValueError("`format`, or `structures` and `triggers`, are needed")


class StructuredSamplingFields(UnsupportedSamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The fields in `sampling_params` of `/generate`; at most one form may be given."""

    json_schema: _Schema | None = None
    regex: Text | None = None
    ebnf: Text | None = None
    structural_tag: _Schema | None = None


class StructuredFields(UnsupportedOpenAIFields, kw_only=True, forbid_unknown_fields=True):
    """The fields of completions and chat; at most one form may be given."""

    json_schema: _Schema | None = None
    regex: Text | None = None
    ebnf: Text | None = None
    structural_tag: _Schema | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: _Schema | None = None
    guided_regex: Text | None = None
    guided_choice: list[str] | None = None
    guided_grammar: Text | None = None
    guided_whitespace_pattern: Text | None = None
    guided_decoding_backend: Annotated[Any, accepts_only("auto", "guidance", "llguidance")] = None


def structured_outputs(
    request: StructuredFields | StructuredSamplingFields, where: str = ""
) -> tuple[str, StructuredOutputs] | None:
    """Return the form that a request asks for and the field that says so, or None.

    Raises `InvalidRequestError` if several fields do.
    """
    found: dict[str, StructuredOutputs] = {}
    if isinstance(request, StructuredFields):
        if request.structured_outputs is not None:
            found["structured_outputs"] = request.structured_outputs
        if request.response_format is not None and (asked := _of_response_format(request.response_format)) is not None:
            found["response_format"] = asked
    whitespace = getattr(request, "guided_whitespace_pattern", None)
    for field, form in _FORMS.items():
        value = getattr(request, field, None)
        if value not in (None, []):
            given: dict[str, Any] = {form: tuple(value) if form == "choice" else value}
            if form == "json" and field == "guided_json":
                given["whitespace_pattern"] = whitespace
            found[field] = StructuredOutputs(**given)
    if len(found) > 1:
        names = " and ".join(where + name for name in found)
        raise InvalidRequestError(
            f"{names} are given; an output can have one form; send one of them", param=where + [*found][1]
        )
    return next(((where + name, outputs) for name, outputs in found.items()), None)


def _of_response_format(given: ResponseFormat) -> StructuredOutputs | None:
    if given.type == "json_schema" and given.json_schema is not None and given.json_schema.schema is not None:
        return StructuredOutputs(json=given.json_schema.schema, strict=given.json_schema.strict is True)
    if given.type == "structural_tag":
        older = {"structures": given.structures, "triggers": given.triggers}
        return StructuredOutputs(structural_tag=older if given.format is None else {"format": given.format})
    return None if given.type == "text" else StructuredOutputs(json_object=True)
