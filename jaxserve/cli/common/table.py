"""Plain columns for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[int] = (0,)) -> str:
    """Rows under a header; the columns in `left` are set to the left, the others to the right."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width) for i, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    )


def span(numbers: Iterable[float | None], form: str = "{:g}") -> str:
    """One number, or the least and the greatest of several; a dash where one isn't known."""
    found = list(numbers)
    known = [number for number in found if number is not None]
    if not known or len(known) < len(found):
        return "-"
    return "-".join(dict.fromkeys(form.format(number) for number in (min(known), max(known))))
