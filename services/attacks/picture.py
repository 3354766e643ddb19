"""Attacks as a picture: how often records are named, and ROC curves of membership."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from federated.attacks.contest import InversionRow, MembershipRow, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS: Final = ("#1565c0", "#ef6c00", "#2e7d32")
_SMALLEST: Final = 1e-4
_COLOUR_CYCLE: Final = 10


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write the picture as PNG to ``path``."""
    # Loads in half a second, and only here: whoever draws nothing should not wait for it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    named = [row for row in rows if isinstance(row, InversionRow)]
    members = [row for row in rows if isinstance(row, MembershipRow)]
    panels = [panel for panel in (named, members) if panel]
    tallest = max((len(panel) for panel in panels), default=0)
    figure = Figure(figsize=(10.0 * max(1, len(panels)), 4.0 + 0.2 * tallest), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, max(1, len(panels)), squeeze=False)[0].tolist()
    if named:
        _bars(axes.pop(0), named)
    if members:
        _curves(axes.pop(0), members)
    figure.suptitle(title)
    figure.savefig(path)


def _bars(axes: Axes, rows: Sequence[InversionRow]) -> None:
    clients = list(dict.fromkeys(row.client for row in rows))
    lines = list(dict.fromkeys((row.line.label, row.line.adversary, row.line.sees) for row in rows))
    height = 0.8 / len(clients)
    for place, client in enumerate(clients):
        of_client = [row for row in rows if row.client == client]
        at = [
            lines.index((row.line.label, row.line.adversary, row.line.sees)) + place * height
            for row in of_client
        ]
        rates = [row.found.top_1 for row in of_client]
        axes.barh(
            at,
            [max(rate.value, _SMALLEST) for rate in rates],
            height,
            color=_COLOURS[place % len(_COLOURS)],
            label="1 record" if client.records == 1 else f"{client.records} records, knows {client.knows}",
        )
        axes.hlines(
            at, [max(rate.low, _SMALLEST) for rate in rates], [rate.high for rate in rates], "black", lw=0.8
        )
    axes.axvline(1.0 / rows[0].found.candidates, color="grey", linestyle="--", label="chance")
    axes.set_yticks(
        [place + 0.4 - height / 2 for place in range(len(lines))],
        [_line(*line) for line in lines],
        fontsize=8,
    )
    axes.invert_yaxis()
    axes.set(title="inversion: the record is named at once", xlabel="rate (with 95 % interval)", xscale="log")
    axes.legend(fontsize=8)


def _line(label: str, adversary: str, sees: str) -> str:
    return f"{label}\n{adversary}: {sees}"


def _curves(axes: Axes, rows: Sequence[MembershipRow]) -> None:
    for place, row in enumerate(rows):
        false, true = row.found.curve
        axes.plot(
            false,
            true,
            linestyle="-" if place < _COLOUR_CYCLE else ":",
            label=f"{row.line.label}, {row.line.adversary}: {row.found.told.auc.value:.2f}",
        )
    axes.plot([0, 1], [0, 1], color="grey", linestyle="--", label="chance")
    axes.set(title="membership, area under the curve", xlabel="false positives", ylabel="true positives")
    axes.legend(fontsize=8)
