"""Tests run on the CPU unless somebody says otherwise: set before anything imports jax."""

import logging
import os
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.selection import FULL

pytest_plugins = ["tests.budgets", "tests.proved.plugin"]

os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Threads of XLA's that wait in Mosaic GPU's interpreter would leave none on a small machine to those they wait for.
os.environ.setdefault("NPROC", str(max(8, os.cpu_count() or 1)))

# `make test` draws the same examples each time: it fails for a change and not by chance. `make test-full` draws others.
# A busy machine is no fault: an example may take any time.
settings.register_profile("jaxserve", derandomize=not FULL, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("jaxserve")

# A shell starts what it runs in the background with Ctrl-C ignored, which would be inherited by all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _log_as_found() -> Iterator[None]:
    """Commands that run in this process set the log up for it; the next test reads the log of a library again."""
    logger = logging.getLogger("jaxserve")
    before = (logger.handlers[:], logger.level, logger.propagate)
    logger.handlers[:], logger.level, logger.propagate = [], logging.NOTSET, True
    yield
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.fixture
async def litellm(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """The module, without what it asks of the internet."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm
    from litellm.llms.custom_httpx.async_client_cleanup import close_litellm_async_clients

    yield litellm
    await close_litellm_async_clients()
