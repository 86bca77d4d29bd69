"""Offline generation: `LLM` runs the engine in the caller's process and turns prompts into texts.

It owns prompts in and `RequestOutput`s out: tokenizing, the chat template, samples of one prompt, the progress bar.
What runs when is the engine's business, stop strings and text are `text/`'s.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import types
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from jaxserve import model_source
from jaxserve.api_types import EngineRequest, FinishReason, Profile, SamplingParams, TokenEvent, TokenLogprobs, Usage
from jaxserve.config.data_parallel import in_one_process
from jaxserve.config.load import from_arguments
from jaxserve.config.schema import DEFAULT_MODEL, ServerConfig
from jaxserve.engine.client import InProcessEngine, SharedEngine
from jaxserve.errors import ConfigError, InvalidRequestError, RequestFailedError
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.output import OutputDelta, OutputProcessor
from jaxserve.text.requests import check_ids, engine_requests
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One sample of a prompt. `logprobs` has an entry a token when `SamplingParams.logprobs` asks for them."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason
    stop_reason: int | str | None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """What came of one prompt. `prompt` is None where ids were given; `usage` counts all samples."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    usage: Usage
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class LLM:
    """A model, loaded and ready. Settings are those of `jaxserve serve`, by their own or another engine's names:
    `LLM("folder", max_running_requests=8)`. Raises `ConfigError`, `ModelNotFoundError`.

    Use it as a context manager, or `close` it, to give its memory back. Several threads may use it at once: what they
    ask for runs in one batch.
    """

    def __init__(self, model: str | Path = DEFAULT_MODEL, **settings: Any) -> None:
        loaded = from_arguments([("model", str(model)), *settings.items()])
        for value in loaded.values:
            name = value.setting.name
            if value.setting.owner is ServerConfig and value.source != "default" and name != "chat_template":
                raise ConfigError(f"{name} is a setting of `jaxserve serve`; LLM has no server")
        for note in loaded.notes:
            logger.warning(note)
        config = in_one_process(loaded.engine, "LLM")
        self._tokenizer = load_tokenizer(model_source.resolve(config.model))
        self._template = _chat_template(self._tokenizer, loaded.server.chat_template)
        self._engine = SharedEngine(InProcessEngine.start(config))
        self._numbers = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts (texts or lists of ids), all in one running batch; the outputs are in the prompts' order.

        With `schedule_policy="priority"` a higher `priority` goes first; only prompts of one `cache_salt` share cached
        prefixes. Raises `InvalidRequestError` before anything runs, `RequestFailedError` when the engine gives a
        request up.
        """
        many = _as_list(prompts)
        jobs = [
            dataclasses.replace(self._job(prompt, params), priority=each, cache_salt=cache_salt)
            for prompt, params, each in zip(
                many, _one_each(sampling_params, len(many)), _priorities(priority, len(many)), strict=True
            )
        ]
        return self._run(jobs, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template. Raises as `generate` does."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **(chat_template_kwargs or {}),
        }
        texts = [self._render(conversation, options) for conversation in conversations]  # type: ignore[arg-type]
        params = _one_each(sampling_params, len(texts))
        jobs = [
            dataclasses.replace(self._job(self._encode_rendered(text), each), prompt=text)
            for text, each in zip(texts, params, strict=True)
        ]
        return self._run(jobs, use_tqdm)

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """The ids of the prompt that the chat template makes of a conversation; options are the template's."""
        return self._encode_rendered(self._render(messages, options))

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Generator[OutputDelta]:
        """Continue one prompt, piece by piece as it comes. Closing the iterator aborts the request."""
        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise InvalidRequestError(f"stream gives one sample, n must be 1, got {params.n}", param="n")
        return self._stream(self._job(prompt, params))

    @property
    def max_model_len(self) -> int:
        """The longest prompt plus output, in tokens."""
        return self._engine.info.max_model_len

    def flush_cache(self) -> int:
        """Forget every cached prefix, as after a change of what the cache was computed from; the pages given back."""
        return self._engine.flush_cache()

    def start_profile(
        self, output_dir: str | None = None, *, num_steps: int | None = None, with_stack: bool = False
    ) -> Profile:
        """Record a profile into `profile_dir`, as `/start_profile` does, until `stop_profile` or for `num_steps` steps.

        Raises `InvalidRequestError` when `profile_dir` isn't set, or one runs already.
        """
        return self._engine.start_profile(output_dir, num_steps=num_steps, with_stack=with_stack)

    def stop_profile(self) -> Profile:
        """End the profile and wait until it is written. Raises `InvalidRequestError` when none runs."""
        return self._engine.stop_profile()

    def close(self) -> None:
        """Stop the engine and give its memory back."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self.close()

    def _render(self, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
        return self._template.render([dict(message) for message in messages], **options)

    def _encode_rendered(self, text: str) -> list[int]:
        """A template writes its special tokens itself, so none are added."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _job(self, prompt: Prompt, params: SamplingParams) -> _Job:
        text = prompt if isinstance(prompt, str) else None
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise InvalidRequestError("the prompt holds no tokens", param="prompt")
        for token in ids:
            if type(token) is not int:
                raise InvalidRequestError(f"the prompt holds {token!r}, which is not a token id", param="prompt")
        check_ids(ids, self._engine.info.vocab_size, param="prompt")
        if len(ids) >= self.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {len(ids)} tokens and leaves no room to answer: the context is {self.max_model_len} "
                "tokens; shorten the prompt, or raise context_length",
                param="prompt",
            )
        return _Job(text, ids, params)

    def _requests(self, job: _Job) -> list[EngineRequest]:
        name = f"llm-{next(self._numbers)}"
        return engine_requests(
            name,
            job.ids,
            job.params,
            self._tokenizer,
            self._engine.info,
            priority=job.priority,
            cache_salt=job.cache_salt,
        )

    def _run(self, jobs: list[_Job], use_tqdm: bool) -> list[RequestOutput]:
        samples = [[_Sample(request) for request in self._requests(job)] for job in jobs]
        by_id = {sample.request.request_id: sample for group in samples for sample in group}
        with tqdm(total=len(by_id), desc="generate", unit="seq", disable=not use_tqdm, dynamic_ncols=True) as bar:
            num_tokens = 0
            for request_id, delta in self._deltas([sample.request for sample in by_id.values()]):
                by_id[request_id].deltas.append(delta)
                num_tokens += len(delta.token_ids)
                if delta.finish_reason is not None and bar.update():
                    bar.set_postfix_str(f"{num_tokens / bar.format_dict['elapsed']:.0f} tok/s")
        return [_output(job, group) for job, group in zip(jobs, samples, strict=True)]

    def _stream(self, job: _Job) -> Generator[OutputDelta]:
        for _, delta in self._deltas(self._requests(job)):
            yield delta

    def _deltas(self, requests: list[EngineRequest]) -> Generator[tuple[str, OutputDelta]]:
        """Run requests to their ends, yielding what comes of each; those still open when it is closed are aborted."""
        processors = {request.request_id: OutputProcessor(self._tokenizer, request) for request in requests}
        ended: dict[str, OutputDelta] = {}
        try:
            next_events = self._engine.submit(requests)
            while processors:
                for event in next_events():
                    if event.request_id in ended:
                        delta = _with_cached_tokens(ended[event.request_id], event)
                    else:
                        delta = processors[event.request_id].push(event)
                        if delta.abort:
                            # What only the engine knows of it comes with its own last event.
                            ended[event.request_id] = delta
                            self._engine.abort([event.request_id])
                            continue
                    if delta.finish_reason is FinishReason.ERROR:
                        raise RequestFailedError(delta.error or "the engine gave the request up")
                    if delta.finish_reason is not None:
                        del processors[event.request_id]
                    yield event.request_id, delta
        finally:
            if processors:
                self._engine.forget(processors)


