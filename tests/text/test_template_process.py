from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator

import pytest

from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.template_process import TemplateProcess

pytestmark = pytest.mark.process

HI = [{"role": "user", "content": "Hi \ud800 \u2028 é"}]
PRINTING = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}{{ mood }}"
THREE_DEEP = "".join(f"{{% for {name} in range(99999) %}}" for name in "abc") + "{% endfor %}" * 3
DOUBLED = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}"


@contextlib.asynccontextmanager
async def process(source: str | None) -> AsyncIterator[TemplateProcess]:
    started = TemplateProcess(source, {"bos_token": "<s>"}, cpu_seconds=0.2)
    try:
        yield started
    finally:
        await started.close()


async def test_the_child_renders_as_this_process_does() -> None:
    here = ChatTemplate(PRINTING, {"bos_token": "<s>"})
    async with process(PRINTING) as template:
        for mood in ("merry", {"a": [1.5, None]}, 2**200):
            assert await template.render(HI, mood=mood) == here.render(HI, mood=mood)
        large = [{"role": "user", "content": "a" * (1 << 19)}, *HI]
        assert await template.render(large) == here.render(large)


async def test_the_form_of_contents_reaches_the_child() -> None:
    template = TemplateProcess("{{ messages[0].content is string }}", {}, content_format="openai")
    assert await template.render(HI) == "False"
    await template.close()


async def test_errors_of_a_template_are_raised_here() -> None:
    async with process("{% if messages[1] %}{{ raise_exception('only one') }}{% endif %}") as template:
        with pytest.raises(InvalidRequestError, match=r"refused messages\[1\]: only one") as refused:
            await template.render(HI * 3)
        assert refused.value.param == "messages[1]"
    async with process(None) as template:
        with pytest.raises(InvalidRequestError, match="no chat template"):
            await template.render(HI)


async def test_templates_of_requests_render_in_a_second_child() -> None:
    async with process("own") as template:
        assert await template.render(HI) == "own"
        other = template.with_source(PRINTING)
        assert await other.render(HI, mood=1) == ChatTemplate(PRINTING, {"bos_token": "<s>"}).render(HI, mood=1)
        assert await other.turn_end() == ";"
        assert template._child is not None
        own = template._child.pid
        for source, problem in (
            ("{% if %}", "the chat template is not valid Jinja: line 1: "),
            (THREE_DEEP, r"took more than 0\.2 s"),
            ("{{ 'a' * 10**10 }}", "more than 1024 MiB of memory"),
            ("{{ raise_exception('never') }}", "refused these messages: never"),
        ):
            broken = other.with_source(source)
            assert await broken.turn_end() == ""
            with pytest.raises(InvalidRequestError, match=problem) as refused:
                await broken.render(HI)
            assert refused.value.param == ("chat_template" if "Jinja" in problem else "messages")
        assert await other.render(HI)
        assert (await template.render(HI), template._child.pid) == ("own", own)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (THREE_DEEP, r"took more than 0\.2 s"),
        (DOUBLED, r"took more than 0\.2 s"),
        ("{{ 'a' * 10**10 }}", "more than 1024 MiB of memory"),
        ("{{ '%99999999999s' % 'a' }}", "more than 1024 MiB of memory"),
        ("{{ 'a' | center(10**10) }}", "more than 1024 MiB of memory"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recurses too deeply"),
        ("{{ 'a' * 40000000 }}", "wrote 40000000 characters, at most 33554432"),
    ],
)
async def test_a_template_that_exceeds_a_limit_is_ended(source: str, message: str) -> None:
    async with process("{% if mood %}" + source + "{% else %}fine{% endif %}") as template:
        with pytest.raises(InvalidRequestError, match=message):
            await template.render(HI, mood=1)
        assert await template.render(HI) == "fine"


async def test_a_killed_child_is_replaced() -> None:
    async with process("fine") as template:
        await template.start()
        assert template._child is not None
        os.kill(template._child.pid, signal.SIGKILL)
        await template._child.wait()
        assert await template.render(HI) == "fine"


async def test_a_stopped_child_is_killed_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    async with process("fine") as template:
        assert await template.render(HI) == "fine"
        assert template._child is not None
        os.kill(template._child.pid, signal.SIGSTOP)
        monkeypatch.setattr("jaxserve.text.template_process._ANSWER_TIMEOUT", 0.01)
        with pytest.raises(InvalidRequestError, match="ended with code -9"):
            await template.render(HI)


async def test_a_cancelled_request_leaves_no_answer_in_the_pipe() -> None:
    async with process("{{ messages[0].content }}") as template:
        for number in range(20):
            asking = asyncio.ensure_future(template.render([{"role": "user", "content": f"left {number}"}]))
            await asyncio.sleep(0)
            asking.cancel()
            assert await template.render([{"role": "user", "content": f"stayed {number}"}]) == f"stayed {number}"


def test_compiling_a_template_evaluates_no_constants() -> None:
    ChatTemplate("{{ 'a' * 10**12 }}{{ 10 | center(10**12) }}{% if 'a' * 10**12 %}{% endif %}", {})


def test_a_template_nested_too_deep_is_refused() -> None:
    for source in ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% if 1 %}" * 5000 + "{% endif %}" * 5000):
        with pytest.raises(ConfigError, match="can't be compiled"):
            ChatTemplate(source, {})
