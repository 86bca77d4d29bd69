"""Metric families as Prometheus' text format (version 0.0.4).

`prometheus_client` writes it too, but checks all names anew at each scrape. That takes three times as long, and no
stream of this process gets a token meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(families: Iterable[Metric]) -> str:
    """Return the text of counters, gauges and histograms. Times of creation become gauges of their own."""
    lines: list[str] = []
    for family in families:
        created = f"{family.name}_created"
        name = f"{family.name}_total" if family.type == "counter" else family.name
        _write(lines, name, family.type, family.documentation, [one for one in family.samples if one.name != created])
        if times := [one for one in family.samples if one.name == created]:
            _write(lines, created, "gauge", family.documentation, times)
    return "".join(lines)


def _write(lines: list[str], name: str, kind: str, text: str, samples: Iterable[Sample]) -> None:
    lines.append(f"# HELP {name} {_escaped(text)}\n# TYPE {name} {kind}\n")
    for sample in samples:
        labels = ",".join([f'{label}="{_escaped(value, True)}"' for label, value in sorted(sample.labels.items())])
        braced = f"{{{labels}}}" if labels else ""
        lines.append(f"{sample.name}{braced} {floatToGoString(sample.value)}\n")


def _escaped(text: str, is_value: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if is_value else text
