"""The metrics of replicas where people look for them: in Ray's own exposition, and at `/metrics` of the ingress.

Ray's agents on each node expose what is set here with `ray_` before each name, and Ray's service discovery names them
to Prometheus.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from ray.serve import metrics

# Serve labels its metrics with these itself.
_SERVE_LABELS = frozenset({"application", "deployment", "replica", "route"})
_INVALID = re.compile("[^a-zA-Z0-9_]")
_COMMENT = re.compile(r"# (?:HELP|TYPE) (\S+)")


class RayGauges:
    """All samples of a registry as gauges of Ray, under their names with `_` for `:`.

    Counters and parts of histograms are gauges too, as Ray's can't be set; queries of Prometheus don't see types.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._gauges: dict[str, metrics.Gauge] = {}

    def set_all(self) -> None:
        """Set each gauge to what its sample is now."""
        for family in self._registry.collect():
            for sample in family.samples:
                labels = {name: value for name, value in sample.labels.items() if name not in _SERVE_LABELS}
                gauge = self._gauges.get(sample.name)
                if gauge is None:
                    gauge = self._gauges[sample.name] = metrics.Gauge(
                        _INVALID.sub("_", sample.name), family.documentation, tag_keys=tuple(labels)
                    )
                gauge.set(sample.value, tags=labels)


def merged(expositions: Iterable[str]) -> str:
    """Return several expositions of the same families as one, in which each family stands once.

    Their samples differ by a label.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for text in expositions:
        seen: set[str] = set()
        family = ""
        for line in text.splitlines():
            if (comment := _COMMENT.match(line)) is None:
                samples.setdefault(family, []).append(line)
                continue
            family = comment[1]
            if family not in heads or family in seen:
                heads.setdefault(family, []).append(line)
                seen.add(family)
    lines = [line for name in {**heads, **samples} for line in (*heads.get(name, ()), *samples.get(name, ()))]
    return "".join(f"{line}\n" for line in lines)
