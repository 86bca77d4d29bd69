"""What the priority of a request means: which numbers come first, and which requests are retracted for others."""

from __future__ import annotations

import msgspec

from jaxserve.config.schema import EngineConfig


class Priorities(msgspec.Struct, frozen=True):
    """The settings of priorities. Within the engine, a higher priority comes first.

    Requests that name none have the `default`. With `low_first`, requests mean it the other way round. A running
    request may be retracted for one whose priority is higher by more than `threshold`; for none if that is None.
    """

    default: int = 0
    low_first: bool = False
    threshold: int | None = 0

    @classmethod
    def of(cls, config: EngineConfig) -> Priorities:
        """Return the priorities of a configuration."""
        return cls(
            config.default_priority_value,
            config.schedule_low_priority_values_first,
            None if config.disable_priority_preemption else config.priority_scheduling_preemption_threshold,
        )

    def of_request(self, given: int | None) -> int:
        """Return the priority that a request has within the engine."""
        return self.turned(self.default if given is None else given)

    def turned(self, priority: int) -> int:
        """Turn a priority that a request names into the engine's, or the other way round."""
        return -priority if self.low_first else priority
