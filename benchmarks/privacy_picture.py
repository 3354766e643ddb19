"""The picture of privacy: what it costs in accuracy, against ε, the number of clients and the size of the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.privacy_accuracy import NAMES, PLAIN, Learned, Point
from federated.privacy.section import Mechanism

COLOURS: Final[dict[Mechanism, str]] = {
    "none": "black",
    "local_gaussian": "tab:red",
    "local_laplace": "tab:orange",
    "signds": "tab:purple",
    "central_gaussian": "tab:blue",
    "distributed_gaussian": "tab:green",
    "distributed_skellam": "tab:olive",
}


def draw(learned: Learned, path: Path) -> None:
    """Write it as PNG to ``path``."""
    # Loads in half a second, and only here: whoever draws nothing should not wait for it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sizes = learned.sizes
    figure = Figure(figsize=(14.0, 4.4), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3, sharey=True)
    left.axhline(learned.plain.figures.median, color="black", linewidth=1.0, linestyle=":", label=PLAIN)
    _lines(left, learned.by_epsilon)
    _lines(middle, learned.by_clients)
    _lines(right, learned.by_weights)
    left.set_xlabel("ε of the whole job, δ = 1e-5 (log scale)")
    left.set_ylabel("% of the test rows")
    left.set_title(f"digits, {sizes.clients:,} clients, 650 weights", fontsize=10)
    middle.set_xlabel("clients (log scale)")
    middle.set_title(f"ε = {sizes.fixed:g}", fontsize=10)
    right.set_xlabel("weights of the model (log scale)")
    right.set_title(
        f"{sizes.wide_clients:,} clients, ε = {sizes.wide_epsilon:g}, {sizes.wide_rounds} rounds of a perceptron",
        fontsize=10,
    )
    for axes in (left, middle, right):
        axes.set_xscale("log")
        axes.grid(True, alpha=0.3, linewidth=0.5)
        axes.legend(fontsize=7)
    figure.savefig(path)


def _lines(axes: Any, points: Sequence[Point]) -> None:
    for mechanism, name in NAMES.items():
        own = sorted((point for point in points if point.mechanism == mechanism), key=lambda point: point.at)
        if not own:
            continue
        where, colour = [point.at for point in own], COLOURS[mechanism]
        axes.plot(
            where,
            [point.figures.median for point in own],
            label=name,
            color=colour,
            linewidth=1.4,
            marker="o",
            markersize=3,
        )
        low, high = zip(*(point.figures.spread for point in own), strict=True)
        axes.fill_between(where, low, high, color=colour, alpha=0.15, linewidth=0)
