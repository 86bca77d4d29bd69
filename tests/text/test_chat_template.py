from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config.schema import DEFAULT_MODEL
from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.model_source import resolve
from jaxserve.text import chat_template
from jaxserve.text.chat_template import ChatTemplate, ContentFormat
from jaxserve.text.tokenizers.tokenizer import load_tokenizer
from tests.text import small_tokenizers

FIXTURE = json.loads((Path(__file__).parent.parent / "fixtures" / "text" / "chat_templates.json").read_text("utf-8"))
HI = [{"role": "user", "content": "Hi"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
TEXT_ONLY = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }};{% endfor %}"
TEXT_ONLY_PRINTING = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }};{% endfor %}"
BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %};{% endfor %}"
)
USERS_ONLY = (
    "{% for m in messages %}{% if m.role != 'user' or m.content is string %}{{ m.role + '=' + m.content }}"
    "{% else %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %};{% endfor %}"
)
FIRST_PART = "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }};{% endfor %}"
PARTS_ONLY = "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %};{% endfor %}"


def template(source: str | None, **special_tokens: str) -> ChatTemplate:
    tokenizer = small_tokenizers.words()
    tokenizer.special_tokens = special_tokens or tokenizer.special_tokens
    return ChatTemplate(source, tokenizer.special_tokens)


@pytest.mark.parametrize("case", FIXTURE["cases"], ids=lambda case: f"{case['template']}-{'-'.join(case['arguments'])}")
def test_renders_as_transformers(case: dict[str, Any]) -> None:
    chat = template(FIXTURE["templates"][case["template"]], bos_token=FIXTURE["bos_token"])

    arguments = dict(case["arguments"])
    if case["template"] in ("smollm", "llama3"):  # these show no tools
        arguments.pop("tools", None)
    assert chat.render(case["messages"], **arguments) == case["rendered"]


def test_special_tokens_and_arguments_are_variables() -> None:
    chat = template("{{ bos_token }}{{ enable_thinking }}{{ missing | default('-') }}")

    assert chat.render(HI, enable_thinking=False) == "<bos>False-"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (TEXT_ONLY, "user: one\ntwo;"),
        (TEXT_ONLY_PRINTING, "user: one\ntwo;"),
        (BOTH, "<one><two>;"),
        (PARTS_ONLY, "<one><two>;"),
        (FIRST_PART, "one\ntwo;"),
    ],
)
def test_content_parts_take_the_form_that_the_template_expects(source: str, expected: str) -> None:
    assert template(source).render(PARTS) == expected


def test_a_template_may_take_parts_from_some_roles_only() -> None:
    messages = [{**PARTS[0], "role": role} for role in ("system", "user", "assistant")]

    assert template(USERS_ONLY).render(messages) == "system=one\ntwo;<one><two>;assistant=one\ntwo;"
    assert template(PARTS_ONLY).render(messages) == "<one><two>;" * 3


@pytest.mark.parametrize(("source", "expected"), [(TEXT_ONLY, "user: Hi;"), (BOTH, "Hi;"), (PARTS_ONLY, "<Hi>;")])
def test_content_texts_take_the_form_that_the_template_expects(source: str, expected: str) -> None:
    assert template(source).render(HI) == expected


@pytest.mark.parametrize(
    ("source", "content_format", "expected"),
    [
        (BOTH, "string", "one\ntwo;"),
        (BOTH, "openai", "<one><two>;"),
        (TEXT_ONLY_PRINTING, "openai", "user: [{'type': 'text', 'text': 'one'}, {'type': 'text', 'text': 'two'}];"),
    ],
)
def test_the_form_of_contents_may_be_given(source: str, content_format: ContentFormat, expected: str) -> None:
    assert ChatTemplate(source, {}, content_format=content_format).render(PARTS) == expected


def test_a_form_of_parts_is_for_texts_too_but_not_for_results_of_tools() -> None:
    source = (
        "{% for m in messages %}{{ m.content }};{% for call in m.tool_calls or () %}"
        "{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}{{ tools or '' }}"
    )
    printing = ChatTemplate(source, {}, content_format="openai")
    messages = [{"role": role, "content": text} for role, text in (("user", "Hi"), ("assistant", ""), ("tool", "one"))]
    messages.insert(2, {"role": "assistant", "content": None})
    wanted = "[{'type': 'text', 'text': 'Hi'}];[{'type': 'text', 'text': ''}];[];one;"
    assert printing.render(messages) == wanted
    assert printing.render([{**PARTS[0], "role": "tool"}]) == "one\ntwo;"


@pytest.mark.parametrize(
    ("part", "kind"), [({"type": "image_url", "image_url": {}}, "'image_url'"), ({"text": "x"}, "None"), (3, "'int'")]
)
def test_parts_of_other_types_are_refused(part: object, kind: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"content parts of type {kind} are not supported") as caught:
        template(BOTH).render([{"role": "user", "content": [part]}])
    assert caught.value.param == "messages"


