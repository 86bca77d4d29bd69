"""Loads what an API process needs before it is ready: the tokenizer, the chat template and the engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol, cast

from jaxserve.config.schema import EngineConfig
from jaxserve.config.server_schema import ServerConfig
from jaxserve.server.server_state import LoadedModel

if TYPE_CHECKING:
    from jaxserve.engine.client import Engine

logger = logging.getLogger("jaxserve.server")


class EngineSource(Protocol):
    """Where an API process gets its engine from."""

    async def fetch_model(self) -> None:
        """Return when the files of the model are on this machine. Raises as the function `fetch_model` does."""
        ...

    async def start_engine(self) -> Engine:
        """Start an engine or connect to one. Raises the errors of `launch_engine`."""
        ...


async def fetch_model(config: EngineConfig) -> None:
    """Download the files of a configuration that aren't on this machine. Raises as `fetch_files` does."""
    from jaxserve.config.model_files import fetch_files

    await run_in_thread(lambda: fetch_files(config))


type ModelLoader = Callable[[EngineConfig, ServerConfig, EngineSource], Awaitable[LoadedModel]]


async def load_model(engine_config: EngineConfig, server_config: ServerConfig, engine: EngineSource) -> LoadedModel:
    """Start the engine and meanwhile read the tokenizer. If either raises, end both and raise its error."""
    from jaxserve.config.model_files import model_files
    from jaxserve.config.sampling_defaults import SamplingDefaults, read_sampling_defaults
    from jaxserve.config.served_checkpoint import read_served_checkpoint
    from jaxserve.text.answers.formats import choose_formats
    from jaxserve.text.chat_template import ChatTemplate
    from jaxserve.text.grammars.checking import GrammarChecker
    from jaxserve.text.template_process import TemplateProcess
    from jaxserve.text.tokenizers.chat_template_files import choose_chat_template
    from jaxserve.text.tokenizers.served_tokenizer import load_served_tokenizer

    await engine.fetch_model()
    loading_tokenizer = run_in_thread(lambda: load_served_tokenizer(engine_config))
    launching = asyncio.ensure_future(engine.start_engine())
    chat_template = None
    try:
        tokenizer = await loading_tokenizer
        template = choose_chat_template(server_config.chat_template, tokenizer.chat_templates)
        ChatTemplate(template, tokenizer.special_tokens)  # raises if the template is not valid
        formats = choose_formats(
            template or "", calls=server_config.tool_call_parser, reasoning=server_config.reasoning_parser
        )
        chat_template = TemplateProcess(template, tokenizer.special_tokens, formats.calls.name)
        if template is not None:
            await chat_template.start()
            tokenizer = tokenizer.with_turn_end(await chat_template.turn_end())
        source = model_files(engine_config)
        task = read_served_checkpoint(engine_config, source).task
        defaults = SamplingDefaults()
        if task.generates:
            reasoning = "none" if formats.reasoning is None else formats.reasoning.name
            logger.info("calls of tools are read as %s, reasoning as %s", formats.calls.name, reasoning)
            choice, override = server_config.generation_config, server_config.override_generation_config
            defaults = read_sampling_defaults(choice, override, source)
        grammars = GrammarChecker(tokenizer)
        loaded = LoadedModel(
            await launching,
            tokenizer,
            chat_template,
            template or "",
            grammars,
            formats,
            task,
            sampling_defaults=defaults,
        )
        if server_config.escape_marks:
            await run_in_thread(lambda: loaded.escaped_marks)
        return loaded
    except BaseException:
        if chat_template is not None:
            await chat_template.close()
        launching.cancel()
        with contextlib.suppress(BaseException):
            await (await launching).shutdown()
        raise


def run_in_thread[T](work: Callable[[], T]) -> asyncio.Future[T]:
    """Run `work` in a daemon thread, which does not delay the exit: a signal must be able to end a download."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast(T, result))

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits for the result
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="load", daemon=True).start()
    return future
