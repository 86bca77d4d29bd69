"""The cost of a compiled program: its launches, and how the host launches them."""

from __future__ import annotations

from pathlib import Path

from jaxserve.runtime.programs.cost import Grouping, grouping, program_cost
from jaxserve.runtime.programs.hlo import HloModule, Tables

# As XLA writes it: a condition inside of a command buffer makes nobody wait, one outside of it does.
THUNKS = """\
000: kCommandBuffer [source       | next=099 (1)]
    001: kCustomKernel [source        | next=054 (50)] wrapped_iota grid: [1, 1, 1] threads: [128, 1, 1]
    052: kConditional  [prev=049 (1)  | next=054 (1) ]
      false_branch:
        050: kCustomKernel [source | sink] loop_subtract_fusion grid: [32064, 1, 1]
099: kConditional   [prev=000 (1) | next=000 (1)]
  false_branch:
    000: kCommandBuffer [source       | next=076 (1)]
        057: kCustomKernel [source       | sink        ] wrapped_slice_2 grid: [1, 1, 1]
    067: kWhile        [prev=066 (1) | next=074 (1)]
condition:
        068: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1]
100: kCustomKernel  [prev=099 (1) | sink        ] input_reduce_fusion_8 grid: [8016, 1, 1]
"""

PROGRAM = """\
%double (param_0: f32[4]) -> f32[4] {
  %param_0 = f32[4]{0} parameter(0)
  ROOT %add.1 = f32[4]{0} add(%param_0, %param_0)
}

%body (param_0.1: f32[4]) -> f32[4] {
  %param_0.1 = f32[4]{0} parameter(0)
  ROOT %in_loop = f32[4]{0} fusion(%param_0.1), kind=kLoop, calls=%double, metadata={op_name="jit(step)/while/add"}
}

%condition (param_0.2: f32[4]) -> pred[] {
  %param_0.2 = f32[4]{0} parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %a = f32[4]{0} fusion(%x), kind=kLoop, calls=%double, metadata={op_name="jit(step)/layer_0/jit(_layer)/mlp/add"}
  %view = f32[4]{0} bitcast(%a)
  %b = f32[4]{0} fusion(%view), kind=kLoop, calls=%double, metadata={op_name="jit(step)/layer_1/jit(_layer)/mlp/add"}
  %sum-start = f32[4]{0} all-reduce-start(%b), metadata={op_name="jit(step)/mlp/psum"}
  %sum-done = f32[4]{0} all-reduce-done(%sum-start)
  ROOT %loop = f32[4]{0} while(%sum-done), condition=%condition, body=%body
}
"""


def test_the_host_waits_for_what_is_in_no_command_buffer() -> None:
    assert grouping(THUNKS) == Grouping(top=3, command_buffers=2, host_waits=2)


def test_launches_are_counted_by_what_they_are_for(tmp_path: Path) -> None:
    cost = program_cost(HloModule(PROGRAM), Tables(), tmp_path)
    assert {one.kernel: (one.calls, one.nbytes) for one in cost.kinds} == {
        "mlp/add": (2, 2 * 32),
        "mlp/psum": (1, 32),
        "while/add": (1, 32),
    }
    assert (cost.launches, cost.read_bytes, cost.written_bytes) == (4, 64, 64)
    assert cost.costliest(1)[0].kernel == "mlp/add"
    assert cost.grouping is None, "XLA wrote no thunks there"
    (tmp_path / "module_1.step.thunk_sequence_after_thunk_passes.txt").write_text(THUNKS)
    assert program_cost(HloModule(PROGRAM), Tables(), tmp_path).grouping == grouping(THUNKS)
