"""Makes the engine's requests and their ids, with the grammars that outputs must match. Never submits anything."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Callable

from jaxserve.api_types import EngineRequest, SamplingParams, StructuredOutputs, ThinkingBudget
from jaxserve.errors import InvalidRequestError
from jaxserve.server.server_state import LoadedModel, ServerState
from jaxserve.text.grammars.default_blanks import with_default_blanks
from jaxserve.text.grammars.formats import grammar_of
from jaxserve.text.requests import sample_requests


async def compile_grammar(state: ServerState, loaded: LoadedModel, asked: tuple[str, StructuredOutputs] | None) -> str:
    """Return the grammar of a form that a field asks for, or "" if none does.

    Raises `InvalidRequestError` naming the field if the form can't be expressed or is too complex.
    """
    if asked is None:
        return ""
    field, outputs = asked
    outputs = with_default_blanks(outputs, state.config)
    return await check_grammar(state, loaded, lambda: grammar_of(outputs), param=field)


async def check_grammar(state: ServerState, loaded: LoadedModel, make: Callable[[], str], *, param: str) -> str:
    """Return the grammar that `make` returns, checked; "" is none. Raises as `compile_grammar` does."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(state.grammar_threads, lambda: loaded.grammars.check(make, param=param))


def engine_requests(
    loaded: LoadedModel,
    response_id: str,
    prompts: list[list[int]],
    samplings: list[SamplingParams],
    grammars: list[str],
    *,
    priority: int | None = None,
    cache_salt: str | None = None,
    thinking: ThinkingBudget | None = None,
) -> list[EngineRequest]:
    """Return `n` requests for each prompt, in the order of the choices: prompt index * n + sample.

    `grammars` has one for each prompt's outputs, "" for none. Ids are unique even if a client uses its own twice.
    """
    unique_id = f"{response_id}-{uuid.uuid4().hex}"
    return [
        request
        for number, (ids, sampling, grammar) in enumerate(zip(prompts, samplings, grammars, strict=True))
        for request in sample_requests(
            f"{unique_id}-{number}",
            ids,
            sampling,
            loaded.tokenizer,
            loaded.engine.info,
            priority=priority,
            cache_salt=cache_salt,
            grammar=grammar,
            thinking=thinking,
        )
    ]


def prompt_rids(rid: str | list[str] | None, num_prompts: int) -> list[str]:
    """Return the id that SGLang's field `rid` gives each prompt, if it is a list. Raises `InvalidRequestError`."""
    if not isinstance(rid, list):
        return []
    if len(rid) != num_prompts:
        raise InvalidRequestError(f"rid has {len(rid)} ids for {num_prompts} prompts", param="rid")
    [(name, count)] = Counter(rid).most_common(1)
    if count > 1:
        raise InvalidRequestError(f"rid has {name!r} {count} times: each prompt needs its own id", param="rid")
    return rid


def numbered(name: str, count: int) -> list[str]:
    """Return the ids of `count` outputs, as SGLang numbers them."""
    return [name] if count == 1 else [f"{name}_{index}" for index in range(count)]
