"""Reports of joint jobs as tables for people: how good the model is, and what each party saw."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from services.vertical.config import ConfigRefused

SEEN: Final = ("party", "from", "message", "count", "bytes", "what it learns")
PARTIES: Final = ("party", "role", "seconds", "attempts", "sent", "received")
MOST_SHOWN: Final = 50
"""Rows of such a table; its file and --format json have all."""
Rows = list[tuple[str, ...]]


def read_reports(path: Path) -> dict[str, Any]:
    """The report of a run in ``path``: its ``report.json``, or a folder that holds one (a party's state, a trial's).

    Raises ConfigRefused.
    """
    file = path
    if path.is_dir():
        own = path / "report.json"
        found = [own] if own.exists() else sorted(path.glob("**/report.json"))
        if not found:
            raise ConfigRefused(
                f"there is no report.json in {path}; a run leaves it when all parties are done"
            )
        file = max(found, key=lambda one: one.stat().st_mtime_ns)
    try:
        text = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigRefused(f"{file} cannot be read as a report: {error}") from error
    if not isinstance(text, dict) or not ({"parties", "figures"} & text.keys()):
        raise ConfigRefused(f"{file} is no report of a joint job")
    # A single party's own report: as a run in which nobody else is heard.
    return (
        text
        if "figures" not in text
        else {"job": {"what": text["job"]}, "parties": {text["party"]: text}, "pooled": {}}
    )


def tables(report: Mapping[str, Any]) -> list[tuple[str, Sequence[str], Rows]]:
    """Titles, columns and rows."""
    parties: Mapping[str, Any] = report["parties"]
    found: list[tuple[str, Sequence[str], Rows]] = []
    quality = list(_quality(report))
    if quality:
        names = list(dict.fromkeys(name for _, values in quality for name in values))
        rows = [(label, *(_number(values.get(name)) for name in names)) for label, values in quality]
        found.append(("Held-out rows", ("model", *names), rows))
    found.append(("Parties", PARTIES, [_party(name, one) for name, one in parties.items()]))
    figures: Rows = [
        (name, key, _number(value))
        for name, one in parties.items()
        for key, value in one["figures"].items()
        if not key.startswith(("test ", "fallback ")) and key != "run"
    ]
    if figures:
        found.append(("Figures", ("party", "figure", "value"), figures))
    for name, one in parties.items():
        for title, shown in one.get("tables", {}).items():
            found.append((f"{title}, at {name}", *_columns(shown)))
    found.append(
        ("What each party saw", SEEN, [row for name, one in parties.items() for row in _seen(name, one)])
    )
    return found


def _columns(shown: Sequence[Mapping[str, Any]]) -> tuple[Sequence[str], Rows]:
    """Columns and rows of a table that a party's kind of job left as objects."""
    names = list(dict.fromkeys(name for row in shown for name in row))
    rows: Rows = []
    for row in shown[:MOST_SHOWN]:
        cells = (row.get(name) for name in names)
        rows.append(
            tuple(("yes" if cell else "no") if isinstance(cell, bool) else _number(cell) for cell in cells)
        )
    if len(shown) > MOST_SHOWN:
        rows.append(tuple("…" for _ in names))
    return names, rows


def _quality(report: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, one in report["parties"].items():
        for prefix, label in (("test ", "joint"), ("fallback ", f"{name}'s part without the others")):
            values = {
                key.removeprefix(prefix): value
                for key, value in one["figures"].items()
                if key.startswith(prefix)
            }
            if values:
                yield label, values
        for model, values in one.get("alone", {}).items():
            yield f"{name} alone, {model}", values
    for model, values in report.get("pooled", {}).items():
        yield f"all tables pooled, {model}", values


def _party(name: str, one: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        name,
        str(one["role"]),
        f"{one['seconds']:.1f}",
        str(one["attempts"]),
        _bytes(one["bytes_sent"]),
        _bytes(one["bytes_received"]),
    )


def _seen(name: str, one: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for row in one["received"]:
        yield name, row["from"], row["kind"], str(row["messages"]), _bytes(row["bytes"]), row["learns"]


def _number(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    # Errors are in the labels' unit, whatever that is.
    return f"{value:.4f}" if value == 0 or 0.01 <= abs(value) < 1e6 else f"{value:.4g}"


def _bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
