"""A report as a file to hand on: Markdown, or one page of HTML without scripts and without other files.

Names in a report may come from other parties, so all text is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from services.vertical.comparison import compare, flat
from services.vertical.report import Rows, number, tables

SUFFIXES: Final = (".md", ".html")
POINTS: Final = 20
"""Epochs of a curve that Markdown lists."""
_WIDTH, _HEIGHT, _EDGE = 640, 220, 48
_MEASURES: Final = (
    "Messages, bytes and seconds are counted over restarts, but for what a killed process did after its last"
    " checkpoint. What a message tells its receiver is stated by the kind of job, for parties that follow the"
    " protocol. Baselines of one party, and of all tables pooled, are plain models on the same rows."
)
Section = tuple[str, Sequence[str], Rows]


def rendered(reports: Mapping[str, Mapping[str, Any]], suffix: str) -> str:
    """The reports (by their labels; several are compared first) as text of a file with that suffix."""
    return _html(reports) if suffix == ".html" else _markdown(reports)


def heading(report: Mapping[str, Any]) -> tuple[str, list[Section]]:
    """A title, and what is known of the run as a whole."""
    parties: Mapping[str, Any] = report["parties"]
    runs = {str(one["figures"].get("run", "")) for one in parties.values()} - {""}
    facts: Rows = [
        ("run", ", ".join(sorted(runs)) or "not named"),
        ("ended", ", ".join(sorted({one.get("at", "") for one in parties.values()} - {""})) or "not said"),
        ("told by", ", ".join(parties)),
    ]
    settings = next((one["settings"] for one in parties.values() if one.get("settings")), report["job"])
    found: list[Section] = [("Run", ("what", "value"), facts)]
    found.append(("Settings that all parties agreed on", ("setting", "value"), list(flat(settings))))
    return f"Report of a joint job: {settings.get('what')}", found


def _curves(report: Mapping[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Curves by name, then by party; what several parties have alike stands once."""
    found: dict[str, dict[str, list[float]]] = {}
    for party, one in report["parties"].items():
        for name, values in one.get("curves", {}).items():
            if len(values) > 1 and values not in found.setdefault(name, {}).values():
                found[name][party] = values
    return {name: lines for name, lines in found.items() if lines}


def _sections(reports: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, list[Section], Any]]:
    """Title, tables and curves of each part of the file."""
    if len(reports) > 1:
        yield "Joint jobs side by side", compare(reports), {}
    for label, report in reports.items():
        title, head = heading(report)
        yield f"{title} ({label})", [*head, *tables(report)], _curves(report)


def _markdown(reports: Mapping[str, Mapping[str, Any]]) -> str:
    lines: list[str] = []
    for title, sections, curves in _sections(reports):
        lines += [f"# {_plain(title)}", "", _MEASURES, ""]
        for name, columns, rows in sections:
            lines += [f"## {_plain(name)}", "", *_pipes(columns, rows), ""]
        for name, by_party in curves.items():
            for party, values in by_party.items():
                lines += [f"## {_plain(name)} by epoch, at {_plain(party)}", ""]
                lines += [*_pipes(("epoch", name), _some(values)), ""]
    return "\n".join(lines)


def _pipes(columns: Sequence[str], rows: Rows) -> Iterator[str]:
    yield f"| {' | '.join(map(_plain, columns))} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(map(_plain, row))} |"


def _plain(text: str) -> str:
    """Text that Markdown shows as it is, in one cell."""
    one_line = " ".join(str(text).split())
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>|#" else letter for letter in one_line)


def _some(values: Sequence[float]) -> Rows:
    step = max(1, -(-len(values) // POINTS))
    shown = [*range(0, len(values), step)]
    if shown[-1] != len(values) - 1:
        shown.append(len(values) - 1)
    return [(str(place + 1), number(float(values[place]))) for place in shown]


_HEAD: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24 }}
table {{ border-collapse: collapse; margin: .5rem 0 1.5rem }}
th, td {{ text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid #d8dde3; vertical-align: top }}
h1 {{ margin-top: 3rem }} svg {{ font-size: 12px }}
@media print {{ body {{ margin: 0 }} h1 {{ break-before: page }} h1:first-of-type {{ break-before: auto }} }}
</style></head><body>
"""


def _html(reports: Mapping[str, Mapping[str, Any]]) -> str:
    parts: list[str] = []
    for title, sections, curves in _sections(reports):
        if not parts:
            parts.append(_HEAD.format(title=html.escape(title)))
        parts.append(f"<h1>{html.escape(title)}</h1>\n<p>{html.escape(_MEASURES)}</p>\n")
        for name, columns, rows in sections:
            parts.append(f"<h2>{html.escape(name)}</h2>\n{_table(columns, rows)}")
        for name, by_party in curves.items():
            for party, values in by_party.items():
                text = f"{name} by epoch, at {party}"
                parts.append(f"<h2>{html.escape(text)}</h2>\n{_plot(name, values)}")
    return "".join([*parts, "</body></html>\n"])


def _table(columns: Sequence[str], rows: Rows) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>\n" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>\n"


def _plot(name: str, values: Sequence[float]) -> str:
    """One curve as SVG, its axes labelled at both ends."""
    low, high = min(values), max(values)
    spread = (high - low) or 1.0
    right, bottom = _WIDTH - _EDGE, _HEIGHT - _EDGE

    def at(place: int, value: float) -> str:
        across = _EDGE + (right - _EDGE) * place / (len(values) - 1)
        down = bottom - (bottom - 16) * (value - low) / spread
        return f"{across:.1f},{down:.1f}"

    line = " ".join(at(place, value) for place, value in enumerate(values))
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{html.escape(name)} by epoch">'
        f'<path d="M{_EDGE},16V{bottom}H{right}" fill="none" stroke="#8b949e"/>'
        f'<polyline points="{line}" fill="none" stroke="#0b62b8" stroke-width="2"/>'
        f'<text x="{_EDGE - 6}" y="20" text-anchor="end">{number(float(high))}</text>'
        f'<text x="{_EDGE - 6}" y="{bottom}" text-anchor="end">{number(float(low))}</text>'
        f'<text x="{_EDGE}" y="{bottom + 18}">1</text>'
        f'<text x="{right}" y="{bottom + 18}" text-anchor="end">{len(values)}</text>'
        f'<text x="{(right + _EDGE) // 2}" y="{bottom + 34}" text-anchor="middle">epoch</text></svg>\n'
    )
