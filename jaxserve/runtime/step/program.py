"""Describes programs: the key of each, and a record for each kind with all facts that other modules need.

A module of this folder defines the records of the programs it makes, and `programs/table.py` lists them. All code that
compiles, keeps, loads, sizes, predicts or runs programs reads the records: a new program is a module and a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxserve.config.schema import EngineConfig
from jaxserve.models.layout import AnyModel
from jaxserve.runtime.step.draft_model import DraftModel
from jaxserve.runtime.step.input_packing import InputPacking
from jaxserve.runtime.step.state import DeviceState
from jaxserve.step_plan import Capacity, StepPlan
from pallas_kernels.ngram_lookup import NgramLookup
from pallas_kernels.paged_attention import Backend


class ProgramKey(NamedTuple):
    """Identifies a program of a kind.

    `size` is the number of rows or tokens that it holds, or the KV group whose pages it copies; 0 if its kind has one
    program. `greedy` tells programs of steps without a sampler, and is None for others.
    """

    kind: str
    size: int = 0
    greedy: bool | None = None

    def __str__(self) -> str:
        sampler = {True: "greedy", False: "full", None: ""}[self.greedy]
        return "-".join(filter(None, (self.kind, str(self.size or ""), sampler)))


@dataclasses.dataclass(frozen=True)
class StepContext:
    """The static facts that all programs of a deployment share.

    `sample_rows` is the number of rows whose logits exist at once: rows are sampled in groups of this size, and those
    after the last live row are left out. None samples all rows at once, which suits a GPU. `drafter` says how drafts
    are made, if there are any. `dtype` is that of hidden states.
    """

    model: AnyModel
    backend: Backend
    sample_rows: int | None
    drafter: NgramLookup | DraftModel | None = None
    dtype: np.dtype = np.dtype(np.float32)  # noqa: RUF009 - it is immutable

    def own_weights(self, params: Any) -> Any:
        """Return the model's own weights, from the weights that programs take."""
        return params[0] if isinstance(self.drafter, DraftModel) else params


RankFunction = Callable[..., tuple[DeviceState, Any]]
"""`(params, state, packed, *rows) -> (state, output)` of one rank, inside `shard_map`."""


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The sizes and the specs of the state that the inputs and outputs of a deployment's programs follow from."""

    context: StepContext
    capacity: Capacity
    state: DeviceState


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramKind:
    """The record of one kind of program.

    - `keys` returns the programs that a deployment of these sizes has, if its configuration `wants` the kind.
    - `make` returns the function of a program, and `packing` the layout of its packed input, which is all fill values
      if there is nothing to do.
    - `output` returns the logical parts of its output beside the state: a tree of `PartitionSpec`. A host of several
      reads it whole unless it `stays_divided`, but for what goes to another pipeline stage.
    - `rows` returns the specs of what follows the packed input.
    - Without `takes_weights`, `params` is ().
    - With `is_step`, a step can run in any larger program of the kind, and programs may still be loaded while a server
      serves. `pack` returns the packed inputs of a plan, `[ranks, size]`.
    - `num_decoding` returns how many sequences decode in a full program of a size, None if one prompt fills it.
    - With `compiles_long`, compilation begins with it.
    - With `where_drawn`, only the last pipeline stage has it.
    """

    name: str
    keys: Callable[[Capacity], Sequence[ProgramKey]]
    make: Callable[[StepContext, Capacity, ProgramKey], RankFunction]
    packing: Callable[[Capacity, ProgramKey], InputPacking]
    output: Callable[[Shapes, ProgramKey], Any] = lambda shapes, key: ()
    rows: Callable[[Shapes, ProgramKey], tuple[Any, ...]] = lambda shapes, key: ()
    wants: Callable[[EngineConfig], bool] = lambda config: True
    takes_weights: bool = True
    stays_divided: bool = False
    is_step: bool = False
    pack: Callable[[StepPlan, Capacity, ProgramKey], np.ndarray] | None = None
    num_decoding: Callable[[Capacity, int], int | None] = lambda capacity, size: None
    compiles_long: bool = False
    where_drawn: bool = False

    def empty_input(self, capacity: Capacity, key: ProgramKey) -> np.ndarray:
        """Return the packed input `[ranks, size]` that lets a program compute nothing."""
        return np.stack([self.packing(capacity, key).pack({})] * capacity.num_ranks)