@dataclasses.dataclass(frozen=True)
class _Job:
    """One prompt as it is run."""

    prompt: str | None
    ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None


@dataclasses.dataclass(frozen=True)
class _Sample:
    """One sequence of a prompt, and what has come of it."""

    request: EngineRequest
    deltas: list[OutputDelta] = dataclasses.field(default_factory=list)


def _output(job: _Job, samples: list[_Sample]) -> RequestOutput:
    outputs = [_completion(index, sample.deltas, job.params) for index, sample in enumerate(samples)]
    usages = [delta.usage for sample in samples for delta in sample.deltas if delta.usage is not None]
    return RequestOutput(
        prompt=job.prompt,
        prompt_token_ids=job.ids,
        outputs=outputs,
        usage=Usage(
            prompt_tokens=len(job.ids),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens=usages[0].cached_tokens,
        ),
        prompt_logprobs=next((d.prompt_logprobs for d in samples[0].deltas if d.prompt_logprobs is not None), None),
    )


def _completion(index: int, deltas: list[OutputDelta], params: SamplingParams) -> CompletionOutput:
    last = deltas[-1]
    assert last.finish_reason is not None
    return CompletionOutput(
        index=index,
        text="".join(delta.text for delta in deltas),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        logprobs=None if params.logprobs is None else [entry for delta in deltas for entry in delta.logprobs],
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )


def _with_cached_tokens(delta: OutputDelta, last: TokenEvent) -> OutputDelta:
    """The last delta of a sequence that a stop string ended, with what the engine's own last event adds to it."""
    if delta.usage is None or last.usage is None:
        return delta
    usage = msgspec.structs.replace(delta.usage, cached_tokens=last.usage.cached_tokens)
    return msgspec.structs.replace(delta, usage=usage)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as several: a list of numbers is one prompt of ids."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidRequestError(f"{len(params)} sampling_params for {count} prompts; give one, or one for each")
    return list(params)


def _priorities(priority: int | Sequence[int], count: int) -> list[int]:
    if isinstance(priority, int):
        return [priority] * count
    if len(priority) != count:
        raise InvalidRequestError(f"{len(priority)} priorities for {count} prompts; give one, or one for each")
    return list(priority)


def _chat_template(tokenizer: Tokenizer, file: str | None) -> ChatTemplate:
    if file is None:
        return ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    try:
        return ChatTemplate(Path(file).read_text(encoding="utf-8"), tokenizer.special_tokens)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template={file} can't be read: {error}") from None
