"""The curves of a simulation: quality over iterations and over virtual time, loss, bytes, and the spread at the end;
under a privacy mechanism also what privacy has cost, and quality over that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from federated.simulator.simulation import Row
from services.simulation.report import NOT_PRIVATE, RANKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CURVES: Final = (
    ("accuracy", "test rows", "#1565c0"),
    ("clients_mean", "clients' own rows, mean", "#2e7d32"),
    ("clients_worst_decile", "worst tenth of the clients", "#c62828"),
    *(
        (metric, name, colour)
        for (metric, (_, name)), colour in zip(RANKING.items(), ("#1565c0", "#2e7d32"), strict=True)
    ),
)
_HOUR_S: Final = 3_600.0


def draw(rows: Sequence[Row], final: Mapping[str, Any], title: str, path: Path) -> None:
    """Write the picture as PNG to ``path``."""
    # Loads in half a second, and only here: whoever draws nothing should not wait for it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    private = any(row.epsilon is not None for row in rows)
    ranks = final.get("ranking") is not None
    figure = Figure(figsize=(20.0 if private else 15.0, 8.4), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 4 if private else 3).ravel()
    _quality(axes[0], rows, [float(row.iteration) for row in rows], "iteration", ranks)
    _quality(axes[1], rows, [row.closed_s / _HOUR_S for row in rows], "virtual time, hours", ranks)
    _loss(axes[2], rows)
    _bytes(axes[3], rows)
    _uploads(axes[4], rows)
    if ranks:
        _ranking(axes[5], final["ranking"])
    else:
        _spread(axes[5], final)
    if private:
        known = [row for row in rows if row.epsilon is not None]
        _quality(axes[6], known, [row.epsilon or 0.0 for row in known], "ε spent", ranks)
        _epsilon(axes[7], known)
    figure.suptitle(f"{title} ({NOT_PRIVATE})")
    figure.savefig(path)


def _quality(axes: Axes, rows: Sequence[Row], places: Sequence[float], label: str, ranks: bool) -> None:
    for name, said, colour in _CURVES:
        known = [
            (place, 100.0 * row.metrics[name])
            for place, row in zip(places, rows, strict=True)
            if row.metrics and row.metrics.get(name) is not None
        ]
        if known:
            axes.plot(
                *zip(*known, strict=True), label=said, color=colour, marker="." if len(known) < 30 else ""
            )
    if ranks:
        axes.set(title="held-out items found", xlabel=label, ylabel="%")
    else:
        axes.set(title="accuracy", xlabel=label, ylabel="right answers, %")
    _finish(axes)


def _loss(axes: Axes, rows: Sequence[Row]) -> None:
    for said, colour, known in (
        (
            "clients, while training",
            "#ef6c00",
            [(row.iteration, row.loss) for row in rows if row.loss is not None],
        ),
        (
            "test rows",
            "#1565c0",
            [
                (r.iteration, r.metrics["loss"])
                for r in rows
                if r.metrics and r.metrics.get("loss") is not None
            ],
        ),
    ):
        if known:
            axes.plot(*zip(*known, strict=True), label=said, color=colour)
    axes.set(title="loss", xlabel="iteration", ylabel="cross-entropy, nats")
    _finish(axes)


def _bytes(axes: Axes, rows: Sequence[Row]) -> None:
    iterations = [row.iteration for row in rows]
    for said, colour, amounts in (
        ("up", "#6a1b9a", [row.bytes_up for row in rows]),
        ("down", "#00838f", [row.bytes_down for row in rows]),
    ):
        axes.plot(iterations, [amount / 1e6 for amount in accumulate(amounts)], label=said, color=colour)
    axes.set(title="bytes sent so far", xlabel="iteration", ylabel="MB")
    _finish(axes)


def _epsilon(axes: Axes, rows: Sequence[Row]) -> None:
    iterations = [row.iteration for row in rows]
    axes.plot(iterations, [row.epsilon or 0.0 for row in rows], color="#37474f", label="ε spent")
    axes.set(title="what privacy has cost", xlabel="iteration", ylabel="ε")
    axes.set_ylim(bottom=0.0)
    clipped = [(row.iteration, 100.0 * row.clipped) for row in rows if row.clipped is not None]
    if clipped:
        beside = axes.twinx()
        beside.plot(*zip(*clipped, strict=True), color="#ef6c00", linestyle=":", label="updates clipped")
        beside.set(ylabel="updates clipped, %", ylim=(0.0, 100.0))
        beside.legend(loc="lower right")
    _finish(axes)


def _uploads(axes: Axes, rows: Sequence[Row]) -> None:
    iterations = [row.iteration for row in rows]
    axes.plot(iterations, [row.starts for row in rows], label="starts", color="#9e9e9e")
    axes.plot(iterations, [row.uploads for row in rows], label="uploads counted", color="#2e7d32")
    for place, row in enumerate(row for row in rows if not row.valid):
        axes.axvline(row.iteration, color="#c62828", alpha=0.4, label="" if place else "invalid")
    axes.set(title="clients of an iteration", xlabel="iteration", ylabel="clients")
    _finish(axes)


def _spread(axes: Axes, final: Mapping[str, Any]) -> None:
    spread = final.get("distribution")
    if spread is not None:
        counts = spread["histogram"]
        width = 100.0 / len(counts)
        axes.bar([width * (bin_ + 0.5) for bin_ in range(len(counts))], counts, width * 0.9, color="#2e7d32")
    axes.set(
        title="clients at the end, by accuracy on their own rows", xlabel="right answers, %", ylabel="clients"
    )
    axes.grid(alpha=0.3)


def _ranking(axes: Axes, ranking: Mapping[str, Any]) -> None:
    for shift, (whose, colour) in enumerate((("model", "#1565c0"), ("popular", "#9e9e9e"))):
        values = [100.0 * ranking[whose][measure] for measure in ("recall", "ndcg")]
        axes.bar([0.4 * shift + place for place in range(2)], values, 0.35, label=whose, color=colour)
    axes.set(title="held-out items found at the end", ylabel="%")
    axes.set_xticks([0.2, 1.2], [f"Recall@{ranking['k']}", f"NDCG@{ranking['k']}"])
    _finish(axes)


def _finish(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
