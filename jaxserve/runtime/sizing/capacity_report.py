"""Reports whether a model fits a target device, and how fast it can be there: the work of `jaxserve plan`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.params import KVSpec
from jaxserve.runtime.devices.target import DeviceTarget, load_target
from jaxserve.runtime.sizing.aot import (
    compile_programs,
    deploy_on_target,
    meshes_for_target,
    predict_steps,
    program_parts,
)
from jaxserve.runtime.sizing.deployment import Deployment
from jaxserve.runtime.sizing.memory import usable_bytes
from jaxserve.runtime.sizing.memory_advice import find_fixes
from jaxserve.runtime.sizing.prediction import Prediction
from jaxserve.runtime.sizing.roofline import PipelineRoofline, pipeline_roofline
from jaxserve.runtime.sizing.temp_memory import TempMemory, largest_programs, with_temp_memory

_BATCHES = (1, 8, 32, 64, 128, 256, 512, 1024)
_CONTEXTS = (1024, 4096, 16384, 65536, 131072)


@dataclasses.dataclass(frozen=True)
class Shortfall:
    """A limit that the deployment can't meet, and flags each of which would meet it."""

    problem: str
    fixes: list[str]


@dataclasses.dataclass(frozen=True)
class StageReport:
    """The layers of a pipeline stage, its devices, and the bytes of what each of these holds.

    `temp` is the largest working memory of a program, `left` what nothing needs of the memory that may be used.
    """

    deployment: Deployment
    devices: range
    temp: int
    left: int

    @property
    def layers(self) -> range:
        """The layers that it has."""
        return self.deployment.model.layers

    @property
    def weights(self) -> int:
        """The bytes of its weights."""
        return self.deployment.sizes.footprint.weights

    @property
    def state(self) -> int:
        """The bytes of its state by slot."""
        return self.deployment.sizes.footprint.state

    @property
    def states(self) -> int:
        """The bytes of the states of sequences, which are among those of its state."""
        return self.deployment.sizes.footprint.states

    @property
    def pool(self) -> int:
        """The bytes of its KV pools."""
        return self.deployment.sizes.pool_bytes

    @property
    def kv_groups(self) -> list[tuple[KVSpec, int, int]]:
        """The KV groups, each with its pages on a data-parallel rank and its bytes of a token on a device."""
        made = self.deployment
        return list(zip(made.kv_specs, made.capacity.pages_by_group, made.sizes.footprint.kv_per_token, strict=True))