TURNS = """
{%- if style == 'loud' %}{{ raise_exception('unknown style') }}{% endif %}
{%- set last = namespace(role='') %}
{%- for m in messages %}
    {%- if m.role == 'user' == last.role %}{{ raise_exception('two questions') }}{% endif %}
    {%- if m.role == 'assistant' and loop.first %}{{ raise_exception('an answer first') }}{% endif %}
    {%- if m.content == 'bad' %}{{ m.content + 1 }}{% endif %}
    {%- set last.role = m.role %}
    {{- m.content }};
{%- endfor %}"""
QUESTION = "{% if 'user' not in messages | map(attribute='role') %}{{ raise_exception('no question') }}{% endif %}"
LAST = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('the last is an answer') }}{% endif %}"


@pytest.mark.parametrize(
    ("source", "roles", "where", "says"),
    [
        (TURNS, "u u", "messages[1]", "refused messages[1]: two questions"),
        (TURNS, "s u u a u", "messages[2]", "refused messages[2]: two questions"),
        (TURNS, "u u a u u a", "messages[1]", "refused messages[1]: two questions"),
        (TURNS, "a u", "messages[0]", "refused messages[0]: an answer first"),
        (TURNS, "u bad u", "messages[1]", "failed on messages[1]: can only concatenate str"),
        (TURNS, "bad u", "messages[0]", "failed on messages[0]: can only concatenate str"),
        (LAST + TURNS, "u a u a", "messages[3]", "refused messages[3]: the last is an answer"),
        # What is missing is no message's fault
        (QUESTION + TURNS, "s", "messages", "refused these messages: no question"),
        (QUESTION + TURNS, "s s s", "messages", "refused these messages: no question"),
        # A shorter conversation is refused for something else, which says nothing of the whole one
        (LAST + TURNS, "u u a u", "messages", "refused these messages: two questions"),
        (LAST + TURNS, "u a bad a", "messages", "refused these messages: the last is an answer"),
    ],
)
def test_an_error_of_the_template_names_the_message_at_fault(source: str, roles: str, where: str, says: str) -> None:
    names = {"u": "user", "a": "assistant", "s": "system", "bad": "system"}
    with pytest.raises(InvalidRequestError) as caught:
        template(source).render([{"role": names[role], "content": role} for role in roles.split()])
    assert str(caught.value).startswith(f"the chat template {says}")
    assert caught.value.param == where


def test_an_error_that_every_conversation_gets_names_no_message() -> None:
    with pytest.raises(InvalidRequestError, match="refused these messages: unknown style") as caught:
        template(TURNS).render([*HI, {"role": "assistant", "content": "x"}, *HI], style="loud")
    assert caught.value.param == "messages"


def test_a_slow_template_is_not_rendered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_SEARCH_SECONDS", -1.0)
    for messages in ([*HI, *HI], [{"role": "assistant", "content": "x"}, *HI]):
        with pytest.raises(InvalidRequestError, match="refused these messages: ") as caught:
            template(TURNS).render(messages)
        assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[5].content.x }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.mro() }}",
    ],
)
def test_every_template_failure_is_an_invalid_request(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="the chat template"):
        template(source).render(HI)


def test_an_invalid_template_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="not valid Jinja: line 2"):
        template("first line\n{% for x in %}")


def test_the_error_without_a_template_names_a_remedy() -> None:
    with pytest.raises(InvalidRequestError, match="--chat-template FILE"):
        template(None).render(HI)
    assert template(None).turn_end() == ""


def test_continue_final_message_ends_with_the_last_message() -> None:
    chat = template("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}")
    messages = [*HI, {"role": "assistant", "content": "So I \n"}]

    rendered = chat.render(messages, add_generation_prompt=False, continue_final_message=True)

    assert rendered == "<|user|>Hi<|end|>\n<|assistant|>So I \n"


def test_continue_final_message_with_parts() -> None:
    messages = [*HI, {"role": "assistant", "content": [{"type": "text", "text": "So"}]}]

    assert template(BOTH).render(messages, add_generation_prompt=False, continue_final_message=True) == "Hi;<So"


@pytest.mark.parametrize(
    ("source", "messages", "add", "message"),
    [
        (BOTH, HI, True, "can't both be true"),
        (BOTH, [], False, "needs a last message with content"),
        (BOTH, [{"role": "assistant", "content": None}], False, "needs a last message with content"),
        ("fixed text", HI, False, "doesn't show the last message"),
    ],
)
def test_continue_final_message_refuses_unsuitable_conversations(
    source: str, messages: list[Any], add: bool, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        template(source).render(messages, add_generation_prompt=add, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_strftime_now() -> None:
    assert template("{{ strftime_now('%Y') }}").render(HI) in {
        str(year) for year in (datetime.datetime.now().year, datetime.datetime.now().year - 1)
    }


def test_the_callers_messages_are_not_modified() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    before = json.dumps(messages)

    template(TEXT_ONLY).render(messages)

    assert json.dumps(messages) == before


@pytest.mark.slow
def test_the_default_models_template_is_the_one_of_the_fixture() -> None:
    assert load_tokenizer(resolve(DEFAULT_MODEL)).chat_template == FIXTURE["templates"]["smollm"]
