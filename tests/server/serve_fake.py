"""A whole server process with a fake engine, for `test_lifecycle.py`: `python -m tests.server.serve_fake SCENARIO`.

SIGUSR1 ends the fake engine as a crash would.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys

from jaxserve.config.schema import EngineConfig
from jaxserve.config.server_schema import ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.observability import log
from jaxserve.server.loading import EngineSource
from jaxserve.server.serve import serve
from jaxserve.server.server_state import LoadedModel
from jaxserve.text.answers.formats import choose_formats
from jaxserve.text.grammars.checking import GrammarChecker
from tests.server.fake_engine import FakeEngine
from tests.server.tiny import TEMPLATE, VOCAB_SIZE, TinyTemplate, tiny_tokenizer


async def load(engine_config: EngineConfig, server_config: ServerConfig, source: EngineSource) -> LoadedModel:
    """Load the fake engine. `starting` never gets ready, `broken` fails, `holding` makes no step until SIGUSR2."""
    if scenario == "starting":
        await asyncio.get_running_loop().create_future()
    if scenario == "broken":
        raise ConfigError("model_type 'zebra' is not supported")
    tokenizer = tiny_tokenizer()
    engine = FakeEngine(VOCAB_SIZE, max_model_len=10**9, rule=lambda _: itertools.repeat(97))
    if scenario == "holding":
        engine.hold()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, engine.die, "engine process ended with code -9")
    loop.add_signal_handler(signal.SIGUSR2, engine.release)
    return LoadedModel(
        engine, tokenizer, TinyTemplate(tokenizer), TEMPLATE, GrammarChecker(tokenizer), choose_formats(TEMPLATE)
    )


scenario, drain_timeout = sys.argv[1], float(sys.argv[2])
log.setup("info")
sys.exit(serve(EngineConfig(), ServerConfig(port=0, drain_timeout=drain_timeout), load=load))
