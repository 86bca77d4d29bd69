"""Chat templates that requests bring. What is found out about one is kept while it is among the last few."""

from __future__ import annotations

import dataclasses

from jaxserve.errors import InvalidRequestError
from jaxserve.server.server_state import LoadedModel, ServerState

_KEPT_TEMPLATES = 8


async def with_template_of(state: ServerState, loaded: LoadedModel, source: str | None) -> LoadedModel:
    """Return the model with the template of a request, if it has one. Answers are read as the server reads them.

    Raises `InvalidRequestError` unless the server trusts such templates; rendering raises it for one that is broken.
    """
    if source is None:
        return loaded
    if not state.config.trust_request_chat_template:
        raise InvalidRequestError(
            "chat_template is not supported by this server, which uses its own; leave it out, or start the server with "
            "--trust-request-chat-template",
            param="chat_template",
        )
    kept = loaded.by_template
    if source in kept:
        kept[source] = kept.pop(source)  # the first is the one that was used least recently
    else:
        renderer = loaded.chat_template.with_source(source)
        tokenizer = loaded.tokenizer.with_turn_end(await renderer.turn_end())
        kept[source] = dataclasses.replace(
            loaded, chat_template=renderer, template_source=source, tokenizer=tokenizer, template_facts={}
        )
        if len(kept) > _KEPT_TEMPLATES:
            del kept[next(iter(kept))]
    return kept[source]
