"""Turns a client's prompts into token ids and checks their limits: vocabulary, context length, number of sequences.

Never submits anything. Long texts are tokenized on the server's threads, as that takes longer than a step; very long
ones one at a time.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import Protocol

from jaxserve import host
from jaxserve.api_types import EngineInfo, EngineRequest, SamplingParams, StructuredOutputs
from jaxserve.errors import InvalidRequestError
from jaxserve.server.errors import ContextLengthError
from jaxserve.server.http.fields import MAX_SEQUENCES
from jaxserve.server.server_state import LoadedModel, ServerState
from jaxserve.text import requests
from jaxserve.text.grammars.formats import grammar_of

# Work on up to this many characters or ids runs on the event loop: a thread would cost more.
_SHORT = 4096
LONG = _SHORT + 1
# Work on more than this runs one at a time; its memory (a few hundred times as much) is returned to the system.
_LARGE = 1 << 18


class TextEncoder(Protocol):
    """Encodes texts: a tokenizer, or its escaped marks."""

    def min_num_tokens(self, text: str) -> int:
        """Return the smallest number of tokens that `text` can have; 0 if there is no bound."""
        ...

    def encode_batch(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        check_count: Callable[[int], None] | None = None,
    ) -> list[list[int]]:
        """Return the ids of each text; see `Tokenizer.encode_batch`."""
        ...


async def encode_texts(
    state: ServerState,
    loaded: LoadedModel,
    texts: list[str],
    *,
    add_special_tokens: bool,
    param: str | None,
    encoder: TextEncoder | None = None,
) -> list[list[int]]:
    """Return the ids of each text. Raises `ContextLengthError` naming `param` for a text that doesn't fit the context,
    before tokenizing it if its length alone shows that. With `param` None, a text may be longer than the context."""
    tokenizer = encoder or loaded.tokenizer
    size = sum(map(len, texts))

    def work() -> list[list[int]]:
        if param is None:
            return tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
        if size > _SHORT:
            for text in texts:
                check_context_length(tokenizer.min_num_tokens(text), loaded.engine.info, param=param, at_least=True)
        return tokenizer.encode_batch(
            texts,
            add_special_tokens=add_special_tokens,
            check_count=lambda count: check_context_length(count, loaded.engine.info, param=param),
        )

    return await run_off_event_loop(state, size, work)


async def run_off_event_loop[T](state: ServerState, size: int, work: Callable[[], T]) -> T:
    """Run `work`, which handles `size` characters or ids: on the event loop if they are few, else on a thread."""
    if size <= _SHORT:
        return work()
    loop = asyncio.get_running_loop()
    if size <= _LARGE:
        return await loop.run_in_executor(state.tokenizer_threads, work)

    def large() -> T:
        try:
            return work()
        finally:
            host.return_free_memory()

    return await loop.run_in_executor(state.large_tokenizer_threads, large)


def split_prompts(
    prompts: str | Sequence[str | int | list[int]], n: int | None, info: EngineInfo, *, param: str
) -> tuple[list[str], list[list[int]]]:
    """Return one or several prompts as texts or as ids; the other list is empty. Checks their number before the items.

    Raises `InvalidRequestError` for too many sequences (prompts times `n`), no prompts, or prompts of different kinds.
    """
    if isinstance(prompts, str):
        return [prompts], []
    if not prompts:
        raise InvalidRequestError(f"{param} is an empty list", param=param)
    if isinstance(prompts[0], int):
        check_context_length(len(prompts), info, param=param)
    elif (total := len(prompts) * (n or 1)) > MAX_SEQUENCES:
        raise InvalidRequestError(
            f"{len(prompts)} prompts with n={n or 1} make {total} sequences; "
            f"a request may have at most {MAX_SEQUENCES}: split it into several requests",
            param=param,
        )
    texts = [item for item in prompts if isinstance(item, str)]
    ids = [item for item in prompts if isinstance(item, list)]
    tokens = [item for item in prompts if isinstance(item, int)]
    if len(prompts) not in (len(texts), len(ids), len(tokens)):
        raise InvalidRequestError(f"{param} mixes texts, token ids or lists of them; send all of one kind", param=param)
    return (texts, []) if texts else ([], [tokens] if tokens else ids)


def check_prompt(ids: Sequence[int], info: EngineInfo, *, param: str) -> None:
    """Raise unless `ids` is a valid prompt of this model: not empty, within its context and its vocabulary."""
    if not ids:
        raise InvalidRequestError(f"{param} is empty: there must be at least one token to continue", param=param)
    check_context_length(len(ids), info, param=param)
    requests.check_ids(ids, info.vocab_size, param=param)


def check_context_length(num_tokens: int, info: EngineInfo, *, param: str, at_least: bool = False) -> None:
    """Raise `ContextLengthError` if `num_tokens` exceeds the context. With `at_least`, it is a lower bound."""
    if num_tokens > info.max_model_len:
        raise ContextLengthError(
            f"This model's maximum context length is {info.max_model_len} tokens. However, your {param} resulted in "
            f"{'at least ' if at_least else ''}{num_tokens} tokens. Please reduce the length of the {param}.",
            param=param,
        )


def max_output_tokens(
    prompt_tokens: int, requested: int | None, default: int | None, info: EngineInfo, *, param: str
) -> int:
    """Return the limit of generated tokens: `requested`, else the smaller of `default` and what the context leaves.

    Raises `ContextLengthError` if the context leaves too little.
    """
    left = info.max_model_len - prompt_tokens
    wanted = requested if requested is not None else max(left if default is None else min(default, left), 1)
    if wanted == 0 and left < 1:
        raise ContextLengthError(
            f"This model's maximum context length is {info.max_model_len} tokens. However, your {param} has "
            f"{prompt_tokens} tokens, and it must leave room for one more even if none is generated. "
            f"Please reduce the length of the {param}.",
            param=param,
        )
    if wanted > left:
        raise ContextLengthError(
            f"This model's maximum context length is {info.max_model_len} tokens. However, you requested "
            f"{prompt_tokens + wanted} tokens ({prompt_tokens} in the {param}, {wanted} in the completion). "
            f"Please reduce the length of the {param} or completion.",
            param=param,
        )
    return wanted


async def compile_grammar(state: ServerState, loaded: LoadedModel, asked: tuple[str, StructuredOutputs] | None) -> str:
    """Return the grammar of a form that a field asks for, or "" if none does.

    Raises `InvalidRequestError` naming the field if the form can't be expressed or is too complex.
    """
    if asked is None:
        return ""
    field, outputs = asked
    return await check_grammar(state, loaded, lambda: grammar_of(outputs), param=field)


async def check_grammar(state: ServerState, loaded: LoadedModel, make: Callable[[], str], *, param: str) -> str:
    """Return the grammar that `make` returns, or "" if it is that, as `compile_grammar` does."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(state.grammar_threads, lambda: loaded.grammars.check(make, param=param))


class QueueOptions(Protocol):
    """The fields of a request that change how the engine queues and caches it."""

    priority: int | None
    cache_salt: str | None


def engine_requests(
    loaded: LoadedModel,
    response_id: str,
    prompts: list[list[int]],
    samplings: list[SamplingParams],
    grammars: list[str],
    options: QueueOptions,
) -> list[EngineRequest]:
    """Return `n` requests for each prompt, in the order of the choices: prompt index * n + sample.

    `grammars` are those of the prompts' outputs, "" for none. Ids are unique even if a client uses its own twice.
    """
    unique_id = f"{response_id}-{uuid.uuid4().hex}"
    return [
        request
        for number, (ids, sampling, grammar) in enumerate(zip(prompts, samplings, grammars, strict=True))
        for request in requests.sample_requests(
            f"{unique_id}-{number}",
            ids,
            sampling,
            loaded.tokenizer,
            loaded.engine.info,
            priority=options.priority,
            cache_salt=options.cache_salt,
            grammar=grammar,
        )
    ]
