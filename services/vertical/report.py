"""Reports of joint jobs as tables for people: how good the model is, how it was protected, what each party saw.

A report (JSON) has ``job`` (its settings), ``parties`` (each party's own report, by name) and ``pooled`` (measures of
plain models that saw all tables, where a trial made them). A party's has ``format``, ``at``, ``party``, ``role``,
``job``, ``settings`` (defaults included), ``parties``, ``seconds``, ``attempts``, ``bytes_sent``, ``bytes_received``,
``figures``, ``curves`` (by epoch), ``tables``, ``alone`` (measures of its own plain models), ``sent`` and ``received``
(by peer and kind of message: how many, bytes, and what the receiver learns from them). Messages and seconds are counted
over restarts, but for what a killed process did after its last checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from services.vertical.config import ConfigRefused
from services.vertical.protections import is_protection, protections
from services.vertical.remarks import HELD_OUT, remarks

SEEN: Final = ("party", "from", "message", "count", "bytes", "what it learns")
PARTIES: Final = ("party", "role", "seconds", "attempts", "sent", "received")
SIZES: Final = ("own rows", "own columns", "joint rows", HELD_OUT)
ALIGNMENT: Final = "alignment: "
MOST_SHOWN: Final = 50
"""Rows of such a table; its file and --format json have all."""
FORMAT: Final = 1
"""Of the JSON: rises when a field changes its meaning or goes; fields that come do not change it."""
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
    if "figures" in text:
        # A single party's own report: as a run in which nobody else is heard.
        whole = {"job": {"what": text.get("job")}, "parties": {str(text.get("party")): text}, "pooled": {}}
    else:
        whole = text
    try:
        found = msgspec.convert(whole, _Report)
    except msgspec.ValidationError as error:
        raise ConfigRefused(f"{file} is no report of a joint job: {error}") from error
    newest = max((one.format for one in found.parties.values()), default=0)
    if newest > FORMAT:
        raise ConfigRefused(f"{file} has the format {newest}, this version reads {FORMAT}; take a newer one")
    return whole


class _Seen(msgspec.Struct, rename={"sender": "from"}):
    sender: str
    kind: str
    messages: int
    bytes: int
    learns: str


class _Party(msgspec.Struct):
    role: str
    seconds: float
    attempts: int
    bytes_sent: int
    bytes_received: int
    figures: dict[str, float | int | str]
    received: list[_Seen]
    format: int = 0
    at: str = ""
    alone: dict[str, dict[str, float]] = {}
    curves: dict[str, list[float]] = {}
    settings: dict[str, Any] = {}
    tables: dict[str, list[dict[str, Any]]] = {}


class _Report(msgspec.Struct):
    """What the tables below rely on."""

    job: dict[str, Any]
    parties: dict[str, _Party]
    pooled: dict[str, dict[str, float]] = {}


def tables(report: Mapping[str, Any]) -> list[tuple[str, Sequence[str], Rows]]:
    """Titles, columns and rows."""
    parties: Mapping[str, Any] = report["parties"]
    found: list[tuple[str, Sequence[str], Rows]] = []
    measured = list(quality(report))
    if measured:
        names = list(dict.fromkeys(name for _, values in measured for name in values))
        rows = [(label, *(number(values.get(name)) for name in names)) for label, values in measured]
        found.append(("Held-out rows", ("model", *names), rows))
    said: Rows = [(remark,) for remark in remarks(parties)]
    if said:
        found.append(("Remarks", ("what the figures mean",), said))
    found.append(("Parties", PARTIES, [_party(name, one) for name, one in parties.items()]))
    found += _figures("Rows", parties, _is_size)
    told: Rows = [(name, key, number(value), meaning) for name, key, value, meaning in protections(parties)]
    found.append(("Protections", ("party", "what", "value", "meaning"), told))
    found += _figures("Figures", parties, _is_other)
    for name, one in parties.items():
        for title, shown in one.get("tables", {}).items():
            found.append((f"{title}, at {name}", *_columns(shown)))
    found.append(
        ("What each party saw", SEEN, [row for name, one in parties.items() for row in _seen(name, one)])
    )
    return found


def _figures(
    title: str, parties: Mapping[str, Any], wanted: Callable[[str], bool]
) -> list[tuple[str, Sequence[str], Rows]]:
    """A table of the parties' figures whose names are wanted; none where there are none."""
    rows: Rows = [
        (name, key.removeprefix(ALIGNMENT), number(value))
        for name, one in parties.items()
        for key, value in one["figures"].items()
        if wanted(key)
    ]
    return [(title, ("party", "figure", "value"), rows)] if rows else []


def _is_size(figure: str) -> bool:
    return figure in SIZES or figure.startswith(ALIGNMENT)


def _is_other(figure: str) -> bool:
    return not (
        figure.startswith(("test ", "fallback "))
        or figure == "run"
        or _is_size(figure)
        or is_protection(figure)
    )


def _columns(shown: Sequence[Mapping[str, Any]]) -> tuple[Sequence[str], Rows]:
    """Columns and rows of a table that a party's kind of job left as objects."""
    names = list(dict.fromkeys(name for row in shown for name in row))
    rows: Rows = []
    for row in shown[:MOST_SHOWN]:
        cells = (row.get(name) for name in names)
        rows.append(
            tuple(("yes" if cell else "no") if isinstance(cell, bool) else number(cell) for cell in cells)
        )
    if len(shown) > MOST_SHOWN:
        rows.append(tuple("…" for _ in names))
    return names, rows


def quality(report: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Models and their measures on the held-out rows."""
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
        size(one["bytes_sent"]),
        size(one["bytes_received"]),
    )


def _seen(name: str, one: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for row in one["received"]:
        yield name, row["from"], row["kind"], str(row["messages"]), size(row["bytes"]), row["learns"]


def number(value: Any) -> str:
    """A figure for people: four digits."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    # Errors are in the labels' unit, whatever that is.
    return f"{value:.4f}" if value == 0 or 0.01 <= abs(value) < 1e6 else f"{value:.4g}"


def size(count: int) -> str:
    """Bytes for people."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
