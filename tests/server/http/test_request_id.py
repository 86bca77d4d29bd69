"""The line of each request in the log."""

from __future__ import annotations

import logging

import pytest

from tests.server.conftest import over_asgi

PATHS = ["/version", "/v1/models", "/v1/models/tiny", "/v1x", "/health", "/metrics", "/nothing%0A2026 ERROR forged"]


@pytest.fixture
def jaxserve_level() -> object:
    """Sets the level of all of jaxserve's lines, as `log_level` does."""
    logger = logging.getLogger("jaxserve")
    before = logger.level
    yield logger.setLevel
    logger.setLevel(before)


async def lines(caplog: pytest.LogCaptureFixture, **settings: object) -> dict[str, str]:
    """The severities of the paths that have lines."""
    async with over_asgi(**settings) as server:
        for path in PATHS:
            await server.http.get(path)
    found = [record for record in caplog.records if record.name == "jaxserve.access"]
    return {record.getMessage().split()[1]: record.levelname for record in found}


@pytest.mark.parametrize(
    ("log_level", "log_level_http", "severity"),
    [
        ("INFO", None, None),
        ("DEBUG", None, "DEBUG"),
        ("INFO", "info", "INFO"),
        ("INFO", "debug", "INFO"),
        ("ERROR", "info", "INFO"),
        ("DEBUG", "warning", None),
        ("DEBUG", "error", None),
    ],
)
async def test_the_levels_decide_whether_a_request_has_a_line(
    caplog: pytest.LogCaptureFixture, jaxserve_level, log_level: str, log_level_http: str | None, severity: str | None
):
    jaxserve_level(log_level)
    expected = ["/version", "/v1/models", "/v1/models/tiny", "/v1x", "/nothing%0A2026%20ERROR%20forged"]
    found = await lines(caplog, log_level_http=log_level_http)
    assert found == ({} if severity is None else dict.fromkeys(expected, severity))


@pytest.mark.parametrize(
    ("excluded", "left"),
    [
        (("/v1",), ["/version", "/v1x"]),
        (("/v1/",), ["/version", "/v1x"]),
        (("/v1/models", "/version"), ["/v1x"]),
        (("/",), []),
    ],
)
async def test_paths_and_those_below_them_may_have_none(
    caplog: pytest.LogCaptureFixture, excluded: tuple[str, ...], left: list[str]
):
    found = await lines(caplog, log_level_http="info", access_log_exclude=excluded)
    assert [path for path in found if "nothing" not in path] == left


async def test_the_path_of_a_proxy_is_not_in_the_lines(caplog: pytest.LogCaptureFixture):
    async with over_asgi(log_level_http="info", root_path="/llm") as server:
        for path in ("/llm/health", "/llm/version", "/llmx"):
            await server.http.get(path)
    found = [record.getMessage().split()[1] for record in caplog.records if record.name == "jaxserve.access"]
    assert found == ["/version", "/llmx"]


async def test_a_line_has_method_status_time_and_id(caplog: pytest.LogCaptureFixture):
    async with over_asgi(log_level_http="info") as server:
        await server.http.get("/nothing", headers={"x-request-id": "abc"})
    [record] = [record for record in caplog.records if record.name == "jaxserve.access"]
    method, path, status, seconds, unit, request_id = record.getMessage().split()
    assert (method, path, status, unit, request_id) == ("GET", "/nothing", "404", "s", "abc")
    assert float(seconds) >= 0
