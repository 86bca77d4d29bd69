"""The fields that ask for an output of a given form: each reaches the engine as a grammar, or is refused by name."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from jaxserve.api_types import StructuredOutputs
from jaxserve.text.grammars.formats import grammar_of
from tests.server.conftest import ServerUnderTest, over_asgi

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG: dict[str, Any] = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
GBNF = 'root ::= "a" | "b"'
PATHS = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/generate": {"text": "x"},
}
JSON, REGEX = StructuredOutputs(json=SCHEMA), StructuredOutputs(regex="[ab]+")
CHOICE, GRAMMAR = StructuredOutputs(choice=("yes", "no")), StructuredOutputs(grammar=GBNF)
OBJECT, TAGS = StructuredOutputs(json_object=True), StructuredOutputs(structural_tag=TAG)
OF_OPENAI: list[tuple[dict[str, Any], StructuredOutputs | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, OBJECT),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": SCHEMA}}}, JSON),
    ({"response_format": {"type": "json_schema", "json_schema": {"strict": True, "schema": SCHEMA}}},
     StructuredOutputs(json=SCHEMA, strict=True)),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "f"}}}, OBJECT),
    ({"response_format": {"type": "structural_tag", **TAG}}, TAGS),
    ({"structured_outputs": {"json": SCHEMA}}, JSON),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, JSON),
    ({"structured_outputs": {"regex": "[ab]+"}}, REGEX),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, CHOICE),
    ({"structured_outputs": {"grammar": GBNF}}, GRAMMAR),
    ({"structured_outputs": {"json_object": True}}, OBJECT),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, TAGS),
    ({"guided_json": SCHEMA}, JSON),
    (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
        StructuredOutputs(json=SCHEMA, whitespace_pattern=" ?"),
    ),
    ({"guided_regex": "[ab]+"}, REGEX),
    ({"guided_choice": ["yes", "no"]}, CHOICE),
    ({"guided_grammar": GBNF, "guided_decoding_backend": "auto"}, GRAMMAR),
    ({"guided_json": None, "guided_regex": None, "response_format": None}, None),
]  # fmt: skip
OF_SGLANG: list[tuple[dict[str, Any], StructuredOutputs | None]] = [
    ({"json_schema": json.dumps(SCHEMA)}, JSON),
    ({"regex": "[ab]+"}, REGEX),
    ({"ebnf": GBNF}, GRAMMAR),
    ({"structural_tag": json.dumps(TAG)}, TAGS),
    ({"regex": None}, None),
]
CASES = [
    *((path, fields, form) for path in PATHS if path != "/generate" for fields, form in OF_OPENAI + OF_SGLANG),
    *(("/generate", {"sampling_params": fields}, form) for fields, form in OF_SGLANG),
]


@pytest.mark.parametrize(("path", "fields", "form"), CASES)
async def test_a_form_reaches_the_engine(
    server: ServerUnderTest, path: str, fields: dict[str, Any], form: StructuredOutputs | None
):
    response = await server.http.post(path, json=PATHS[path] | fields)
    assert response.status_code == 200, response.text
    assert [request.grammar for request in server.engine.submitted] == ["" if form is None else grammar_of(form)]


@pytest.mark.parametrize(
    ("path", "fields", "own"),
    [
        ("/v1/completions", {"guided_json": SCHEMA}, {"guided_whitespace_pattern": "\n?"}),
        ("/v1/chat/completions", {"structured_outputs": {"json": SCHEMA}}, None),
        ("/generate", {"sampling_params": {"json_schema": json.dumps(SCHEMA)}}, None),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "f", "schema": SCHEMA}}}, None),
    ],
)
async def test_blanks_of_json_are_the_servers_unless_a_request_names_its_own(
    path: str, fields: dict[str, Any], own: dict[str, Any] | None
):
    body = PATHS.get(path, {"input": "x"}) | fields
    for setting, form in (
        ({"constrained_json_whitespace_pattern": " ?"}, {"whitespace_pattern": " ?"}),
        ({"constrained_json_disable_any_whitespace": True}, {"disable_any_whitespace": True}),
    ):
        async with over_asgi(**setting) as server:
            responses = [await server.http.post(path, json=one) for one in (body, *([body | own] if own else []))]
            assert [response.status_code for response in responses] == [200] * len(responses), responses[-1].text
            grammar, *others = [request.grammar for request in server.engine.submitted]
            assert grammar == grammar_of(StructuredOutputs(json=SCHEMA, **form))
            assert others == ([grammar_of(StructuredOutputs(json=SCHEMA, whitespace_pattern="\n?"))] if own else [])


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "xml"}}, None, "enum value"),
        ({"response_format": {"type": "json_schema"}}, None, "`json_schema` is missing"),
        ({"response_format": {"type": "structural_tag"}}, None, "`format`, or `structures` and `triggers`, are needed"),
        ({"response_format": {"type": "json_object", "schema": {}}}, None, "schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strange"}}}},
            "response_format",
            "response_format can't be used: .*strange",
        ),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "the group at 0 doesn't end"),
        ({"structured_outputs": {}}, None, "one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, None, "one of"),
        ({"guided_regex": "(?=a)"}, "guided_regex", "looking ahead or behind"),
        ({"guided_json": "{"}, "guided_json", "Expecting property name"),
        ({"guided_grammar": "what is this"}, "guided_grammar", "neither Lark nor GBNF"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend", 'only null or "auto"'),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "an output can have one form"),
        (
            {"response_format": {"type": "json_object"}, "regex": "a"},
            "regex",
            "response_format and regex are given; an output can have one form",
        ),
    ],
)
async def test_what_cannot_be_held_is_refused_by_name(
    server: ServerUnderTest, fields: dict[str, Any], param: str | None, message: str
):
    for path in ("/v1/completions", "/v1/chat/completions"):
        response = await server.http.post(path, json=PATHS[path] | fields)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error", error
        assert param is None or error["param"] == param
        assert re.search(message, error["message"]), error
    assert server.engine.submitted == []


async def test_a_bad_form_of_sglang_is_refused_by_name(server: ServerUnderTest):
    response = await server.http.post("/generate", json={"text": "x", "sampling_params": {"regex": "(a"}})
    assert response.status_code == 400
    assert "sampling_params.regex can't be used" in response.text


async def test_prompts_of_a_batch_have_forms_of_their_own(server: ServerUnderTest):
    samplings = [{"regex": "[ab]+"}, {"ebnf": GBNF}, {}]
    response = await server.http.post("/generate", json={"text": ["x", "y", "z"], "sampling_params": samplings})
    assert response.status_code == 200, response.text
    grammars = {request.prompt_ids[0]: request.grammar for request in server.engine.submitted}
    assert grammars == {ord("x"): grammar_of(REGEX), ord("y"): grammar_of(GRAMMAR), ord("z"): ""}


async def test_samples_share_a_form(server: ServerUnderTest):
    body = {"prompt": ["x", "y"], "n": 3, "guided_regex": "[ab]+"}
    assert (await server.http.post("/v1/completions", json=body)).status_code == 200
    assert [request.grammar for request in server.engine.submitted] == [grammar_of(REGEX)] * 6


async def test_other_requests_go_on_while_a_form_is_checked(server: ServerUnderTest):
    loaded = server.state.loaded
    assert loaded is not None
    started, ended = asyncio.Event(), asyncio.Event()
    loop, grammar = asyncio.get_running_loop(), loaded.grammars.check

    def slow(*args: Any, **options: Any) -> str:
        loop.call_soon_threadsafe(started.set)
        asyncio.run_coroutine_threadsafe(ended.wait(), loop).result()
        return grammar(*args, **options)

    loaded.grammars.check = slow  # type: ignore[method-assign]
    slow_one = asyncio.create_task(server.http.post("/v1/completions", json={"prompt": "x", "guided_regex": "a"}))
    await started.wait()
    assert (await server.http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
    assert not slow_one.done()
    ended.set()
    assert (await slow_one).status_code == 200
