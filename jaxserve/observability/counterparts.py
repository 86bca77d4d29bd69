"""Our series under the names of vLLM and SGLang, with their labels, for the dashboards and autoscalers of both.

`counterparts.tsv` says which of our families each of theirs shows, `left_out.tsv` why we have no counterpart of others.
Owns no numbers: families are made from ours at each scrape.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from jaxserve.observability.engine_metrics import PREFIX

type LabelPairs = tuple[tuple[str, str], ...]
type Sources = Sequence[tuple[Mapping[str, str], Metric]]
"""Families of ours with one name, and the labels that the samples of each get besides."""


@dataclasses.dataclass(frozen=True)
class Counterpart:
    """A family of another engine, called `theirs`, that shows the numbers of `ours`; counters are without `_total`.

    Of its labels, `renamed` ones have another name, or are dropped if that is empty; only samples with the values in
    `only` are taken; and `added` ones have one value. Samples that differ in dropped labels are added up. `differs`
    says what else isn't as in the other engine.
    """

    theirs: str
    ours: str
    renamed: LabelPairs
    only: LabelPairs
    added: LabelPairs
    differs: str

    def of(self, sources: Sources) -> Metric:
        """Return the family from ours, of which there is at least one."""
        first = sources[0][1]
        family = Metric(self.theirs, first.documentation, first.type)
        for more, source in sources:
            start = len(source.name)
            labels = {**more, **dict(self.added)}
            family.samples += [
                Sample(self.theirs + sample.name[start:], {**sample.labels, **labels}, sample.value)
                for sample in source.samples
            ]
        if self.renamed or self.only:
            family.samples = self._regrouped(family.samples)
        return family

    def _regrouped(self, samples: Iterable[Sample]) -> list[Sample]:
        renamed, only = dict(self.renamed), set(self.only)
        grouped: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in samples:
            if not only <= sample.labels.items():
                continue
            labels = ((renamed.get(label, label), value) for label, value in sample.labels.items())
            key = sample.name, tuple((label, value) for label, value in labels if label)
            if key not in grouped:
                grouped[key] = sample.value
            elif sample.name.endswith("_created"):
                grouped[key] = min(grouped[key], sample.value)
            else:
                grouped[key] += sample.value
        return [Sample(name, dict(labels), value) for (name, labels), value in grouped.items()]


def counterparts(engine: str) -> tuple[Counterpart, ...]:
    """Return all families of `engine`, vllm or sglang, that have a counterpart here; of jaxserve, our second names."""
    return tuple(row for row in _table() if _engine(row.theirs) == engine)


def left_out(engine: str) -> dict[str, str]:
    """Return why the families of `engine` without a counterpart have none; names with * are patterns."""
    return {name: because for name, because in _rows("left_out.tsv") if _engine(name) == engine}


def engine_labels(engine: str, number: int, count: int) -> dict[str, str]:
    """Return the labels that `engine`, vllm or sglang, gives to series of engine process `number` of `count`."""
    if engine == "vllm":
        return {"engine": str(number)}
    rank = {"dp_rank": str(number)} if count > 1 else {}
    return {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0", **rank}


def request_labels(engine: str) -> dict[str, str]:
    """Return the labels that an engine gives to series of requests, whichever engine process computed them."""
    return {"vllm": {"engine": "0"}, "sglang": {"engine_type": "unified"}}.get(engine, {})


def sleep_states(model_name: str, num_engines: int) -> Metric:
    """Return vLLM's family that says of each engine process whether it sleeps. Ours never do."""
    labels = ["model_name", "engine", "sleep_state"]
    family = GaugeMetricFamily("vllm:engine_sleep_state", "Always awake: this server has no sleep mode", labels=labels)
    for number in range(num_engines):
        for state in ("awake", "weights_offloaded", "discard_all"):
            family.add_metric([model_name, str(number), state], float(state == "awake"))
    return family


def _engine(name: str) -> str:
    """Return the engine that has the family; vLLM has some without a prefix."""
    return name.partition(":")[0] if ":" in name else "vllm"


@functools.cache
def _table() -> tuple[Counterpart, ...]:
    return tuple(
        Counterpart(theirs, PREFIX + ours, *_rules(labels.split()), differs)
        for theirs, ours, labels, differs in _rows("counterparts.tsv")
    )


def _rules(words: Sequence[str]) -> tuple[LabelPairs, LabelPairs, LabelPairs]:
    """Return what is renamed (`ours=theirs`) or dropped (`-ours`), taken only and dropped (`ours:value`), and added
    (`+theirs=value`)."""
    renamed: list[tuple[str, str]] = []
    only: list[tuple[str, str]] = []
    added: list[tuple[str, str]] = []
    for word in words:
        if word.startswith("-"):
            renamed.append((word[1:], ""))
        elif ":" in word:
            label, value = word.split(":")
            only.append((label, value))
            renamed.append((label, ""))
        else:
            label, value = word.removeprefix("+").split("=")
            (added if word.startswith("+") else renamed).append((label, value))
    return tuple(renamed), tuple(only), tuple(added)


def _rows(name: str) -> list[tuple[str, ...]]:
    text = files("jaxserve.observability").joinpath(name).read_text(encoding="utf-8")
    return [tuple(line.split("\t")) for line in text.splitlines()[1:]]
