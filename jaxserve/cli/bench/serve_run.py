"""Runs a plan of `jaxserve bench serve`: connects to the server, creates the prompts, warms up, and runs the load."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence

from jaxserve import host
from jaxserve.bench.datasets.prompts import BenchConversation
from jaxserve.bench.datasets.request_lengths import check_context, request_lengths
from jaxserve.bench.datasets.vocabulary import Vocabulary
from jaxserve.bench.load.client import LoadClient
from jaxserve.bench.load.http_client import ConnectionPool
from jaxserve.bench.load.progress import show_progress
from jaxserve.bench.load.records import RequestRecord
from jaxserve.bench.load.run_load import LoadResult, LoadRun, count_answer_tokens
from jaxserve.bench.load.target_server import (
    ServedModel,
    find_context,
    first_served_model,
    load_named_tokenizer,
    send_request,
    tokenizer_name,
    wait_for_server,
)
from jaxserve.bench.results.prompt_parts import PromptParts, prompt_parts
from jaxserve.cli.bench.serve_plan import BenchPlan
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.observability.acceptance import Acceptance, read_acceptance

_RETRY_SECONDS = 0.25
_PROFILE_SECONDS = 600.0
_METRICS_SECONDS = 5.0
# Fields of --extra-body that change the length of requests, so that the dataset doesn't tell it.
_LENGTH_FIELDS = {"prompt", "messages", "max_tokens", "max_completion_tokens", "truncate_prompt_tokens"}


@dataclasses.dataclass(frozen=True)
class ServeResult:
    """The result of a run, with the names of the model and its tokenizer, the acceptance of the server's drafts during
    the run, or None if it reports none, and the parts of the prompts of chats, if they are known."""

    run: LoadResult
    model: str
    tokenizer: str
    acceptance: Acceptance | None
    parts: PromptParts | None


def run_plan(plan: BenchPlan) -> ServeResult | None:
    """Run the plan; return None if it was interrupted before the measured part."""
    host.raise_open_file_limit()
    with asyncio.Runner(loop_factory=host.new_event_loop) as runner:
        return runner.run(_measure(plan))


async def _measure(plan: BenchPlan) -> ServeResult | None:
    arguments, dataset = plan.arguments, plan.dataset
    pool = plan.server.pool(keep_alive=not arguments.no_keep_alive, insecure=arguments.insecure)
    patience = arguments.ready_check_timeout_sec
    with contextlib.closing(pool):
        await wait_for_server(plan.server, pool, patience=patience)
        given = arguments.model or arguments.served_model_name
        model = ServedModel(given) if given else await first_served_model(plan.server, pool, plan.headers)
        tokenizer = arguments.tokenizer or tokenizer_name(arguments.model or model.id, model.root)
        name = arguments.served_model_name or model.id
        context = await find_context(plan.server, pool, plan.headers, name) if given else model.context
        vocabulary = dataset.vocabulary(load_named_tokenizer(tokenizer) if dataset.needs_tokenizer else None)
        conversations = dataset.make(vocabulary)
        if (context or dataset.chat) and _has_unknown_lengths(conversations) and not vocabulary.can_count:
            with contextlib.suppress(ConfigError):
                vocabulary = dataset.vocabulary(load_named_tokenizer(tokenizer))
        lengths = [request_lengths(conversation, vocabulary) for conversation in conversations]
        if context and not _LENGTH_FIELDS & arguments.extra_body.keys():
            check_context(conversations, lengths, context, chat=dataset.chat)
        client = LoadClient(pool, plan.writer(name), timeout=arguments.request_timeout, stall=arguments.stall_timeout)
        if patience:
            await _wait_until_ready(client, dataset.make(vocabulary, warmups=1), patience)
        with _stop_signal() as stop:
            if arguments.num_warmups and not await _warm_up(plan, client, vocabulary, stop):
                return None
            load = LoadRun(
                client, conversations, plan.start_times(conversations), max_concurrency=arguments.max_concurrency,
                id_prefix=arguments.request_id_prefix, seed=arguments.seed if arguments.per_request_seed else None,
            )  # fmt: skip
            before = await _acceptance(plan, pool)
            async with _profile(plan, pool) if arguments.profile else contextlib.nullcontext():
                run = await _run(load, stop, quiet=arguments.disable_tqdm)
            after = await _acceptance(plan, pool)
    if any(record.counted_by == "chunks" and record.token_times for record in run.records):
        with contextlib.suppress(ConfigError):
            count_answer_tokens(run.records, Vocabulary(load_named_tokenizer(tokenizer)).count_answer)
    acceptance = after.since(before) if before is not None and after is not None else None
    parts = prompt_parts(run.records, lengths, vocabulary.count_answer) if dataset.chat else None
    return ServeResult(run, name, tokenizer, acceptance, parts)


def _has_unknown_lengths(conversations: Sequence[BenchConversation]) -> bool:
    return any(prompt.prompt_tokens is None for conversation in conversations for prompt in conversation.prompts)


async def _warm_up(plan: BenchPlan, client: LoadClient, vocabulary: Vocabulary, stop: asyncio.Event) -> bool:
    """Send the warm-up requests; return False if interrupted. Raises `JaxserveError` if all of them failed."""
    arguments = plan.arguments
    made = plan.dataset.make(vocabulary, warmups=arguments.num_warmups)
    load = LoadRun(client, made, [0.0] * len(made), max_concurrency=arguments.max_concurrency, id_prefix="warmup-")
    run = await _run(load, stop, quiet=True)
    if not run.interrupted and all(record.status == "failed" for record in run.records):
        raise JaxserveError(f"all warm-up requests failed: {run.records[0].error}")
    return not run.interrupted


async def _run(load: LoadRun, stop: asyncio.Event, *, quiet: bool) -> LoadResult:
    progress = asyncio.create_task(show_progress(load, disable=quiet))
    try:
        return await load.run(stop)
    finally:
        progress.cancel()
        await asyncio.gather(progress, return_exceptions=True)


async def _wait_until_ready(client: LoadClient, conversations: list[BenchConversation], patience: float) -> None:
    """Repeat one small request until it succeeds. Raises `JaxserveError` after `patience` seconds."""
    prompt = dataclasses.replace(conversations[0].prompts[0], output_tokens=1)
    deadline = time.perf_counter() + patience
    while True:
        record = RequestRecord("ready-check", 1, None)
        await client.send(record, prompt, [], None)
        if record.status == "ok":
            return
        if time.perf_counter() >= deadline:
            raise JaxserveError(f"the server was not ready after {patience:g} s: {record.error}")
        await asyncio.sleep(_RETRY_SECONDS)


@contextlib.asynccontextmanager
async def _profile(plan: BenchPlan, pool: ConnectionPool) -> AsyncIterator[None]:
    """Profile the server during the run. Raises `JaxserveError` if the profile can't start; an error at its end is only
    printed, so that the measurement isn't lost."""
    await _post(plan, pool, "/start_profile")
    yield
    try:
        await _post(plan, pool, "/stop_profile")
    except JaxserveError as error:
        print(error, file=sys.stderr)


