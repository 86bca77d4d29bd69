"""The sampler of NVIDIA GPUs, compiled without one: three kernels, no branch, loop or sort, and hardly any memory.

Vocabularies are one that is a multiple of a vector's size and one that isn't.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.api_types import MAX_LOGIT_BIAS, MAX_STOP_IDS
from jaxserve.runtime.devices.topology import target_mesh
from jaxserve.runtime.programs.hlo import instructions
from jaxserve.runtime.step import sampling
from jaxserve.runtime.step.state import INT_COLUMNS, SamplingRows
from pallas_kernels.paged_attention import target_of
from pallas_kernels.sampling import triton
from pallas_kernels.sampling.parameters import Edits, FloatColumn, SlotTable
from tests.aot.kernels import checked_kernels
from tests.selection import grid

pytestmark = pytest.mark.aot

ROWS, SLOTS, DRAFTS = 128, 256, 16
CASES = [
    (target, vocab)
    for target in ("nvidia-h200", "nvidia-l4", "nvidia-a100-80", "nvidia-b200")
    for vocab in (128256, 50257)
]


@pytest.mark.parametrize(("target", "vocab"), grid(CASES, lambda case: case == ("nvidia-h200", 128256)))
def test_a_program_samples_in_three_kernels(target: str, vocab: int) -> None:
    mesh = target_mesh(target, tensor=1, data=1)

    def struct(*shape: int, dtype: Any = np.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def sample(logits: Any, params: SamplingRows, counts: Any, slots: Any, lengths: Any, samples: Any) -> Any:
        rows = sampling.DrawnRows(slots, lengths, samples)
        return sampling.sample(logits, params, counts, rows, target_of(mesh.devices.flat[0]))

    params = SamplingRows(
        ints=struct(SLOTS, len(INT_COLUMNS)),
        floats=struct(SLOTS, len(FloatColumn), dtype=np.float32),
        stop_ids=struct(SLOTS, MAX_STOP_IDS),
        bias_ids=struct(SLOTS, MAX_LOGIT_BIAS),
        bias_values=struct(SLOTS, MAX_LOGIT_BIAS, dtype=np.float32),
    )
    logits, counts = struct(ROWS, vocab, dtype=np.float32), struct(SLOTS, vocab, dtype=np.int16)
    rows = struct(ROWS), struct(ROWS), struct(ROWS, dtype=np.bool_)
    spec = PartitionSpec()
    sharded = jax.shard_map(sample, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(sharded).lower(logits, params, counts, *rows).compile()
    found = checked_kernels(compiled, target)
    names = ["draw_tokens (triton)", "edit_logits (triton)", "top_logits (triton)"]
    assert sorted((one.kernel, one.calls) for one in found) == [(name, 1) for name in names]
    read = list(instructions(compiled.as_text()))
    assert not {one.opcode for one in read} & {"conditional", "while", "sort"}
    assert not [one for one in read if one.opcode != "parameter" and one.elements > ROWS * vocab]
    # The edited logits, and the lists of candidates.
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5 * ROWS * vocab * 4


@pytest.mark.parametrize("target", grid(["nvidia-h200", "nvidia-l4"], "nvidia-h200".__eq__))
def test_pending_tokens_are_counted_in_the_kernel_of_edits(target: str) -> None:
    mesh, vocab = target_mesh(target, tensor=1, data=1), 128256

    def struct(*shape: int, dtype: Any = np.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def edit(logits: Any, lengths: Any, live: Any, edits: Edits, table: SlotTable) -> Any:
        return triton.edit_logits(logits, lengths, live, edits, table, interpret=False)

    counts, bias = struct(SLOTS, vocab, dtype=np.int16), struct(SLOTS, MAX_LOGIT_BIAS, dtype=np.float32)
    ids = struct(SLOTS, MAX_STOP_IDS), struct(SLOTS, MAX_LOGIT_BIAS)
    edits = Edits(counts, *ids, bias, struct(1), struct(ROWS, DRAFTS))
    table = SlotTable(struct(ROWS), struct(SLOTS, len(INT_COLUMNS)), struct(SLOTS, len(FloatColumn), dtype=np.float32))
    rows = struct(ROWS, vocab, dtype=np.float32), struct(ROWS), struct(ROWS, dtype=np.bool_)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(edit).lower(*rows, edits, table).compile()
    [kernel] = checked_kernels(compiled, target)
    assert kernel.kernel == "edit_logits (triton)"
