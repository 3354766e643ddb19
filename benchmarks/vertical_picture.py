"""The picture of joint models: AUC of each job beside the pooled model's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.report import Row

UNIT: Final = "AUC"
_END: Final = ": AUC"


def shown(rows: Sequence[Row]) -> list[Row]:
    """Those that are in the picture: an AUC beside a pooled model's."""
    return [row for row in rows if row.unit == UNIT and row.peer is not None and row.work.endswith(_END)]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write it as PNG to ``path``."""
    # Loads in half a second, and only here: whoever draws nothing should not wait for it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = shown(rows)
    figure = Figure(figsize=(9.0, 1.2 + 0.5 * len(found)), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, row in enumerate(found):
        assert row.peer is not None
        axes.plot([row.ours, row.peer], [place, place], color="0.75", linewidth=2.0, zorder=1)
        if row.aim is not None:
            axes.plot([row.aim], [place], "|", color="tab:red", markersize=14, label=_once("aim", place))
        axes.plot([row.peer], [place], "o", color="black", markersize=5, label=_once("pooled", place))
        axes.plot([row.ours], [place], "D", color="tab:blue", markersize=6, label=_once("joint", place))
    axes.set_yticks(range(len(found)), [row.work.removesuffix(_END) for row in found], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("AUC on held-out rows")
    axes.grid(True, axis="x", alpha=0.3, linewidth=0.5)
    if found:
        axes.legend(fontsize=8)
    figure.savefig(path)


def _once(label: str, place: int) -> str:
    """A label for the legend, which each mark has once; those that begin with _ are left out."""
    return label if place == 0 else f"_{label}"
