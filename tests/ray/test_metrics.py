"""The expositions of several replicas as one."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.ray.metrics import merged


def exposition(replica: str, count: float) -> str:
    registry = CollectorRegistry()
    Counter("requests", "Requests.", ["replica"], registry=registry).labels(replica).inc(count)
    Gauge("running", "Running\nnow.", ["replica", "path"], registry=registry).labels(replica, 'a "b" #').set(count)
    Histogram("seconds", "Seconds.", ["replica"], registry=registry).labels(replica).observe(count)
    return generate_latest(registry).decode()


def test_each_family_stands_once_with_the_samples_of_all() -> None:
    texts = [exposition("a", 1), exposition("b", 2)]
    text = merged(texts)
    lines = text.splitlines()
    comments = [line for line in lines if line.startswith("# ")]
    assert len(comments) == len(set(comments))
    assert sorted(set(lines)) == sorted({line for one in texts for line in one.splitlines()})
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    requests = next(family for family in families if family.name == "requests")
    assert {
        sample.labels["replica"]: sample.value for sample in requests.samples if sample.name == "requests_total"
    } == {
        "a": 1,
        "b": 2,
    }
    assert [family.type for family in families if family.name in ("requests", "running", "seconds")] == [
        "counter", "gauge", "histogram"]  # fmt: skip


def test_families_of_one_replica_alone_are_there() -> None:
    assert merged(["# TYPE a gauge\na 1\n", "# TYPE b gauge\nb 2\n", "c 3\n"]).splitlines() == [
        "# TYPE a gauge", "a 1", "# TYPE b gauge", "b 2", "c 3"]  # fmt: skip
    one = exposition("a", 1)
    assert merged([one]) == one
    assert merged([]) == ""
