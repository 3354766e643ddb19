"""The picture of the ablation: seconds from written to held, by way, on a logarithmic axis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.outcomes import Outcome


def draw(outcomes: Sequence[Outcome], baselines: int, title: str, path: Path) -> None:
    """Write it as PNG to ``path``. The last ``baselines`` of ``outcomes`` are other ways."""
    # Loads in half a second, and only here: whoever draws nothing should not wait for it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 1.6 + 0.5 * len(outcomes)), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places = list(range(len(outcomes), 0, -1))
    steps = len(outcomes) - baselines
    colours = ["#1565c0"] * steps + ["#9e9e9e"] * baselines
    means = [one.between.mean_s for one in outcomes]
    axes.barh(places, means, color=colours, height=0.6)
    axes.scatter(
        [one.between.p99_s for one in outcomes], places, marker="|", s=160, color="#c62828", label="p99"
    )
    inside = [one.inside.mean_s for one in outcomes]
    axes.scatter(
        inside, places, marker="o", s=24, color="#f9a825", zorder=3, label="inside the writing region, mean"
    )
    for place, one in zip(places, outcomes, strict=True):
        least = "≥ " if one.between.unfinished else ""
        right = max(one.between.mean_s, one.between.p99_s) * 1.15
        axes.text(right, place, f"{least}{_seconds(one.between.mean_s)}", va="center")
    axes.set_yticks(places, [one.name for one in outcomes])
    axes.set_xscale("log")
    axes.set_xlim(min([*inside, *means]) * 0.5, max(one.between.p99_s for one in outcomes) * 12.0)
    axes.set_xlabel("s from written to held by a replica of another region, mean (simulated, log scale)")
    axes.set_title(title, fontsize=10)
    axes.grid(True, axis="x", which="major", alpha=0.3, linewidth=0.5)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path)


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 100.0 else f"{value:.2g} s"
