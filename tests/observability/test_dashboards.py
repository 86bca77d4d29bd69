"""Checks that the dashboards of vLLM and SGLang, and what scales or routes by their series, find series and labels.

`dashboards.tsv` lists what they query: a series, and the labels, with the values if they name any, that it is chosen or
grouped by. Prometheus adds `job` and `instance` itself.
"""

from __future__ import annotations

import asyncio
import fnmatch
from pathlib import Path

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from jaxserve.observability.counterparts import left_out
from tests.server.admin.test_metrics import STATS
from tests.server.conftest import over_asgi

ROWS = [line.split("\t") for line in Path(__file__).with_name("dashboards.tsv").read_text("utf-8").splitlines()[1:]]
LEFT_OUT = left_out("vllm") | left_out("sglang")


@pytest.fixture(scope="module")
def scrapes() -> list[list[Metric]]:
    """The families before and after load, which ends in each way and has each kind of request."""

    async def run() -> list[list[Metric]]:
        settings = {"metrics_prefix": ("vllm", "sglang"), "extra_metric_labels": {"pod": "a"}}
        engine = {"cached_tokens": 2, "refuse": lambda request: "broken" if request.sampling.seed == 13 else None}
        async with over_asgi(engine=engine, **settings) as server:
            texts = [(await server.http.get("/metrics")).text]
            for body in (
                {"prompt": ["abc", "de"], "n": 2, "max_tokens": 5},
                {"prompt": "abcd", "max_tokens": 20, "stop": "y", "stream": True},
                {"prompt": "abcd", "seed": 13},
            ):
                await server.http.post("/v1/completions", json=body)
            server.engine.hold()
            aborted, running = (
                asyncio.ensure_future(server.http.post("/v1/completions", json={"prompt": "xy", "max_tokens": 9}))
                for _ in range(2)
            )
            await server.engine.wait_for(lambda: len(server.engine.submitted) == 8)
            await server.engine.step()
            aborted.cancel()
            await server.engine.wait_for(lambda: server.engine.num_running == 1)
            server.engine.stats = STATS
            texts.append((await server.http.get("/metrics")).text)
            running.cancel()
            await asyncio.gather(aborted, running, return_exceptions=True)
            await server.state.idle.wait()
        return [list(text_string_to_metric_families(text)) for text in texts]

    return asyncio.run(run())


@pytest.fixture(scope="module")
def loaded(scrapes: list[list[Metric]]) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for family in scrapes[1]:
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def reason(series: str) -> str | None:
    """Why there is no such series, or None."""
    names = {series.removesuffix(suffix) for suffix in ("", "_total", "_bucket", "_sum", "_count")}
    for pattern, because in LEFT_OUT.items():
        if any(fnmatch.fnmatchcase(name, pattern) for name in names):
            return because
    return None


@pytest.mark.parametrize(("dashboard", "series", "labels"), ROWS, ids=lambda value: value.rpartition("/")[2])
def test_each_series_is_served_or_left_out(
    dashboard: str, series: str, labels: str, loaded: dict[str, list[Sample]]
) -> None:
    if (because := reason(series)) is not None:
        assert because
        assert series not in loaded
        return
    samples = loaded[series]
    for label, _, values in (word.partition("=") for word in labels.split()):
        found = {sample.labels[label] for sample in samples}
        assert found >= set(values.split("|") if values else ())
    # A fake engine's times may be 0
    counted = loaded[series.removesuffix("_sum") + "_count"] if series.endswith("_sum") else samples
    assert any(sample.value for sample in counted), "each moves under the load above"


def test_no_family_is_there_twice_and_all_series_have_the_extra_label(scrapes: list[list[Metric]]) -> None:
    for families in scrapes:
        names = [family.name for family in families]
        assert len(set(names)) == len(names)
        samples = [sample for family in families for sample in family.samples]
        keys = [(sample.name, frozenset(sample.labels.items())) for sample in samples]
        assert len(set(keys)) == len(keys)
        assert all(sample.labels["pod"] == "a" for sample in samples)


def test_counters_never_fall(scrapes: list[list[Metric]]) -> None:
    before, after = (
        {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            if family.type in ("counter", "histogram")
            for sample in family.samples
        }
        for families in scrapes
    )
    assert before.keys() <= after.keys()
    assert all(after[key] >= value for key, value in before.items())
