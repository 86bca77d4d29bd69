"""All series of /metrics: the engine's and the server's own ones, and both under the names of other engines.

Owns which readings they are made from, and the labels that all have. The names are `counterparts`'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from jaxserve.observability.counterparts import Sources, counterparts, engine_labels, request_labels, sleep_states
from jaxserve.observability.engine_metrics import EngineFamilies, Reading
from jaxserve.observability.throughput import Throughput

type WholeReading = tuple[Reading | None, Throughput]
"""The reading of all engine processes together, None while there is none, and their throughput."""
type PartReadings = list[tuple[Reading, Throughput]]
"""Those of each engine process, or of the only one."""


class AllSeries:
    """Collects them, as Prometheus's registry asks for them.

    `counted` has the series that this process counts, or several that share files do. `other_engines` are those under
    whose names there are series too, `labels` what all samples get besides.
    """

    def __init__(
        self,
        model_name: str,
        engine: EngineFamilies,
        counted: CollectorRegistry | MultiProcessCollector,
        whole: Callable[[], WholeReading],
        parts: Callable[[], PartReadings],
        other_engines: Sequence[str] = (),
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._model_name = model_name
        self._engine = engine
        self._counted = counted
        self._whole = whole
        self._parts = parts
        self._other_engines = tuple(dict.fromkeys(other_engines))
        self._labels = dict(labels or {})
        # Several processes take turns in answering: their own numbers would jump.
        self._process = ProcessCollector(registry=None) if isinstance(counted, CollectorRegistry) else None

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        for family in self._families():
            if self._labels:
                family.samples = [sample._replace(labels=sample.labels | self._labels) for sample in family.samples]
            yield family

    def _families(self) -> Iterator[Metric]:
        of_engine = list(self._engine.of(*self._whole()))
        of_requests = list(self._counted.collect())
        yield from of_engine
        yield from of_requests
        requests = {family.name: family for family in of_requests}
        yield from self._renamed("jaxserve", {}, requests)
        if not self._other_engines:
            return
        parts = self._parts()
        processes = [of_engine] if len(parts) == 1 else [list(self._engine.of(*part)) for part in parts]
        for name in self._other_engines:
            labels = [engine_labels(name, number, len(parts)) for number in range(len(parts))]
            engines = {same[0].name: list(zip(labels, same, strict=True)) for same in zip(*processes, strict=True)}
            yield from self._renamed(name, engines, requests)
        if "vllm" in self._other_engines:
            yield sleep_states(self._model_name, len(parts))
            if self._process is not None:
                yield from self._process.collect()

    def _renamed(self, engine: str, engines: Mapping[str, Sources], requests: Mapping[str, Metric]) -> Iterator[Metric]:
        """Yield the counterparts of the families; an engine's are missing while there is none."""
        for row in counterparts(engine):
            if row.ours in requests:
                yield row.of([(request_labels(engine), requests[row.ours])])
            elif row.ours in engines:
                yield row.of(engines[row.ours])
