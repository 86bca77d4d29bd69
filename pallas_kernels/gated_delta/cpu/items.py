"""Work items: some panels of a key head's values, over all blocks of a row that the step changes.

The items of one key head of a row share its keys, its decays and the inputs of its convolution. Each computes those it
needs, and the last one that is done writes them, as the others read what it overwrites.
"""

from __future__ import annotations

from collections.abc import Callable

from pallas_kernels.cpu.emit import Function, Value
from pallas_kernels.cpu.types import F32, I64, PTR
from pallas_kernels.gated_delta.cpu.operands import (
    CpuDelta,
    DeltaOperands,
    HeadOfRow,
    clear_bytes,
    copy_bytes,
    head_of_row,
)
from pallas_kernels.gated_delta.cpu.panels import (
    Panel,
    PanelSizes,
    StatePart,
    compute_panel,
    fold_panel,
    panel_scratch,
    panel_sizes,
)
from pallas_kernels.gated_delta.cpu.tokens import (
    BlockPart,
    TokenScratch,
    input_at,
    lay_out_conv,
    load_tokens,
    prepare_tokens,
)
from pallas_kernels.gated_delta.layout import BLOCK


def num_panels(facts: CpuDelta, features: frozenset[str]) -> int:
    """Return the number of panels of a key head."""
    return facts.group * facts.value_dim // panel_sizes(facts.value_dim, features).columns


def compute_item(f: Function, item: Value, operands: DeltaOperands, facts: CpuDelta, features: frozenset[str]) -> None:
    """Compute an item."""
    panels = num_panels(facts, features)
    parts = (f.constant(I64, panels - 1) + operands.item_panels) // operands.item_panels
    head_item = item // parts
    # Chunks come last in a batch and take longest
    index = operands.num_seqs - 1 - head_item // operands.key_heads
    row = head_of_row(f, facts, operands, index, head_item % operands.key_heads)
    first = item % parts * operands.item_panels
    last = f.minimum(first + operands.item_panels, panels)
    tokens = load_tokens(f, row)
    _compute_panels(f, row, tokens, first, last, features)
    counter = f.at(operands.counters, (index * operands.key_heads + row.head) * 8)
    f.when((f.fetch_add(counter, 1) + 1).equals(parts), lambda: _keep(f, row, tokens))


