"""Plain-text tables for a terminal, used by every command and benchmark."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[int] = (0,)) -> str:
    """Return rows under a header; the columns in `left` are aligned left, the others right."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width) for i, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    )


def format_records(records: Sequence[Mapping[str, Any]], columns: Sequence[str] = (), *, decimals: int = 3) -> str:
    """Return one row per record, under the keys of the first or `columns`, with a dash for None and missing values."""
    names = columns or list(records[0])

    def cell(value: Any) -> str:
        return f"{value:.{decimals}f}" if isinstance(value, float) else "-" if value is None else str(value)

    return format_table(names, [[cell(record.get(name)) for name in names] for record in records], left=())


def format_range(numbers: Iterable[float | None], form: str = "{:g}") -> str:
    """Return one number, or the smallest and the largest of several; a dash if any is unknown."""
    found = list(numbers)
    known = [number for number in found if number is not None]
    if not known or len(known) < len(found):
        return "-"
    return "-".join(dict.fromkeys(form.format(number) for number in (min(known), max(known))))
