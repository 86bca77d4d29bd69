"""From what a client sends to prompt ids, and the limits they must keep: vocabulary, context length, number.

Never submits anything; long texts are tokenized on the serving's threads, as that takes longer than a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from jaxserve.api_types import EngineInfo, EngineRequest, SamplingParams
from jaxserve.errors import InvalidRequestError
from jaxserve.server.errors import ContextLengthError
from jaxserve.server.fields import MAX_SEQUENCES
from jaxserve.server.serving import Loaded, Serving
from jaxserve.text import requests

# Texts up to this many characters are tokenized on the event loop: a thread costs more.
_SHORT_TEXT = 4096


async def encode(serving: Serving, loaded: Loaded, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
    """The ids of each text."""
    tokenizer = loaded.tokenizer

    def work() -> list[list[int]]:
        return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    return await off_loop(serving, sum(map(len, texts)), work)


async def off_loop[T](serving: Serving, size: int, work: Callable[[], T]) -> T:
    """Does work on so many characters or ids: at once, or where that takes long on a thread."""
    if size <= _SHORT_TEXT:
        return work()
    return await asyncio.get_running_loop().run_in_executor(serving.tokenizing, work)


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
    if len(ids) > info.max_model_len:
        raise ContextLengthError(
            f"This model's maximum context length is {info.max_model_len} tokens. However, your {param} resulted in "
            f"{len(ids)} tokens. Please reduce the length of the {param}.",
            param=param,
        )
    requests.check_ids(ids, info.vocab_size, param=param)


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