def _compute_panels(
    f: Function, row: HeadOfRow, tokens: TokenScratch, first: Value, last: Value, features: frozenset[str]
) -> None:
    """Compute the panels from `first` to `last` over the blocks of a row."""
    facts = row.facts
    sizes = panel_sizes(facts.value_dim, features)
    per_head, panel_bytes = facts.value_dim // sizes.columns, facts.key_dim * sizes.row_bytes
    value_channels = 2 * facts.key_dim
    lay_out_conv(f, row, tokens, 0, value_channels)
    lay_out_conv(f, row, tokens, first * sizes.columns + value_channels, last * sizes.columns + value_channels)
    scratch = panel_scratch(f, sizes)
    is_new = row.folded.equals(0)
    size = (last - first) * panel_bytes
    # Zeros, and states between blocks, aren't in the pool
    is_outside = is_new | (row.end > row.folded + BLOCK)
    states = f.call("malloc", PTR, f.select(is_outside, size, 0))
    f.when(is_new, lambda: clear_bytes(f, states, size))
    source, target, snapshot = (row.state(f, one) for one in (row.source, row.target, row.snapshot))

    def panel_at(p: Value) -> Panel:
        head, column = p // per_head, p % per_head * sizes.columns
        deltas = f.at(row.deltas, (head * (facts.ring * facts.value_dim) + column) * 4)
        return Panel(head, column, sizes, scratch, row, tokens, deltas)

    def in_pool(pool: Value, panel: Panel) -> StatePart:
        offset = panel.head * facts.state_bytes + panel.column * 4
        return StatePart(f.at(pool, offset), f.constant(I64, facts.value_dim * 4))

    def state_of(panel: Panel, p: Value, pool: Value, outside: Value) -> StatePart:
        ours, theirs = f.at(states, (p - first) * panel_bytes), in_pool(pool, panel)
        away = outside > 0
        row_bytes = f.select(away, f.constant(I64, sizes.row_bytes), theirs.row_bytes)
        return StatePart(f.select(away, ours, theirs.pointer), row_bytes)

    def move(p: Value) -> None:
        panel = panel_at(p)
        _copy_state(f, facts, sizes, in_pool(source, panel), in_pool(target, panel))

    f.when(_only_moves(row), lambda: _each(f, first, last, move))

    def block(b: Value, pool: Value, outside: Value) -> list[Value]:
        at = b * BLOCK
        next_block = at + BLOCK
        part = BlockPart(
            at, f.minimum(f.maximum(row.begin - at, 0), BLOCK), f.minimum(row.end - at, BLOCK), at % facts.ring
        )
        prepare_tokens(f, row, tokens, part, features)
        folds = (next_block < row.end) | (next_block <= row.border)
        is_target = next_block.equals(row.border)
        next_outside = f.select(is_target, f.constant(I64, 0), 1)

        def one(p: Value) -> None:
            panel = panel_at(p)
            state = state_of(panel, p, pool, outside)
            compute_panel(f, panel, state, part, features)

            def fold() -> None:
                to = state_of(panel, p, target, next_outside)
                fold_panel(f, panel, state, to, part)
                wanted = next_block.equals(row.snapshot_len) & (row.snapshot > -1)
                f.when(wanted, lambda: _copy_state(f, facts, sizes, to, in_pool(snapshot, panel)))

            f.when(folds, fold)

        _each(f, first, last, one)
        return [f.select(folds, target, pool), f.select(folds, next_outside, outside)]

    begin = f.select(is_new, f.constant(I64, 1), 0)
    f.loop((row.end + (BLOCK - 1)) // BLOCK, block, source, begin, start=row.folded // BLOCK)
    f.call("free", None, states)


def _each(f: Function, first: Value, last: Value, body: Callable[[Value], None]) -> None:
    f.loop(last, body, start=first)


def _only_moves(row: HeadOfRow) -> Value:
    """Return whether the target gets the state of the source as it is."""
    return row.border.equals(row.folded) & (row.folded > 0) & row.target.equals(row.source).equals(0)


def _copy_state(f: Function, facts: CpuDelta, sizes: PanelSizes, source: StatePart, to: StatePart) -> None:
    def copy_row(d: Value) -> None:
        own, other = (f.at(part.pointer, d * part.row_bytes) for part in (source, to))
        copy_bytes(f, other, own, sizes.row_bytes)

    f.loop(facts.key_dim, copy_row)


def _keep(f: Function, row: HeadOfRow, tokens: TokenScratch) -> None:
    """Write what the values of a key head share: inputs before borders, and the last inputs, keys and decays."""
    facts = row.facts
    before = facts.taps - 1

    def keep_tail(state: Value, border: Value) -> None:
        def keep_input(i: Value) -> None:
            to = f.at(row.tail(f, state), i * facts.row_bytes)
            copy_bytes(f, to, input_at(f, row, tokens, border - before + i), facts.row_bytes)

        f.loop(before, keep_input)

    def keep_input(position: Value) -> None:
        to = f.at(row.inputs, position % facts.recent * facts.row_bytes)
        copy_bytes(f, to, row.product(f, position), facts.row_bytes)

    def keep_token(position: Value) -> None:
        entry = position % facts.ring
        own, other = (f.at(keys, entry * (facts.key_dim * 4)) for keys in (tokens.keys, row.keys))
        copy_bytes(f, other, own, facts.key_dim * 4)
        for head in range(facts.group):
            at = (entry + head * facts.ring) * 4
            f.store(f.load(F32, tokens.sums, at), row.decays, at)

    f.when((row.border > row.folded) | _only_moves(row), lambda: keep_tail(row.target, row.border))
    f.when(row.snapshot > -1, lambda: keep_tail(row.snapshot, row.snapshot_len))
    f.loop(row.end, keep_input, start=f.maximum(row.begin, row.end - facts.recent))
    f.loop(row.end, keep_token, start=f.maximum(row.begin, row.border))
