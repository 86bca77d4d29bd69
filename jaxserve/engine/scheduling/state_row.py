"""The row of a running request in a model that keeps a state for each sequence, and how far the state in it is.

It only counts tokens; `request_states` decides what is written.
"""

from __future__ import annotations

from jaxserve.step_plan import Capacity


class StateRow:
    """The `row` of a request, and the border at which its state is.

    After the last planned step, `certain` tokens can't be rejected, or up to `unsure` fewer: drafts of steps before it.
    Snapshots of the prompt are `due` at these borders. The last one was taken at `last_snapshot`, or the request
    `started_at` it. `states` has the row of a snapshot that the request keeps until it stops; it counts as used by this
    request, of this `priority`.
    """

    __slots__ = (
        "certain",
        "due",
        "last_snapshot",
        "num_uses",
        "priority",
        "row",
        "started_at",
        "states",
        "unsure",
    )

    def __init__(self, row: int, num_tokens: int, due: list[int], priority: int = 0) -> None:
        self.row = row
        self.num_uses, self.priority = 1, priority
        self.started_at = self.certain = self.last_snapshot = num_tokens
        self.unsure = 0
        self.due = due
        self.states: list[int | None] = [None, None]

    def border(self, capacity: Capacity) -> int | None:
        """Return after how many tokens the row has the state, or None if drafts in flight decide it."""
        most = capacity.folded_tokens(self.certain)
        return most if capacity.folded_tokens(self.certain - self.unsure) == most else None

    def due_in(self, start: int, end: int) -> list[int]:
        """Return the borders at which a chunk of tokens `start` to `end` should take a snapshot; it can take one."""
        return [border for border in self.due if start < border <= end]

    def commit_drafts(self, count: int, accepted: int) -> None:
        """Count the drafts of the oldest step in flight; those of the last one planned were never certain."""
        if self.unsure:
            self.unsure -= count
            self.certain -= count - accepted