@dataclasses.dataclass(frozen=True)
class CapacityReport:
    """The capacity of a deployment on a target.

    `temps` are the largest working memory of each stage; `temp_source` says where the figures are from. The pool also
    leaves a margin free on top of the compiler's figures. `predictions` are those of the programs that were compiled,
    by name.
    """

    deployment: Deployment
    target: DeviceTarget
    limits: PipelineRoofline
    temps: Sequence[int]
    temp_source: str
    shortfalls: list[Shortfall]
    predictions: Mapping[str, Prediction]

    @property
    def num_devices(self) -> int:
        """The number of devices of all replicas."""
        divided = self.deployment.divided
        return divided.num_devices * divided.replicas

    @property
    def stages(self) -> list[StageReport]:
        """What each pipeline stage holds; one of all layers without them. The devices are those of one replica."""
        found, each = list[StageReport](), self.deployment.num_devices // len(self.deployment.parts)
        for i, (part, temp) in enumerate(zip(self.deployment.parts, self.temps, strict=True)):
            used = part.sizes.footprint.weights + part.sizes.footprint.state + temp + part.sizes.pool_bytes
            found.append(StageReport(part, range(i * each, (i + 1) * each), temp, self.usable_bytes - used))
        return found

    @property
    def fullest(self) -> StageReport:
        """The stage that has the least room."""
        return min(self.stages, key=lambda stage: stage.left)

    @property
    def rank_tokens(self) -> int:
        """The number of tokens of whole sequences that the KV pool of a data-parallel rank holds."""
        return self.deployment.capacity.num_pages * self.deployment.capacity.page_size

    @property
    def pool_tokens(self) -> int:
        """The number of tokens of whole sequences that the KV pools of all ranks hold."""
        return self.deployment.num_ranks * self.rank_tokens

    @property
    def num_slots(self) -> int:
        """The number of requests that can run at once on all ranks."""
        return self.deployment.num_ranks * self.deployment.capacity.num_slots

    @property
    def usable_bytes(self) -> int:
        """The memory of a device that a deployment may use."""
        return usable_bytes(self.deployment.config, self.target.memory_bytes)

    def max_requests(self, context: int) -> int:
        """Return how many requests of this length can run at once."""
        capacity = self.deployment.capacity
        if capacity.encodes:
            return self.num_slots
        whole = -(-context // capacity.page_size)
        fit = [capacity.num_pages // whole]
        for group in capacity.window_groups:
            # A window may begin and end within a page.
            fit.append(group.num_pages // min(whole, -(-group.window // capacity.page_size) + 1))
        return self.deployment.num_ranks * min(capacity.num_slots, *fit)

    @property
    def contexts(self) -> list[int]:
        """The context lengths to show limits for."""
        longest = self.deployment.capacity.max_model_len
        return sorted({context for context in _CONTEXTS if context < longest} | {longest})

    @property
    def batches(self) -> list[int]:
        """The batch sizes to show limits for."""
        most = self.num_slots
        return sorted({batch for batch in _BATCHES if batch < most} | {most})

    def decode_limit(self, batch: int, context: int) -> float | None:
        """Return the upper limit in tokens per second; None if the pool can't hold the batch."""
        if batch > self.max_requests(context):
            return None
        return batch / self.limits.decode_seconds(self._rows(batch), context)

    def step_seconds(self, batch: int, context: int) -> float:
        """Return the shortest time of a decode step of `batch` requests through all stages."""
        return self.limits.step_seconds(self._rows(batch), context)

    def _rows(self, batch: int) -> int:
        return -(-batch // self.deployment.num_ranks)

    def predicted_rate(self, name: str) -> float:
        """Return the predicted tokens per second of a program over all ranks: decoded tokens, or prompt tokens."""
        predicted = self.predictions[name]
        return self.deployment.num_ranks * predicted.tokens / predicted.seconds

    def prefill_limit(self, length: int) -> float | None:
        """Return the upper limit in tokens per second for prompts of `length` tokens; None if the peak is unknown."""
        limit = self.limits.prefill_tokens_per_second(length)
        return None if limit is None else self.deployment.num_ranks * limit


def report_capacity(config: EngineConfig, name: str, *, ask_compiler: bool = False) -> CapacityReport:
    """Report on a configuration on a target.

    Raises `ConfigError` if no memory is left for the KV cache, naming the flags that would leave some.
    """
    deployment = deploy_on_target(config, name)
    target = load_target(name)
    temps, source = [part.sizes.footprint.activations for part in deployment.parts], "estimated"
    predictions: dict[str, Prediction] = {}
    if ask_compiler:
        every = program_parts(deployment, meshes_for_target(deployment, name))
        parts = [dataclasses.replace(part, keys=largest_programs(made)) for part, made in zip(every, deployment.parts)]
        reports = {report.name: report for report in compile_programs(parts)}
        if fault := next((report for report in reports.values() if report.fault), None):
            raise ConfigError(f"program {fault.name} can't be used on {name}: {fault.fault}")
        predictions = predict_steps(deployment, name, parts, list(reports.values()))
        largest = max(reports.values(), key=lambda report: report.temp_bytes)
        deployment = with_temp_memory(deployment, TempMemory(largest.temp_bytes, largest.name))
        temps = [max(reports[one].temp_bytes for one in part.program_names) for part in parts]
        source = f"the compiler's, {largest.name}"
    limits = pipeline_roofline(deployment, target)
    return CapacityReport(deployment, target, limits, temps, source, _shortfalls(deployment), predictions)


def _shortfalls(deployment: Deployment) -> list[Shortfall]:
    config, sizes = deployment.config, deployment.sizes
    found = []
    if sizes.capacity.max_model_len < sizes.wanted_context:
        mends = find_fixes(
            config,
            deployment.model.config,
            deployment.device,
            lambda made: made.capacity.max_model_len >= sizes.wanted_context,
            deployment.stored,
        )
        what = (
            f"a request of {sizes.wanted_context:,} tokens: the context is cut to the {sizes.capacity.max_model_len:,} "
            "tokens that the KV pool holds"
        )
        found.append(Shortfall(what, [*mends, f"--context-length {sizes.capacity.max_model_len} (to accept it)"]))
    return found
