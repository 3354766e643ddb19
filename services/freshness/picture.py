"""The picture of a measurement: per region, how many of the probes had reached each stage by when."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Final

from services.freshness.report import Report, Row, percentiles
from services.freshness.stages import REGIONAL, Stage

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS: Final[dict[Stage, str]] = {
    "accepted": "#9e9e9e",
    "processed": "#8d6e63",
    "trained": "#f9a825",
    "applied": "#ef6c00",
    "parameters": "#1565c0",
    "recommendations": "#2e7d32",
}
_COLUMNS: Final = 3
_LEAST_MS: Final = 0.1


def draw(of: Report, path: Path) -> None:
    """Write the picture as PNG to ``path``."""
    # Loads in half a second, and only here: whoever draws nothing should not wait for it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    columns = min(_COLUMNS, max(len(of.regions), 1))
    rows = math.ceil(len(of.regions) / columns)
    figure = Figure(figsize=(max(7.0, 5.4 * columns), 1.2 + 4.2 * rows), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
    least_ms, most_ms = _span(of)
    for place, region in enumerate(of.regions):
        _draw_region(axes[place], of, region)
        axes[place].set_xlim(least_ms, most_ms)
        axes[place].tick_params(labelbottom=True)
        axes[place].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for spare in axes[len(of.regions) :]:
        spare.set_visible(False)
    figure.suptitle(
        f"Freshness at {of.rate:g} probes/s of each kind for {of.seconds:g} s (events are sent to {of.home})"
    )
    figure.supxlabel("ms since the probe was due to be sent (log scale)")
    figure.supylabel("probes that had reached the stage, %")
    figure.savefig(path)


def _span(of: Report) -> tuple[float, float]:
    curves = [row.curve_ms for row in of.rows if row.curve_ms]
    least = min((curve[1] for curve in curves), default=1.0)
    most = max((curve[-1] for curve in curves), default=of.slo_ms)
    return max(least, _LEAST_MS) * 0.8, max(most, of.slo_ms) * 1.6


def _draw_region(axes: Axes, of: Report, region: str) -> None:
    for row in of.rows:
        if row.region not in (None, region):
            continue
        own = row.stage in REGIONAL
        axes.plot(
            [max(value, _LEAST_MS) for value in row.curve_ms],
            _reached(row),
            color=_COLOURS[row.stage],
            linestyle="-" if row.kind == "event" else "--",
            linewidth=2.2 if own else 1.2,
            alpha=1.0 if own else 0.8,
            label=_label(row),
        )
    axes.axvline(of.slo_ms, color="#c62828", linewidth=1.2, linestyle=":")
    axes.text(of.slo_ms, 2, f"SLO {of.slo_ms / 1e3:g} s ", color="#c62828", fontsize=8, ha="right")
    axes.set_xscale("log")
    axes.set_ylim(0, 101)
    axes.set_title(f"region {region}", fontsize=10)
    axes.grid(True, which="both", alpha=0.25, linewidth=0.5)
    axes.legend(fontsize=7, loc="upper left", framealpha=0.85)


def _reached(row: Row) -> list[float]:
    """Percent of all that were sent, at each time of ``curve_ms``: those that are missing keep a curve below 100.
    Empty where nothing reached the stage, of which the legend alone tells."""
    if not row.curve_ms:
        return []
    return [percent * (row.sent - row.missing) / row.sent for percent in percentiles()]


def _label(row: Row) -> str:
    if row.ms is None:
        return f"{row.kind}: {row.stage}, none of {row.sent:,}"
    missing = f", {row.missing:,} missing" if row.missing else ""
    return f"{row.kind}: {row.stage}, p99 {row.ms.p99_ms:,.0f} ms{missing}"
