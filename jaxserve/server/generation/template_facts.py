"""Finds out what the model's chat template does, by rendering messages made for it. Each answer is kept."""

from __future__ import annotations

from typing import Any

from jaxserve.errors import InvalidRequestError
from jaxserve.server.generation.message_fields import REASONING_NAMES
from jaxserve.server.server_state import LoadedModel


async def shows_later_system(loaded: LoadedModel) -> bool:
    """Return whether the model's template shows a message of the system in its place after others."""
    facts = loaded.template_facts
    if "later_system" not in facts:
        words = ("first", "answer", "second", "probe", "reply", "third")
        texts = tuple(f"jaxserve-{word}" for word in words)
        roles = ("user", "assistant", "user", "system", "assistant", "user")
        probe = [{"role": role, "content": text} for role, text in zip(roles, texts)]
        shown = await _try(loaded, [{"role": "system", "content": "x"}, *probe])
        places = [shown.find(text) for text in texts]
        facts["later_system"] = places[0] > -1 and places == sorted(places)
    found: bool = facts["later_system"]
    return found


async def reasoning_end(loaded: LoadedModel) -> str:
    """Return what the model's template writes between reasoning and content: a mark that ends reasoning, and blanks.

    Without a template that shows reasoning, it is the mark alone, or "" for a model that has none.
    """
    marks, facts = loaded.formats.thinking, loaded.template_facts
    if "reasoning_end" not in facts:
        thought, content = "jaxserve-thought", "jaxserve-content"
        answer = {"role": "assistant", "content": content, **dict.fromkeys(REASONING_NAMES, thought)}
        shown = await _try(loaded, [{"role": "user", "content": "x"}, answer])
        before, _, after = shown.rpartition(content)[0].rpartition(thought)
        ends = () if marks is None else marks.ends
        facts["reasoning_end"] = after if before and after.strip() in ends else ends[0] if ends else ""
    found: str = facts["reasoning_end"]
    return found


async def shows_text_after_result(loaded: LoadedModel) -> bool:
    """Return whether the model's template takes a message of the user after the result of a tool."""
    facts = loaded.template_facts
    if "text_after_result" not in facts:
        call = {"id": "jaxserve1", "type": "function", "function": {"name": "probe", "arguments": {}}}
        probe: list[dict[str, Any]] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "name": "probe", "content": "x"},
            {"role": "user", "content": "jaxserve-probe"},
        ]
        facts["text_after_result"] = "jaxserve-probe" in await _try(loaded, probe)
    found: bool = facts["text_after_result"]
    return found


async def _try(loaded: LoadedModel, messages: list[dict[str, Any]]) -> str:
    """Return the prompt of messages, or "" if the template refuses them."""
    try:
        return await loaded.chat_template.render(messages, add_generation_prompt=False)
    except InvalidRequestError:
        return ""
