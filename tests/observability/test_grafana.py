"""Checks that the dashboard uses only metrics, labels and label values that are served."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.observability.metrics import Metrics
from tests.server.admin.test_metrics import INFO, STATS

DASHBOARD = json.loads((Path(__file__).parents[2] / "configs" / "grafana" / "jaxserve.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


@pytest.fixture(scope="module")
def served() -> dict[str, set[tuple[str, str]]]:
    """The label and value pairs of each sample name."""
    found: dict[str, set[tuple[str, str]]] = {}
    for family in text_string_to_metric_families(Metrics("tiny", lambda: (INFO, STATS)).render().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels.items())
    return found


def expressions() -> Iterator[str]:
    for panel in PANELS:
        yield from (target["expr"] for target in panel["targets"])
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_every_metric_it_names_is_served(expression: str, served: dict[str, set[tuple[str, str]]]) -> None:
    names = re.findall(r"jaxserve:\w+", expression)
    assert names
    for name in names:
        assert name in served, name
    for name, selector in re.findall(r"(jaxserve:\w+)\{([^}]*)\}", expression):
        for label, value in re.findall(r'(\w+)="([^"]*)"', selector):
            assert (label, value) in served[name], (name, label, value)
    for label in re.findall(r"\bby \((\w+)\)", expression):
        assert any(label in dict(served[name]) for name in names)


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    covered: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place: dict[str, Any] = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not covered & cells, panel["title"]
        covered |= cells
