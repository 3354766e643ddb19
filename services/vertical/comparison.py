"""Runs of joint jobs side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from services.vertical.protections import is_protection
from services.vertical.report import Rows, number, quality, size

MISSING: Final = "–"


def compare(reports: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Sequence[str], Rows]]:
    """Titles, columns and rows; ``reports``: by the runs' labels. Of settings and figures, what differs."""
    facts = {label: _facts(report) for label, report in reports.items()}
    found: list[tuple[str, Sequence[str], Rows]] = []
    for place, (title, only_different) in enumerate(
        (("Quality on held-out rows", False), ("Settings", True), ("Cost", False), ("Protections", False))
    ):
        rows = list(_rows([one[place] for one in facts.values()], only_different))
        if rows:
            found.append((title, ("what", *reports), rows))
    rows = list(_rows([_seen(report) for report in reports.values()], True))
    if rows:
        found.append(
            ("What parties saw in one run and not, or not as much of, in another", ("what", *reports), rows)
        )
    return found


def _rows(runs: Sequence[Mapping[str, str]], only_different: bool) -> Iterator[tuple[str, ...]]:
    for name in dict.fromkeys(name for one in runs for name in one):
        values = [one.get(name, MISSING) for one in runs]
        if not only_different or len(set(values)) > 1:
            yield name, *values


def _facts(report: Mapping[str, Any]) -> tuple[dict[str, str], ...]:
    """A run's quality, settings, cost and protections, as they are shown."""
    parties: Mapping[str, Any] = report["parties"]
    measured = {
        f"{model}: {name}": number(value)
        for model, values in quality(report)
        for name, value in values.items()
    }
    settings = next((one["settings"] for one in parties.values() if one.get("settings")), report["job"])
    cost = {
        "seconds": f"{max(one['seconds'] for one in parties.values()):.1f}",
        "bytes between parties": size(sum(one["bytes_sent"] for one in parties.values())),
    }
    cost |= {f"bytes received by {name}": size(one["bytes_received"]) for name, one in parties.items()}
    protected = {
        f"{name}: {key}": number(value)
        for name, one in parties.items()
        for key, value in one["figures"].items()
        if is_protection(key)
    }
    return measured, dict(flat(settings)), cost, protected


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Settings with dotted names."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", number(value)


def _seen(report: Mapping[str, Any]) -> dict[str, str]:
    return {
        f"{name} from {row['from']}: {row['kind']}": f"{row['messages']}, {size(row['bytes'])}"
        for name, one in report["parties"].items()
        for row in one["received"]
    }
