"""Outputs of a tiny random model in a given form, drawn at high temperatures: all have it, whatever is drawn."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.api_types import StructuredOutputs
from jaxserve.llm import RequestOutput
from tests.selection import examples
from tests.tiny_model import SETTINGS, write_tiny_model

pytestmark = pytest.mark.slow

CONTEXT = 1024
FORMATS = jsonschema.FormatChecker(("date", "uuid", "ipv4", "ipv6", "email"))  # those it needs no other library for
PROMPT = [ord("x")]

LEAVES: list[Any] = [
    *({"type": name} for name in ("null", "boolean", "integer", "number")),
    *({"type": "string", "minLength": least, "maxLength": most} for least, most in ((0, 0), (2, 5), (0, 9))),
    *({"type": "string", "pattern": pattern} for pattern in ("^[a-c]{1,4}$", "^(x|yz)+0$", r"^\d{3}-[^-]{2}$")),
    *({"type": "string", "format": name} for name in ("date", "time", "date-time", "uuid", "ipv4", "ipv6", "email")),
    *({"type": "integer", "exclusiveMinimum": above, "maximum": most} for above, most in ((4, 17), (-4, 0))),
    *({"type": "integer", "minimum": 0, "maximum": 99, "multipleOf": by} for by in (5, 7)),
    *({"type": "number", "minimum": least, "exclusiveMaximum": below} for least, below in ((0, 1), (-2.5, 10))),
    {"enum": ["a", "b\n", 'c"', 1, 2.5, None, [1, {"d": 2}]]},
    {"enum": ["only"]},
    {"const": {"a": [1, True], "é": "\u2028"}},
    {"type": ["integer", "null"]},
    {"type": ["string", "boolean"], "maxLength": 3},
]  # fmt: skip
# Schemas of which a part refers to another part, or to the whole.
REFERRING: list[Any] = [
    {"$ref": "#/$defs/small", "$defs": {"small": {"type": "integer", "minimum": 0, "maximum": 9}}},
    {"$ref": "#/definitions/a", "definitions": {"a": {"$ref": "#/definitions/b"}, "b": {"enum": ["x", "y"]}}},
    {
        "type": "object",
        "properties": {"value": {"enum": [1, 2]}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["value", "next"],
        "additionalProperties": False,
    },
    {"$ref": "#/$defs/tree", "$defs": {"tree": {"anyOf": [
        {"enum": ["leaf"]}, {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1}]}}},
]  # fmt: skip
WRAPPERS: list[Any] = [
    lambda one, _: {"type": "array", "items": one, "maxItems": 3},
    lambda one, _: {"type": "array", "items": one, "minItems": 2, "maxItems": 2},
    lambda one, two: {"type": "array", "prefixItems": [one, two], "items": False, "minItems": 1},
    lambda one, two: {"type": "object", "properties": {"a": one, "b c": two}, "additionalProperties": False},
    lambda one, two: {"type": "object", "properties": {"first": one, "second": two}, "required": ["first", "second"],
                      "additionalProperties": False},
    lambda one, two: {"type": "object", "properties": {"é": one}, "required": ["é"],
                      "patternProperties": {"^p[0-9]$": two}, "additionalProperties": False},
    lambda one, two: {"anyOf": [one, two]},
    lambda one, two: {"anyOf": [{"type": "object", "properties": {"kind": {"const": 1}, "of": one},
                                 "required": ["kind", "of"], "additionalProperties": False},
                                {"type": "array", "items": two, "maxItems": 2}]},
    lambda one, two: {"allOf": [{"type": "object", "properties": {"a": one}, "required": ["a"]},
                                {"properties": {"b": two}, "required": ["b"]}], "additionalProperties": True,
                      "maxProperties": 2},
    lambda one, _: {"type": "object", "properties": {"value": one, "more": {"$ref": "#/properties/value"}},
                    "required": ["value", "more"], "additionalProperties": False},
]  # fmt: skip


def schemas(count: int) -> list[Any]:
    """Return all leaves, and objects and arrays of them at random."""
    rng = random.Random(0)
    found = [*LEAVES, *REFERRING]
    simple = list(LEAVES)
    while len(found) < count:
        wrapped = rng.choice(WRAPPERS)(rng.choice(simple), rng.choice(simple))
        if "#/properties" not in json.dumps(wrapped):  # which would mean another place, deeper inside
            simple.append(wrapped)
        found.append(wrapped)
    return found[:count]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny-model"), max_position_embeddings=CONTEXT)
    settings: dict[str, Any] = SETTINGS | {"max_running_requests": 16, "cuda_graph_bs": [16], "max_total_tokens": 4096}
    with LLM(model=str(folder), **settings) as llm:
        yield llm


def generate(llm: LLM, forms: list[dict[str, Any]], **sampling: Any) -> list[RequestOutput]:
    params = [
        SamplingParams(**{"max_tokens": 900, "temperature": 2.0, "seed": index} | sampling, structured_outputs=form)
        for index, form in enumerate(StructuredOutputs(**form) for form in forms)
    ]
    outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    while llm._engine.engine.has_work:
        llm._engine.engine.step()
    stats = llm._engine.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.integrity_errors) == (0, 0, ())
    return outputs


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.0}, {"presence_penalty": 1.5, "top_p": 0.9, "min_tokens": 3, "logprobs": 1}]
)
def test_every_answer_validates(llm: LLM, sampling: dict[str, Any]) -> None:
    every = schemas(200 if not sampling else examples(200, 60))
    ended = 0
    for schema, output in zip(every, generate(llm, [{"json": schema} for schema in every], **sampling), strict=True):
        [answer] = output.outputs
        if answer.finish_reason == "length":
            continue
        ended += 1
        assert answer.finish_reason == "stop", schema
        validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
        problems = [problem.message for problem in validator.iter_errors(json.loads(answer.text))]
        assert problems == [], (schema, answer.text)
    assert ended >= (0.9 if sampling.get("temperature") != 0.0 else 0.5) * len(every)


PARTS = ["a", "b|cd", "[a-d]", "[^a-z]", ".", r"\.", "é", "(xy|z)", "x{2}", " "]
REPEATS = ["", "", "?", "{1,3}", "{0,2}", "{4}"]


def test_regular_expressions_are_matched(llm: LLM) -> None:
    rng = random.Random(1)
    patterns = [
        "".join(f"({rng.choice(PARTS)}){rng.choice(REPEATS)}" for _ in range(rng.randint(1, 5)))
        for _ in range(examples(200, 80))
    ]
    for pattern, output in zip(patterns, generate(llm, [{"regex": pattern} for pattern in patterns]), strict=True):
        [answer] = output.outputs
        assert answer.finish_reason == "stop"
        assert re.fullmatch(pattern, answer.text), (pattern, answer.text)


def test_a_form_changes_no_other_request_and_seeds_hold(llm: LLM) -> None:
    forms: list[Any] = [{"choice": ("red", "green", "blue")}, {"json": {"type": "array", "maxItems": 3}}, None, None]
    params = [
        SamplingParams(
            max_tokens=30,
            temperature=1.0,
            seed=5,
            n=3,
            structured_outputs=None if form is None else StructuredOutputs(**form),
        )
        for form in forms
    ]
    together = llm.generate([PROMPT] * 4, params, use_tqdm=False)
    for output, one in zip(together, params):
        [alone] = llm.generate([PROMPT], one, use_tqdm=False)
        assert [answer.token_ids for answer in alone.outputs] == [answer.token_ids for answer in output.outputs]
    assert {answer.text for answer in together[0].outputs} <= {"red", "green", "blue"}


def test_stop_strings_and_limits_hold_within_a_form(llm: LLM) -> None:
    digits = StructuredOutputs(regex="[0-9]{20}abcdefghij[0-9]{5}")
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"max_tokens": 100}, r"\d{20}abcdefghij\d{5}", "stop"),
        ({"max_tokens": 35}, r"\d{20}abcdefghij\d{5}", "stop"),
        ({"max_tokens": 34}, r"\d{20}abcdefghij\d{4}", "length"),
        ({"max_tokens": 24}, r"\d{20}abcd", "length"),
        ({"max_tokens": 20}, r"\d{20}", "length"),
        ({"max_tokens": 100, "stop": ["ef"]}, r"\d{20}abcd", "stop"),
        ({"max_tokens": 100, "stop_token_ids": (ord("c"),)}, r"\d{20}abc?", "stop"),
    ]
    for sampling, pattern, reason in cases:
        params = SamplingParams(temperature=1.0, seed=1, structured_outputs=digits, **sampling)
        [output] = llm.generate([PROMPT], params, use_tqdm=False)
        assert re.fullmatch(pattern, output.outputs[0].text), (sampling, output.outputs[0].text)
        assert output.outputs[0].finish_reason == reason, sampling