async def _acceptance(plan: BenchPlan, pool: ConnectionPool) -> Acceptance | None:
    """Return the server's counts of drafts so far, or None if it doesn't speculate or has no metrics."""
    try:
        status, body = await send_request(plan.server, pool, plan.headers, "/metrics", seconds=_METRICS_SECONDS)
        return read_acceptance(body.decode()) if status == 200 else None
    except (JaxserveError, ValueError):
        return None


async def _post(plan: BenchPlan, pool: ConnectionPool, route: str) -> None:
    status, body = await send_request(plan.server, pool, plan.headers, route, "POST", seconds=_PROFILE_SECONDS)
    if status != 200:
        shown = body[:200].decode(errors="replace")
        raise JaxserveError(f"--profile: POST {route} returned HTTP {status}: {shown}")


@contextlib.contextmanager
def _stop_signal() -> Iterator[asyncio.Event]:
    """Yield an event that the first Ctrl-C or SIGTERM sets; a second signal ends the program."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    handled: list[signal.Signals] = []

    def cut() -> None:
        stop.set()
        for number in handled:
            loop.remove_signal_handler(number)

    # Windows' loop supports no handlers: there Ctrl-C ends the program at once.
    with contextlib.suppress(NotImplementedError):
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, cut)
            handled.append(number)
    try:
        yield stop
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
