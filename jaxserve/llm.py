"""Offline generation: `LLM` runs the engine in the caller's process and turns prompts into texts.

Owns tokenizing, the chat template, grouping the samples of a prompt, and the progress bar. The engine schedules the
requests; `text/` detokenizes and finds stop strings.
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
from jaxserve.api_types import (
    EngineRequest,
    FinishReason,
    ProfileInfo,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
    Usage,
)
from jaxserve.config.data_parallel import require_single_process
from jaxserve.config.load import from_arguments
from jaxserve.config.schema import DEFAULT_MODEL, SHARED_SERVER_SETTINGS, ServerConfig
from jaxserve.engine.client import InProcessEngine, SharedEngine, check_not_forked, is_forked
from jaxserve.errors import ConfigError, InvalidRequestError, RequestFailedError
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.grammars.checking import GrammarChecker
from jaxserve.text.output import OutputDelta, OutputProcessor, OutputSoFar
from jaxserve.text.prompt_forms import (
    Message,
    Prompt,
    read_conversation,
    read_conversations,
    read_prompt,
    read_prompts,
)
from jaxserve.text.requests import check_ids, sample_requests
from jaxserve.text.tokenizers.chat_template_files import choose_chat_template
from jaxserve.text.tokenizers.escaped_marks import EscapedMarks
from jaxserve.text.tokenizers.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One sample of a prompt. `logprobs` has one entry per token if `SamplingParams.logprobs` is set, else is None."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason
    stop_reason: int | str | None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """The outputs of one prompt. `prompt` is None if it was given as ids; `usage` counts all samples."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    usage: Usage
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class LLM:
    """A loaded model that generates text. Raises `ConfigError`, `ModelNotFoundError`.

    Settings are those of `jaxserve serve`, by their own names or by those of other engines:
    `LLM("folder", max_running_requests=8)`. Use it as a context manager, or call `close`, to free its memory. Several
    threads may use it at once; their requests run in one batch. A process that was forked from this one, as by
    `multiprocessing`'s "fork", can't use it: methods raise `ForkedProcessError`, and `close` does nothing there.
    """

    def __init__(self, model: str | Path = DEFAULT_MODEL, **settings: Any) -> None:
        loaded = from_arguments([("model", str(model)), *settings.items()])
        for value in loaded.values:
            name = value.setting.name
            if value.setting.owner is ServerConfig and value.source != "default" and name not in SHARED_SERVER_SETTINGS:
                raise ConfigError(f"{name} is a setting of `jaxserve serve`; LLM has no server")
        for note in loaded.notes:
            logger.warning(note)
        config = require_single_process(loaded.engine, "LLM")
        tokenizer = load_tokenizer(model_source.resolve(config.model))
        self._template = ChatTemplate(
            choose_chat_template(loaded.server.chat_template, tokenizer.chat_templates), tokenizer.special_tokens
        )
        self._tokenizer = tokenizer.with_turn_end(self._template.turn_end())
        self._marks = EscapedMarks(self._tokenizer) if loaded.server.escape_marks else None
        self._grammars = GrammarChecker(self._tokenizer)
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
        """Continue prompts, all in one batch; return the outputs in the prompts' order.

        A prompt is a text, a list of ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`.
        With `schedule_policy="priority"`, prompts of higher `priority` run first. Only prompts with the same
        `cache_salt` share cached prefixes. Raises `InvalidRequestError` before anything runs, and `RequestFailedError`
        if the engine can't finish a request.
        """
        check_not_forked()
        contents = read_prompts(prompts)
        params = _per_prompt("sampling_params", sampling_params, len(contents))
        priorities = _per_prompt("priorities", priority, len(contents))
        tasks = [self._prepare(*each, cache_salt) for each in zip(contents, params, priorities, strict=True)]
        return self._run(tasks, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, using the model's chat template. Raises as `generate` does.

        The template shows `tools`, in OpenAI's form; calls are in the text, as the model writes them.
        """
        check_not_forked()
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            **(chat_template_kwargs or {}),
        }
        texts = [self._render(conversation, options) for conversation in read_conversations(messages)]
        params = _per_prompt("sampling_params", sampling_params, len(texts))
        tasks = [
            dataclasses.replace(self._prepare(self._encode_rendered(text), each), prompt=self._shown(text))
            for text, each in zip(texts, params, strict=True)
        ]
        return self._run(tasks, use_tqdm)

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Return the prompt's ids for a conversation; `options` are passed to the chat template."""
        check_not_forked()
        return self._encode_rendered(self._render(read_conversation(messages), options))

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Generator[OutputDelta]:
        """Continue one prompt; yield each piece of text as it is generated. Closing the iterator aborts the request."""
        check_not_forked()
        task = self._prepare(read_prompt(prompt), sampling_params)
        if task.params.n != 1:
            raise InvalidRequestError(f"stream returns one sample: n must be 1, got {task.params.n}", param="n")
        return self._stream(task)

    @property
    def max_model_len(self) -> int:
        """The maximum length of a prompt with its output, in tokens."""
        return self._engine.info.max_model_len

    def flush_cache(self) -> int:
        """Drop every cached prefix, for example after the weights have changed; return the number of freed pages."""
        return self._engine.flush_cache()

    def start_profile(
        self, output_dir: str | None = None, *, num_steps: int | None = None, with_stack: bool = False
    ) -> ProfileInfo:
        """Record a profile into `profile_dir`, as `/start_profile` does, until `stop_profile` or for `num_steps` steps.

        Raises `InvalidRequestError` if `profile_dir` isn't set or a profile is being recorded already.
        """
        return self._engine.start_profile(output_dir, num_steps=num_steps, with_stack=with_stack)

    def stop_profile(self) -> ProfileInfo:
        """End the profile and wait until it is written. Raises `InvalidRequestError` if none is being recorded."""
        return self._engine.stop_profile()

    def close(self) -> None:
        """Stop the engine and free its memory."""
        if not is_forked():
            self._engine.close()
            self._grammars.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self.close()

    def _render(self, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
        if self._marks is not None:
            messages = self._marks.escape(list(messages))
            options = {**options, "documents": self._marks.escape(options.get("documents"))}
        return self._template.render(messages, **options)

    def _shown(self, rendered: str) -> str:
        return rendered if self._marks is None else self._marks.restore(rendered)

    def _encode_rendered(self, text: str) -> list[int]:
        """Return the ids of a rendered template, which writes its special tokens itself: none are added."""
        return (self._marks or self._tokenizer).encode_batch([text], add_special_tokens=False)[0]

    def _prepare(
        self, prompt: str | list[int], params: SamplingParams | None, priority: int = 0, cache_salt: str | None = None
    ) -> _PromptTask:
        text, ids = (prompt, self._tokenizer.encode(prompt)) if isinstance(prompt, str) else (None, prompt)
        if not ids:
            raise InvalidRequestError("the prompt holds no tokens", param="prompt")
        check_ids(ids, self._engine.info.vocab_size, param="prompt")
        if len(ids) >= self.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {len(ids)} tokens and leaves no room to answer: the context is {self.max_model_len} "
                "tokens; shorten the prompt, or raise context_length",
                param="prompt",
            )
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params must be a SamplingParams, got a {type(params).__name__}", param="sampling_params"
            )
        grammar = "" if params.structured_outputs is None else self._grammars.grammar(params.structured_outputs)
        return _PromptTask(text, ids, params, priority, cache_salt, grammar)

    def _requests(self, task: _PromptTask) -> list[EngineRequest]:
        name = f"llm-{next(self._numbers)}"
        return sample_requests(
            name,
            task.ids,
            task.params,
            self._tokenizer,
            self._engine.info,
            priority=task.priority,
            cache_salt=task.cache_salt,
            grammar=task.grammar,
        )

    def _run(self, tasks: list[_PromptTask], use_tqdm: bool) -> list[RequestOutput]:
        requests = [self._requests(task) for task in tasks]
        outputs = {request.request_id: OutputSoFar() for group in requests for request in group}
        with tqdm(total=len(outputs), desc="generate", unit="seq", disable=not use_tqdm, dynamic_ncols=True) as bar:
            num_tokens = 0
            for request_id, delta in self._deltas([request for group in requests for request in group]):
                outputs[request_id].add(delta)
                num_tokens += len(delta.token_ids)
                if delta.finish_reason is not None and bar.update():
                    bar.set_postfix_str(f"{num_tokens / bar.format_dict['elapsed']:.0f} tok/s")
        return [
            _build_output(task, [outputs[request.request_id].delta for request in group])
            for task, group in zip(tasks, requests, strict=True)
        ]

    def _stream(self, task: _PromptTask) -> Generator[OutputDelta]:
        for _, delta in self._deltas(self._requests(task)):
            yield delta

    def _deltas(self, requests: list[EngineRequest]) -> Generator[tuple[str, OutputDelta]]:
        """Run requests and yield (request id, delta) pairs until all have ended.

        Closing the generator aborts the requests that are still running.
        """
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
                            # The engine's last event of this request still brings the cached tokens
                            ended[event.request_id] = delta
                            self._engine.abort([event.request_id])
                            continue
                    if delta.finish_reason is FinishReason.ERROR:
                        raise RequestFailedError(delta.error or "the engine could not finish the request")
                    if delta.finish_reason is not None:
                        del processors[event.request_id]
                    yield event.request_id, delta
        finally:
            if processors:
                self._engine.discard(processors)


