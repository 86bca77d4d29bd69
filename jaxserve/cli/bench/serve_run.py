"""Carries out a plan of `jaxserve bench serve`: finds the server, makes the prompts, warms up, runs the load."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator

from jaxserve import host
from jaxserve.bench.datasets.prompts import Conversation
from jaxserve.bench.datasets.vocabulary import Vocabulary
from jaxserve.bench.load.client import Client
from jaxserve.bench.load.http_client import Pool
from jaxserve.bench.load.progress import show_progress
from jaxserve.bench.load.records import Record
from jaxserve.bench.load.run_load import Load, Run, count_with
from jaxserve.bench.load.target_server import Model, call, find_server, served_model, tokenizer_name, tokenizer_named
from jaxserve.cli.bench.serve_plan import Plan
from jaxserve.errors import ConfigError, JaxserveError

_BETWEEN_TRIES = 0.25
_PROFILE_SECONDS = 600.0


@dataclasses.dataclass(frozen=True)
class Measured:
    """A run and what was found out on the way."""

    run: Run
    model: str
    tokenizer: str


def measure(plan: Plan) -> Measured | None:
    """Run it; None where it was cut before the measured part began."""
    host.allow_open_files()
    with asyncio.Runner(loop_factory=host.new_event_loop) as runner:
        return runner.run(_measure(plan))


async def _measure(plan: Plan) -> Measured | None:
    """The run; None where it was cut before it began."""
    arguments, dataset = plan.arguments, plan.dataset
    pool = plan.server.pool(keep_alive=not arguments.no_keep_alive, insecure=arguments.insecure)
    patience = arguments.ready_check_timeout_sec
    with contextlib.closing(pool):
        await find_server(plan.server, pool, patience=patience)
        given = arguments.model or arguments.served_model_name
        model = Model(given) if given else await served_model(plan.server, pool, plan.headers)
        tokenizer = arguments.tokenizer or tokenizer_name(arguments.model or model.id, model.root)
        vocabulary = dataset.vocabulary(tokenizer_named(tokenizer) if dataset.needs_tokenizer else None)
        conversations = dataset.make(vocabulary)
        name = arguments.served_model_name or model.id
        client = Client(pool, plan.writer(name), timeout=arguments.request_timeout, stall=arguments.stall_timeout)
        if patience:
            await _wait_until_ready(client, dataset.make(vocabulary, warmups=1), patience)
        with _stop_signal() as stop:
            if arguments.num_warmups and not await _warm_up(plan, client, vocabulary, stop):
                return None
            load = Load(
                client, conversations, plan.times(conversations), max_concurrency=arguments.max_concurrency,
                id_prefix=arguments.request_id_prefix, seed=arguments.seed if arguments.per_request_seed else None,
            )  # fmt: skip
            async with _profile(plan, pool) if arguments.profile else contextlib.nullcontext():
                run = await _run(load, stop, quiet=arguments.disable_tqdm)
    if any(record.counted_by == "chunks" and record.token_times for record in run.records):
        with contextlib.suppress(ConfigError):
            count_with(run.records, Vocabulary(tokenizer_named(tokenizer)).count_answer)
    return Measured(run, name, tokenizer)


async def _warm_up(plan: Plan, client: Client, vocabulary: Vocabulary, stop: asyncio.Event) -> bool:
    """Whether it ran to its end. Raises `JaxserveError` where not one request was answered well."""
    arguments = plan.arguments
    made = plan.dataset.make(vocabulary, warmups=arguments.num_warmups)
    load = Load(client, made, [0.0] * len(made), max_concurrency=arguments.max_concurrency, id_prefix="warmup-")
    run = await _run(load, stop, quiet=True)
    if not run.interrupted and all(record.status == "failed" for record in run.records):
        raise JaxserveError(f"no warm-up request was answered well: {run.records[0].error}")
    return not run.interrupted


async def _run(load: Load, stop: asyncio.Event, *, quiet: bool) -> Run:
    progress = asyncio.create_task(show_progress(load, disable=quiet))
    try:
        return await load.run(stop)
    finally:
        progress.cancel()
        await asyncio.gather(progress, return_exceptions=True)


async def _wait_until_ready(client: Client, conversations: list[Conversation], patience: float) -> None:
    """Asks one small request until it is answered well. Raises `JaxserveError`."""
    prompt = dataclasses.replace(conversations[0].prompts[0], output_tokens=1)
    deadline = time.perf_counter() + patience
    while True:
        record = Record("ready-check", 1, None)
        await client.ask(record, prompt, [], None)
        if record.status == "ok":
            return
        if time.perf_counter() >= deadline:
            raise JaxserveError(f"the server was not ready after {patience:g} s: {record.error}")
        await asyncio.sleep(_BETWEEN_TRIES)


@contextlib.asynccontextmanager
async def _profile(plan: Plan, pool: Pool) -> AsyncIterator[None]:
    """The server's profile of the run. Raises `JaxserveError` where it doesn't begin; that it can't be written costs no
    measurement."""
    await _post(plan, pool, "/start_profile")
    yield
    try:
        await _post(plan, pool, "/stop_profile")
    except JaxserveError as error:
        print(error, file=sys.stderr)


async def _post(plan: Plan, pool: Pool, route: str) -> None:
    status, body = await call(plan.server, pool, plan.headers, route, "POST", seconds=_PROFILE_SECONDS)
    if status != 200:
        shown = body[:200].decode(errors="replace")
        raise JaxserveError(f"--profile: POST {route} was answered HTTP {status}: {shown}")


@contextlib.contextmanager
def _stop_signal() -> Iterator[asyncio.Event]:
    """Set by the first Ctrl-C or SIGTERM; a second one ends the program."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    handled: list[signal.Signals] = []

    def cut() -> None:
        stop.set()
        for number in handled:
            loop.remove_signal_handler(number)

    # Windows' loop takes none: there Ctrl-C ends the program at once.
    with contextlib.suppress(NotImplementedError):
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, cut)
            handled.append(number)
    try:
        yield stop
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
