"""From what a client sends to prompt ids, and the limits they must keep: vocabulary, context length, number.

Never submits anything; long texts are tokenized on the serving's threads, as that takes longer than a step, and very
long ones one at a time.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable, Sequence

from jaxserve.api_types import EngineInfo, EngineRequest, SamplingParams
from jaxserve.errors import InvalidRequestError
from jaxserve.server.errors import ContextLengthError
from jaxserve.server.http.fields import MAX_SEQUENCES
from jaxserve.server.server_state import Loaded, Serving
from jaxserve.text import requests

# Work on up to this many characters or ids is done on the event loop: a thread costs more.
_SHORT = 4096
# Work on more than this many is done one at a time, and its memory, a few hundred times as much, is given back.
_LARGE = 1 << 18


async def encode(
    serving: Serving, loaded: Loaded, texts: list[str], *, add_special_tokens: bool, param: str | None
) -> list[list[int]]:
    """The ids of each text. Raises `ContextLengthError` naming `param` for one that doesn't fit the context: where its
    length alone says so, before it is tokenized. With `param` None a text may be longer than the context."""
    tokenizer = loaded.tokenizer
    size = sum(map(len, texts))

    def work() -> list[list[int]]:
        if param is None:
            return tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
        if size > _SHORT:
            for text in texts:
                check_length(tokenizer.least_tokens(text), loaded.engine.info, param=param, at_least=True)
        return tokenizer.encode_batch(
            texts,
            add_special_tokens=add_special_tokens,
            check_count=lambda count: check_length(count, loaded.engine.info, param=param),
        )

    return await off_loop(serving, size, work)


async def off_loop[T](serving: Serving, size: int, work: Callable[[], T]) -> T:
    """Runs `work` on `size` characters or ids: on the event loop where they are few, else on a thread."""
    if size <= _SHORT:
        return work()
    loop = asyncio.get_running_loop()
    if size <= _LARGE:
        return await loop.run_in_executor(serving.tokenizing, work)

    def large() -> T:
        try:
            return work()
        finally:
            _give_memory_back()

    return await loop.run_in_executor(serving.tokenizing_large, large)


def _give_memory_back() -> None:
    """glibc keeps what was freed, gigabytes after a large text; other allocators don't."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def check_number(num_prompts: int, n: int | None) -> None:
    """Raises if a request would have more sequences than one may; to be asked before anything is tokenized."""
    total = num_prompts * max(n or 1, 1)
    if total > MAX_SEQUENCES:
        raise InvalidRequestError(
            f"{num_prompts} prompts with n={n or 1} make {total} sequences; "
            f"a request may have at most {MAX_SEQUENCES}: send several",
            param="prompt" if num_prompts > 1 else "n",
        )


def check_prompt(ids: Sequence[int], info: EngineInfo, *, param: str) -> None:
    """Raises unless `ids` is a prompt of this model: not empty, within its context and its vocabulary."""
    if not ids:
        raise InvalidRequestError(f"{param} is empty: there must be at least one token to continue", param=param)
    check_length(len(ids), info, param=param)
    requests.check_ids(ids, info.vocab_size, param=param)


def check_length(num_tokens: int, info: EngineInfo, *, param: str, at_least: bool = False) -> None:
    """Raises `ContextLengthError` if `num_tokens` exceed the context."""
    if num_tokens > info.max_model_len:
        raise ContextLengthError(
            f"This model's maximum context length is {info.max_model_len} tokens. However, your {param} resulted in "
            f"{'at least ' if at_least else ''}{num_tokens} tokens. Please reduce the length of the {param}.",
            param=param,
        )


def output_limit(prompt_tokens: int, asked: int | None, default: int | None, info: EngineInfo, *, param: str) -> int:
    """How many tokens a prompt may get: `asked`, else `default` or what the context leaves, whichever is less."""
    left = info.max_model_len - prompt_tokens
    fitting = left if default is None else min(default, left)
    wanted = max(fitting, 1) if asked is None else asked
    if wanted == 0 and left < 1:
        raise ContextLengthError(
            f"This model's maximum context length is {info.max_model_len} tokens. However, your {param} has "
            f"{prompt_tokens} tokens, and one must be left after it even where none is generated. "
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


def engine_requests(
    loaded: Loaded,
    response_id: str,
    prompts: list[list[int]],
    samplings: list[SamplingParams],
    *,
    priority: int | None,
    cache_salt: str | None,
) -> list[EngineRequest]:
    """`n` sequences for each prompt, in the order of the choices: prompt index * n + sample."""
    return [
        request
        for number, (ids, sampling) in enumerate(zip(prompts, samplings))
        for request in requests.engine_requests(
            f"{response_id}-{number}",
            ids,
            sampling,
            loaded.tokenizer,
            loaded.engine.info,
            priority=priority,
            cache_salt=cache_salt,
        )
    ]