@dataclasses.dataclass(frozen=True)
class _PromptTask:
    """One prompt, tokenized and checked, with its parameters."""

    prompt: str | None
    ids: list[int]
    params: SamplingParams
    priority: int
    cache_salt: str | None
    grammar: str


def _build_output(task: _PromptTask, samples: Sequence[OutputDelta]) -> RequestOutput:
    usages = [sample.usage for sample in samples if sample.usage is not None]
    return RequestOutput(
        prompt=task.prompt,
        prompt_token_ids=task.ids,
        outputs=[_build_completion(index, sample, task.params) for index, sample in enumerate(samples)],
        usage=Usage(
            prompt_tokens=len(task.ids),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens=usages[0].cached_tokens,
        ),
        prompt_logprobs=samples[0].prompt_logprobs,
    )


def _build_completion(index: int, sample: OutputDelta, params: SamplingParams) -> CompletionOutput:
    assert sample.finish_reason is not None
    return CompletionOutput(
        index=index,
        text=sample.text,
        token_ids=sample.token_ids,
        logprobs=None if params.logprobs is None else sample.logprobs,
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
    )


def _with_cached_tokens(delta: OutputDelta, last: TokenEvent) -> OutputDelta:
    """Return the delta that a stop string ended, with the cached tokens of the engine's last event."""
    if delta.usage is None or last.usage is None:
        return delta
    usage = msgspec.structs.replace(delta.usage, cached_tokens=last.usage.cached_tokens)
    return msgspec.structs.replace(delta, usage=usage)


def _per_prompt[T](name: str, value: T | Sequence[T], count: int) -> list[T]:
    """Return one value for each of `count` prompts, from one for all or one for each."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise InvalidRequestError(f"{len(value)} {name} for {count} prompts; give one, or one for each")
    return list(value)
