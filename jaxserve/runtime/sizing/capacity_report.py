"""What `jaxserve plan` finds out: whether a model fits a device that isn't here, and how fast it can be there."""

from __future__ import annotations

import dataclasses

from jaxserve.config.schema import EngineConfig
from jaxserve.runtime.devices.target import Target, load_target
from jaxserve.runtime.sizing.aot import builder_for_target, deploy_on_target
from jaxserve.runtime.sizing.deployment import Deployment
from jaxserve.runtime.sizing.memory import usable_bytes
from jaxserve.runtime.sizing.memory_advice import fixes
from jaxserve.runtime.sizing.roofline import Roofline, roofline
from jaxserve.runtime.sizing.temp_memory import compiled_figure, resized

_BATCHES = (1, 8, 32, 64, 128, 256, 512, 1024)
_CONTEXTS = (1024, 4096, 16384, 65536, 131072)


@dataclasses.dataclass(frozen=True)
class Misfit:
    """What doesn't fit, and flags each of which mends it."""

    what: str
    fixes: list[str]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A deployment on a target. `temp_bytes` is the largest working memory, from where `temp_source` says; a margin on
    top of the compiler's figure is part of what the pool leaves free."""

    deployment: Deployment
    target: Target
    limits: Roofline
    temp_bytes: int
    temp_source: str
    misfits: list[Misfit]

    @property
    def num_devices(self) -> int:
        """Devices of all data-parallel ranks."""
        return self.deployment.num_ranks * self.deployment.tensor

    @property
    def rank_tokens(self) -> int:
        """Tokens that the KV pool of a data-parallel rank holds."""
        return self.deployment.capacity.num_pages * self.deployment.capacity.page_size

    @property
    def pool_tokens(self) -> int:
        """Tokens that the KV pools of all ranks hold."""
        return self.deployment.num_ranks * self.rank_tokens

    @property
    def num_slots(self) -> int:
        """Requests that run at once, on all ranks."""
        return self.deployment.num_ranks * self.deployment.capacity.num_slots

    @property
    def usable_bytes(self) -> int:
        """What a deployment may use of a device."""
        return usable_bytes(self.deployment.config, self.target.memory_bytes)

    def requests_of(self, context: int) -> int:
        """How many requests of this length run at once."""
        capacity = self.deployment.capacity
        fit = capacity.num_pages // -(-context // capacity.page_size)
        return self.deployment.num_ranks * min(capacity.num_slots, fit)

    @property
    def contexts(self) -> list[int]:
        """Context lengths to show limits for."""
        longest = self.deployment.capacity.max_model_len
        return sorted({context for context in _CONTEXTS if context < longest} | {longest})

    @property
    def batches(self) -> list[int]:
        """Batches to show limits for."""
        most = self.num_slots
        return sorted({batch for batch in _BATCHES if batch < most} | {most})

    def decode_limit(self, batch: int, context: int) -> float | None:
        """Tokens a second at best; None where the pool doesn't hold so much."""
        if batch > self.requests_of(context):
            return None
        return batch / self.limits.decode_seconds(-(-batch // self.deployment.num_ranks), context)

    def prefill_limit(self, length: int) -> float | None:
        """Prompt tokens a second at best, for prompts of `length` tokens; None where the peak isn't known."""
        limit = self.limits.prefill_tokens_per_second(length)
        return None if limit is None else self.deployment.num_ranks * limit


def make_plan(config: EngineConfig, name: str, *, ask_compiler: bool = False) -> Plan:
    """Plan it. Raises `ConfigError`, naming the flags that would make it fit, where no KV cache is left at all."""
    deployment = deploy_on_target(config, name)
    target = load_target(name)
    temp, source = deployment.sizes.footprint.activations, "estimated"
    if ask_compiler:
        figure = compiled_figure(deployment, builder_for_target(deployment, name))
        deployment = resized(deployment, figure)
        temp, source = figure.temp_bytes, f"the compiler's, {figure.program}"
    return Plan(deployment, target, roofline(deployment, target), temp, source, _misfits(deployment))


def _misfits(deployment: Deployment) -> list[Misfit]:
    config, sizes = deployment.config, deployment.sizes
    found = []
    if sizes.capacity.max_model_len < sizes.wanted_context:
        mends = fixes(
            config,
            deployment.model,
            deployment.device,
            lambda made: made.capacity.max_model_len >= sizes.wanted_context,
            deployment.stored,
        )
        what = (
            f"a request of {sizes.wanted_context:,} tokens: the context is cut to the {sizes.capacity.max_model_len:,} "
            "that the KV pool holds"
        )
        found.append(Misfit(what, [*mends, f"--context-length {sizes.capacity.max_model_len} (to accept it)"]))
    return found
