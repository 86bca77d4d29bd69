"""`LLM` runs the engine in the caller's process and turns prompts into texts, or into what `pooling` makes of them.

Owns tokenizing, the chat template, grouping the samples of a prompt, and the progress bar. The engine schedules the
requests; `text/` detokenizes and finds stop strings.
"""

from __future__ import annotations

import dataclasses
import logging
import types
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.api_types import (
    ProfileInfo,
    SamplingParams,
)
from jaxserve.config.data_parallel import require_single_process
from jaxserve.config.load import from_arguments
from jaxserve.config.model_files import model_files
from jaxserve.config.sampling_defaults import SamplingDefaults, read_sampling_defaults
from jaxserve.config.schema import DEFAULT_MODEL
from jaxserve.config.served_checkpoint import read_served_checkpoint
from jaxserve.config.server_schema import SHARED_SERVER_SETTINGS, ServerConfig
from jaxserve.engine.client import InProcessEngine, SharedEngine, check_not_forked, is_forked
from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.llm.generation import OfflineGeneration
from jaxserve.llm.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    PromptTask,
    RequestOutput,
    ScoringRequestOutput,
)
from jaxserve.llm.pooling import OfflinePooling, PooledMethod, check_method
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.grammars.checking import GrammarChecker
from jaxserve.text.output import OutputDelta
from jaxserve.text.prompt_forms import (
    Message,
    Prompt,
    read_conversation,
    read_conversations,
    read_prompt,
    read_prompts,
)
from jaxserve.text.requests import check_ids
from jaxserve.text.tokenizers.chat_template_files import choose_chat_template
from jaxserve.text.tokenizers.escaped_marks import EscapedMarks
from jaxserve.text.tokenizers.served_tokenizer import load_served_tokenizer

logger = logging.getLogger(__name__)


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
        source = model_files(config)
        self._task = read_served_checkpoint(config, source).task
        tokenizer = load_served_tokenizer(config)
        template = choose_chat_template(loaded.server.chat_template, tokenizer.chat_templates)
        self._template = ChatTemplate(template, tokenizer.special_tokens)
        self._tokenizer = tokenizer.with_turn_end(self._template.turn_end())
        self._marks = EscapedMarks(self._tokenizer) if loaded.server.escape_marks else None
        self._grammars = GrammarChecker(self._tokenizer)
        self.sampling_defaults = SamplingDefaults()
        if self._task.generates:
            choice, override = loaded.server.generation_config, loaded.server.override_generation_config
            self.sampling_defaults = read_sampling_defaults(choice, override, source)
        self._engine = SharedEngine(InProcessEngine.start(config))
        self._generation = OfflineGeneration(self._engine, self._tokenizer)
        self._pooling = None
        if (pooled := self._task.pooled) is not None:
            forms = self._template, template or "", loaded.server.chat_template
            self._pooling = OfflinePooling(self._engine, self._tokenizer, pooled, *forms)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of prompts that have none: those of the model's generation_config.json."""
        return SamplingParams(**self.sampling_defaults.fields)

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
        return self._generation.run(tasks, use_tqdm)

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
        self._require_generating()
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
        return self._generation.run(tasks, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        normalize: bool | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt, in `outputs.embedding`.

        Texts get one of the model's prompts in front, which `prompt_name` chooses ("" for none). Longer ones are
        truncated to `truncate_prompt_tokens`, or with -1 to what the model takes; by default they raise. Raises as
        `generate` does.
        """
        return self._pooled("embed").embed(
            prompts,
            dimensions,
            normalize,
            prompt_name=prompt_name,
            truncate_prompt_tokens=truncate_prompt_tokens,
            use_tqdm=use_tqdm,
        )

    def score(
        self,
        a: str | Sequence[str],
        b: str | Sequence[str],
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """Return how well each text of `b` fits its one of `a`, or the only one, in `outputs.score`: what a reranker
        says, or the similarity of two embeddings."""
        return self._pooled("score").score(
            a, b, instruction=instruction, truncate_prompt_tokens=truncate_prompt_tokens, use_tqdm=use_tqdm
        )

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_activation: bool = True,
        use_tqdm: bool = True,
    ) -> list[ClassificationRequestOutput]:
        """Return the values of all labels of each prompt, in `outputs.probs`."""
        return self._pooled("classify").classify(
            prompts, use_activation, truncate_prompt_tokens=truncate_prompt_tokens, use_tqdm=use_tqdm
        )

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return what a reward model says of each prompt, in `outputs.data`."""
        return self._pooled("reward").encode(prompts, truncate_prompt_tokens=truncate_prompt_tokens, use_tqdm=use_tqdm)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the numbers that the model pools of each prompt, or of each of its tokens, in `outputs.data`."""
        return self._pooled("encode").encode(prompts, truncate_prompt_tokens=truncate_prompt_tokens, use_tqdm=use_tqdm)

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
        return self._generation.stream(task)

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

    def _pooled(self, method: PooledMethod) -> OfflinePooling:
        check_not_forked()
        check_method(self._task, method)
        assert self._pooling is not None
        return self._pooling

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

    def _require_generating(self) -> None:
        if not self._task.generates:
            raise InvalidRequestError(
                "this model generates no text: use embed, score, classify, reward or encode, or load it with "
                'runner="generate" if it has a head for tokens'
            )

    def _prepare(
        self, prompt: str | list[int], params: SamplingParams | None, priority: int = 0, cache_salt: str | None = None
    ) -> PromptTask:
        self._require_generating()
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
        params = self.get_default_sampling_params() if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params must be a SamplingParams, got a {type(params).__name__}", param="sampling_params"
            )
        grammar = "" if params.structured_outputs is None else self._grammars.grammar(params.structured_outputs)
        return PromptTask(text, ids, params, priority, cache_salt, grammar)


def _per_prompt[T](name: str, value: T | Sequence[T], count: int) -> list[T]:
    """Return one value for each of `count` prompts, from one for all or one for each."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise InvalidRequestError(f"{len(value)} {name} for {count} prompts; give one, or one for each")
    return list(value)
