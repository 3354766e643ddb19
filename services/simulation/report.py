"""What a simulation found, as one document and as lines for people."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from federated.simulator.simulation import Row

NOT_PRIVATE: Final = "simulated, not private: all clients' data were in this one process"
COLUMNS: Final = ("#", "valid", "counted", "loss", "test", "clients", "worst", "up", "down", "time")
"""Short, so that the table fits 80 columns; ``line`` says them in full."""
PRIVATE_COLUMNS: Final = (*COLUMNS[:3], "clipped", *COLUMNS[4:], "eps")
"""Of a job with a privacy mechanism, whose clients tell no loss; "clipped" is left out where nothing is (SignDS)."""
_IN_FULL: Final = (
    "iteration", "valid", "counted", "loss", "test accuracy", "clients' mean", "worst tenth", "up", "down",
    "virtual time",
)  # fmt: skip
LEGEND: Final = (
    "counted: uploads of starts; test, clients, worst: accuracy on test rows, on the clients' own held-out rows and "
    "of their worst tenth; time: virtual"
)


def columns(private: bool, clips: bool = True) -> tuple[str, ...]:
    """The table's, of a job with or without a privacy mechanism, which clips or does not."""
    chosen = PRIVATE_COLUMNS if private else COLUMNS
    return chosen if clips or not private else tuple(name for name in chosen if name != "clipped")


def cells(row: Row, private: bool = False, clips: bool = True) -> tuple[str, ...]:
    """A row under ``columns``."""
    metrics = row.metrics or {}
    loss = "" if row.loss is None else f"{row.loss:.4f}"
    learned = () if private and not clips else (share(row.clipped) if private else loss,)
    return (
        str(row.iteration),
        "yes" if row.valid else row.why.replace("_", " "),
        f"{row.uploads}/{row.starts}",
        *learned,
        *(share(metrics.get(name)) for name in ("accuracy", "clients_mean", "clients_worst_decile")),
        size(row.bytes_up),
        size(row.bytes_down),
        duration(row.closed_s),
        *(("" if row.epsilon is None else f"{row.epsilon:.3f}",) if private else ()),
    )


def line(row: Row) -> str:
    """A row as one line."""
    named = zip(_IN_FULL[1:], cells(row)[1:], strict=True)
    text = ", ".join(f"{name} {cell}" for name, cell in named if cell)
    if row.clipped is not None:
        text += f", clipped {share(row.clipped)}"
    if row.epsilon is not None:
        text += f", epsilon {row.epsilon:.3f}"
    refused = "".join(f", refused {count} ({rule})" for rule, count in (row.refused or {}).items())
    return f"iteration {row.iteration}: {text}{refused}" + (f": {row.failure}" if row.failure else "")


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
    return [*lines, NOT_PRIVATE]


def share(value: float | None) -> str:
    """As a percentage."""
    return "" if value is None else f"{100.0 * value:.1f}%"


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
