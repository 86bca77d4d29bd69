"""Turns a client's prompts into token ids and checks their limits: vocabulary, context length, number of sequences.

Never submits anything. Long texts are tokenized on the server's threads, as that takes longer than a step; very long
ones one at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from jaxserve import host
from jaxserve.api_types import EngineInfo
from jaxserve.errors import ContextLengthError, InvalidRequestError
from jaxserve.server.http.fields import MAX_SEQUENCES
from jaxserve.server.server_state import LoadedModel, ServerState
from jaxserve.text.requests import check_ids
from jaxserve.text.tokenizers.tokenizer import TextEncoder

logger = logging.getLogger("jaxserve.server")

# Work on up to this many characters or ids runs on the event loop: a thread would cost more.
_SHORT = 4096
LONG = _SHORT + 1
# Work on more than this runs one at a time; its memory (a few hundred times as much) is returned to the system.
_LARGE = 1 << 18


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


async def read_prompts(
    state: ServerState,
    loaded: LoadedModel,
    prompts: str | Sequence[str | int | list[int]],
    n: int | None,
    *,
    add_special_tokens: bool,
    param: str,
) -> tuple[list[str], list[list[int]]]:
    """Return one or several prompts as texts, if they are given so and none is truncated, and as ids, after checking
    them.

    `n` is the number of samples of each. Raises `InvalidRequestError`.
    """
    texts, ids = split_prompts(prompts, n, param=param)
    truncates = state.config.allow_auto_truncate
    if texts:
        limited = None if truncates else param
        ids = await encode_texts(state, loaded, texts, add_special_tokens=add_special_tokens, param=limited)
    fitted = [fit_prompt(prompt, loaded.engine.info, param=param, truncates=truncates) for prompt in ids]
    return texts if fitted == ids else [], fitted


def split_prompts(
    prompts: str | Sequence[str | int | list[int]], n: int | None, *, param: str
) -> tuple[list[str], list[list[int]]]:
    """Return one or several prompts as texts or as ids; the other list is empty. Checks their number before the items.

    Raises `InvalidRequestError` for too many sequences (prompts times `n`), no prompts, or prompts of different kinds.
    """
    if isinstance(prompts, str):
        return [prompts], []
    if not prompts:
        raise InvalidRequestError(f"{param} is an empty list; send at least one prompt", param=param)
    if not isinstance(prompts[0], int) and (total := len(prompts) * (n or 1)) > MAX_SEQUENCES:
        made = f"{len(prompts)} prompts with n={n} make {total} sequences"
        found = f"{param} has {total} entries" if (n or 1) == 1 else made
        raise InvalidRequestError(
            f"{found}; a request may have at most {MAX_SEQUENCES}: split it into several requests", param=param
        )
    texts = [item for item in prompts if isinstance(item, str)]
    ids = [item for item in prompts if isinstance(item, list)]
    tokens = [item for item in prompts if isinstance(item, int)]
    if len(prompts) not in (len(texts), len(ids), len(tokens)):
        raise InvalidRequestError(f"{param} mixes texts, token ids or lists of them; send all of one kind", param=param)
    return (texts, []) if texts else ([], [tokens] if tokens else ids)


def fit_prompt(ids: list[int], info: EngineInfo, *, param: str, truncates: bool) -> list[int]:
    """Return a valid prompt: not empty, within the model's context and its vocabulary. Raises `InvalidRequestError`.

    With `truncates`, one that leaves no room for an answer loses its end, as in SGLang.
    """
    longest = info.max_model_len - 1
    if truncates and len(ids) > longest:
        logger.warning("%d tokens of %s are truncated to the first %d", len(ids), param, longest)
        ids = ids[:longest]
    if not ids:
        raise InvalidRequestError(f"{param} is empty: there must be at least one token to continue", param=param)
    check_context_length(len(ids), info, param=param)
    check_ids(ids, info.vocab_size, param=param)
    return ids


def check_context_length(num_tokens: int, info: EngineInfo, *, param: str, at_least: bool = False) -> None:
    """Raise `ContextLengthError` if `num_tokens` exceeds the context. With `at_least`, it is a lower bound."""
    if num_tokens > info.max_model_len:
        raise ContextLengthError(
            f"This model's maximum context length is {info.max_model_len} tokens. However, your {param} resulted in "
            f"{'at least ' if at_least else ''}{num_tokens} tokens. Please reduce the length of the {param}.",
            param=param,
            num_tokens=num_tokens,
        )


def max_output_tokens(
    prompt_tokens: int,
    requested: int | None,
    default: int | None,
    loaded: LoadedModel,
    *,
    param: str,
    truncates: bool = False,
) -> int:
    """Return the limit of generated tokens: `requested`, else the smaller of `default` and what the context leaves.

    The server's own limit bounds both. Raises `ContextLengthError` if the context leaves too little. With `truncates`,
    it is what the context leaves then.
    """
    info, own = loaded.engine.info, loaded.sampling_defaults
    requested, default = None if requested is None else own.limited(requested), own.limited(default)
    left = info.max_model_len - prompt_tokens
    if truncates and requested is not None and requested > left:
        logger.warning("%d tokens are requested, but the context leaves %d", requested, left)
        requested = left
    wanted = requested if requested is not None else max(left if default is None else min(default, left), 1)
    if wanted == 0 and left < 1:
        raise ContextLengthError(
            f"This model's maximum context length is {info.max_model_len} tokens. However, your {param} has "
            f"{prompt_tokens} tokens, and it must leave room for one more even if none is generated. "
            f"Please reduce the length of the {param}.",
            param=param,
            num_tokens=prompt_tokens,
        )
    if wanted > left:
        raise ContextLengthError(
            f"This model's maximum context length is {info.max_model_len} tokens. However, you requested "
            f"{prompt_tokens + wanted} tokens ({prompt_tokens} in the {param}, {wanted} in the completion). "
            f"Please reduce the length of the {param} or completion.",
            param=param,
            num_tokens=prompt_tokens + wanted,
        )
    return wanted
