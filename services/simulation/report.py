"""What a simulation found, as one document and as lines for people."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from federated.simulator.simulation import Row
from services.simulation.ranking import K

NOT_PRIVATE: Final = "simulated, not private: all clients' data were in this one process"
ACCURACY: Final = {
    "accuracy": ("test", "test accuracy"),
    "clients_mean": ("clients", "clients' mean"),
    "clients_worst_decile": ("worst", "worst tenth"),
}
"""What is measured of a model that names one class: the metric, its column (short, so that the table fits 80 columns)
and its full name."""
RANKING: Final = {f"recall_at_{K}": ("recall", f"Recall@{K}"), f"ndcg_at_{K}": ("ndcg", f"NDCG@{K}")}
"""Likewise of an item table."""
_LEGENDS: Final = {
    False: "test, clients, worst: accuracy on test rows, on the clients' own held-out rows and of their worst tenth",
    True: f"recall, ndcg: Recall@{K} and NDCG@{K} of what clients held out, among all items that they do not know",
}


@dataclass(frozen=True, slots=True)
class Table:
    """How a run's rows are shown: of a job with a privacy mechanism (whose clients tell no loss), which clips or does
    not (SignDS); of an item table, which ``ranks``."""

    private: bool = False
    clips: bool = True
    ranks: bool = False

    @property
    def measures(self) -> dict[str, tuple[str, str]]:
        """The metrics shown, with their short and full names."""
        return RANKING if self.ranks else ACCURACY

    def columns(self) -> tuple[str, ...]:
        """The table's head."""
        learned = ("clipped",) if self.private else ("loss",)
        return (
            *("#", "valid", "counted"),
            *(learned if self.clips or not self.private else ()),
            *(short for short, _ in self.measures.values()),
            *("up", "down", "time"),
            *(("eps",) if self.private else ()),
        )

    def legend(self) -> str:
        """What the columns mean."""
        return f"counted: uploads of starts; {_LEGENDS[self.ranks]}; time: virtual"

    def cells(self, row: Row) -> tuple[str, ...]:
        """A row under ``columns``."""
        learned = (
            () if self.private and not self.clips else (share(row.clipped) if self.private else _loss(row),)
        )
        return (
            str(row.iteration),
            *_counted(row),
            *learned,
            *self._measured(row),
            *_moved(row),
            *(("" if row.epsilon is None else f"{row.epsilon:.3f}",) if self.private else ()),
        )

    def _measured(self, row: Row) -> tuple[str, ...]:
        metrics = row.metrics or {}
        return tuple((figure if self.ranks else share)(metrics.get(name)) for name in self.measures)

    def line(self, row: Row) -> str:
        """A row as one line."""
        names = (
            *("valid", "counted", "loss"),
            *(long for _, long in self.measures.values()),
            *("up", "down", "virtual time"),
        )
        values = (*_counted(row), _loss(row), *self._measured(row), *_moved(row))
        text = ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True) if value)
        if row.clipped is not None:
            text += f", clipped {share(row.clipped)}"
        if row.epsilon is not None:
            text += f", epsilon {row.epsilon:.3f}"
        refused = "".join(f", refused {count} ({rule})" for rule, count in (row.refused or {}).items())
        return f"iteration {row.iteration}: {text}{refused}" + (f": {row.failure}" if row.failure else "")


def _counted(row: Row) -> tuple[str, str]:
    return "yes" if row.valid else row.why.replace("_", " "), f"{row.uploads}/{row.starts}"


def _loss(row: Row) -> str:
    return "" if row.loss is None else f"{row.loss:.4f}"


def _moved(row: Row) -> tuple[str, str, str]:
    return size(row.bytes_up), size(row.bytes_down), duration(row.closed_s)


def totals(rows: Sequence[Row]) -> dict[str, Any]:
    """Sums over a run."""
    return {
        "iterations": len(rows),
        "valid": sum(row.valid for row in rows),
        "starts": sum(row.starts for row in rows),
        "trained": sum(row.trained for row in rows),
        "dropped": sum(row.dropped for row in rows),
        "late": sum(row.late for row in rows),
        "refused": dict(sum((Counter(row.refused or {}) for row in rows), Counter[str]())),
        "bytes_up": sum(row.bytes_up for row in rows),
        "bytes_down": sum(row.bytes_down for row in rows),
        "virtual_s": rows[-1].closed_s if rows else 0.0,
        "wall_s": sum(row.wall_s for row in rows),
    }


