"""The picture of joint models: AUC of each job beside the pooled model's, and of a transfer by how many users are
common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.report import Row
from benchmarks.vertical_transfer import Curve
from federated.vertical.transfer.curve import Point

UNIT: Final = "AUC"
_END: Final = ": AUC"
_TRANSFER: Final = "transfer"


def shown(rows: Sequence[Row]) -> list[Row]:
    """Those that are in the picture: an AUC beside a pooled model's."""
    return [
        row
        for row in rows
        if row.unit == UNIT
        and row.peer is not None
        and row.work.endswith(_END)
        and not row.work.startswith(_TRANSFER)
    ]


def draw(rows: Sequence[Row], curves: Sequence[Curve], path: Path) -> None:
    """Write it as PNG to ``path``."""
    # Loads in half a second, and only here: whoever draws nothing should not wait for it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.0, 5.0), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _jobs(left, shown(rows))
    _curves(right, curves)
    figure.savefig(path)


def _jobs(axes: Any, found: Sequence[Row]) -> None:
    for place, row in enumerate(found):
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


def _curves(axes: Any, curves: Sequence[Curve]) -> None:
    for curve, colour in zip(curves, ("tab:blue", "tab:orange", "tab:green"), strict=False):
        shares = [100 * points[0].share for points in curve.points]
        kinds: tuple[tuple[str, str, str, Callable[[Point], float]], ...] = (
            (f"{curve.name}: transfer", "D", "-", lambda point: point.transfer),
            ("stacked with the host's own", "s", "--", lambda point: point.stacked),
            ("host alone, best", "o", ":", lambda point: point.best_alone),
        )
        for label, marker, line, of in kinds:
            reached = np.array([[of(point) for point in points] for points in curve.points])
            middle = np.median(reached, axis=1)
            # From the worst seed to the best.
            spread = np.abs(np.stack([reached.min(axis=1), reached.max(axis=1)]) - middle)
            axes.errorbar(
                shares, middle, spread, color=colour, marker=marker, markersize=4, linestyle=line,
                capsize=2, elinewidth=0.7, label=label,
            )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlabel("% of the guest's users common (log scale)")
    axes.set_ylabel("AUC over the host's other users")
    axes.grid(True, alpha=0.3, linewidth=0.5)
    if curves:
        # Below: no corner is free of curves.
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=len(curves))


def _once(label: str, place: int) -> str:
    """A label for the legend, which each mark has once; those that begin with _ are left out."""
    return label if place == 0 else f"_{label}"
