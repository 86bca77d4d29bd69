"""The plot of a sweep: throughput against latency with the Pareto front, as PNG. Figures come from `summary.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxserve.bench.sweep.summary import THROUGHPUT, SummaryRow, pareto_rows
from jaxserve.errors import ConfigError

FIGURE_NAMES = {
    "output_throughput": "output tokens/s",
    "request_throughput": "requests/s",
    "total_token_throughput": "all tokens/s",
    "request_goodput": "requests/s within the limits",
    "median_ttft_ms": "TTFT median, ms",
    "p99_ttft_ms": "TTFT p99, ms",
    "median_tpot_ms": "TPOT median, ms",
    "p99_tpot_ms": "TPOT p99, ms",
    "median_e2el_ms": "end-to-end median, ms",
    "p99_e2el_ms": "end-to-end p99, ms",
    "p99_itl_ms": "ITL p99, ms",
}
_COLORS = ("#2a78d6", "#d9622b", "#1f9e72", "#b8860b", "#8e5bd0", "#d0457f", "#4f8f1f", "#6b7280")
_MARKERS = ("o", "s", "^", "D")
_PANELS = ("median_ttft_ms", "median_tpot_ms", "median_e2el_ms")
_MAX_LEGEND = 24


def require_matplotlib() -> None:
    """Raise `ConfigError` that names the extra to install if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            "plots.png needs matplotlib: pip install 'jaxserve[bench]', or skip it with --no-png"
        ) from None


def write_png(rows: Sequence[SummaryRow], path: Path) -> None:
    """Draw one panel for each median latency."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5.6), dpi=120, layout="constrained")
    engines = list(dict.fromkeys(row.engine for row in rows))
    for axes, latency in zip(figure.subplots(1, len(_PANELS)), _PANELS):
        _draw(axes, rows, latency)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if len(engines) > _MAX_LEGEND:
        handles, labels = handles[:_MAX_LEGEND], [*labels[: _MAX_LEGEND - 1], "… see summary.csv"]
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False)
    part = path.with_name(path.name + ".part")
    figure.savefig(part, format="png")
    part.replace(path)


def _draw(axes: Any, rows: Sequence[SummaryRow], latency: str) -> None:
    for engine in dict.fromkeys(row.engine for row in rows):
        own = [row for row in rows if row.engine == engine and latency in row.figures and THROUGHPUT in row.figures]
        own.sort(key=lambda row: row.figures[THROUGHPUT])
        if own:
            axes.errorbar(
                [row.figures[latency] for row in own],
                [row.figures[THROUGHPUT] for row in own],
                xerr=[row.spreads.get(latency, 0.0) for row in own],
                yerr=[row.spreads.get(THROUGHPUT, 0.0) for row in own],
                color=_COLORS[engine % len(_COLORS)],
                marker=_MARKERS[engine // len(_COLORS) % len(_MARKERS)],
                label=own[0].label,
                linewidth=1.5,
                alpha=0.85,
            )
    best = [rows[i] for i in pareto_rows(rows, latency)]
    axes.plot(
        [row.figures[latency] for row in best],
        [row.figures[THROUGHPUT] for row in best],
        color="#1b1b1a",
        linestyle="--",
        linewidth=1.2,
        marker="o",
        markersize=12,
        markerfacecolor="none",
        label="Pareto front",
    )
    axes.set_xlabel(FIGURE_NAMES[latency])
    axes.set_ylabel(FIGURE_NAMES[THROUGHPUT])
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(color="#dddcd6", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