def document(
    job: Mapping[str, Any],
    data: Mapping[str, Any],
    engine: str,
    rows: Sequence[Row],
    final: Mapping[str, Any],
    privacy: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """All of it, as JSON holds it; ``privacy`` is the statement on the job's mechanism."""
    return {
        "simulated": True,
        "private": False,
        "note": NOT_PRIVATE,
        "job": job,
        "data": data,
        "engine": engine,
        "totals": totals(rows),
        "rows": [asdict(row) for row in rows],
        "final": final,
        **({} if privacy is None else {"privacy": privacy}),
    }


def csv_of(rows: Sequence[Row]) -> str:
    """The rows as comma-separated values, a figure a column; what a row does not have is empty."""
    flat = [{**_plain(row), **_metrics(row)} for row in rows]
    names = list(dict.fromkeys(name for one in flat for name in one))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _plain(row: Row) -> dict[str, Any]:
    values = {**asdict(row), "refused": sum((row.refused or {}).values())}
    del values["metrics"]
    return values


def _metrics(row: Row) -> dict[str, Any]:
    return {
        f"metrics.{name}": value
        for name, value in (row.metrics or {}).items()
        if isinstance(value, int | float | None)
    }


def summary(rows: Sequence[Row], final: Mapping[str, Any]) -> list[str]:
    """Lines for people, after the table."""
    found = totals(rows)
    lines = [
        f"{found['valid']} of {found['iterations']} iterations were valid; {found['trained']:,} updates of "
        f"{found['starts']:,} starts counted in {duration(found['virtual_s'])} of virtual time, "
        f"{found['wall_s']:.1f} s here",
        f"sent {size(found['bytes_up'])} up and {size(found['bytes_down'])} down",
    ]
    if refused := found["refused"]:
        rules = ", ".join(f"{count:,} by rule {rule}" for rule, count in sorted(refused.items()))
        lines.append(
            f"uploads refused: {rules}; training diverges there: lower training.rate, or set training.clip_norm"
        )
    failures = [row.failure for row in rows if row.failure]
    if failures:
        lines.append(f"{len(failures)} iterations made no version, the last because {failures[-1]}")
    spread, against = final.get("distribution"), final.get("global_against_local")
    if spread is not None:
        lines.append(
            f"clients' own held-out data: mean {share(spread['mean'])}, worst tenth {share(spread['worst_decile'])}, "
            f"median {share(spread['quantiles']['0.5'])} over {spread['clients']:,} clients"
        )
    if against is not None:
        lines.append(
            f"against a model trained alone with the same work ({against['together']['clients']} clients): "
            f"{share(against['together']['mean'])} together, {share(against['alone']['mean'])} alone; "
            f"better for {share(against['served_better'])}, worse for {share(against['served_worse'])}"
        )
    if ranking := final.get("ranking"):
        ours, popular = ranking["model"], ranking["popular"]
        lines.append(
            f"{ranking['held_out']:,} held-out items among {ranking['items']:,}: Recall@{ranking['k']} "
            f"{figure(ours['recall'])}, NDCG@{ranking['k']} {figure(ours['ndcg'])}; "
            f"popular: {figure(popular['recall'])}, {figure(popular['ndcg'])}"
        )
    return [*lines, NOT_PRIVATE]


def share(value: float | None) -> str:
    """As a percentage."""
    return "" if value is None else f"{100.0 * value:.1f}%"


def figure(value: float | None) -> str:
    """To three places, as tables of ranking measures have it."""
    return "" if value is None else f"{value:.3f}"


def size(count: int) -> str:
    """Bytes for people."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000.0:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000.0
    return f"{amount:.1f} TB"


def duration(seconds: float) -> str:
    """Seconds for people."""
    for unit, length in (("d", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"
