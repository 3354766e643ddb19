"""What attacks found, as one document, as tables and sentences for people, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from federated.attacks.contest import AuditRow, InversionRow, MembershipRow, Row, finite
from federated.attacks.inversion import Client
from federated.attacks.lineup import NOTES, Contender
from federated.attacks.rates import Estimate
from federated.privacy.accounting_statement import MEANINGLESS

INVERSION: Final = ("mechanism", "who attacks", "sees", "eps", "first", "95 %", "in 10", "rank", "at most")
MEMBERSHIP: Final = (
    "mechanism",
    "who attacks",
    "sees",
    "eps",
    "AUC",
    "95 %",
    "TPR",
    "at most",
    "adv",
    "at most",
    "eps >",
)
AUDIT: Final = ("mechanism", "claimed eps", "delta", "measured eps >=", "")
SIMULATED: Final = "simulated: noise is seeded here, and every client's data is in this one process"


def document(rows: Sequence[Row], settings: Mapping[str, Any]) -> dict[str, Any]:
    """All of it, for JSON."""
    return {
        "simulated": True,
        "settings": dict(settings),
        "rows": [plain(row) for row in rows],
        "notes": notes(rows),
    }


def plain(row: Row) -> dict[str, Any]:
    """A row for JSON; what is infinite is null."""
    if isinstance(row, AuditRow):
        return {
            "attack": "audit",
            **asdict(row),
            "epsilon": finite(row.epsilon),
            "least_epsilon": finite(row.least_epsilon),
        }
    if isinstance(row, InversionRow):
        found = row.found
        return {
            "attack": "inversion",
            **_of_line(row.line, row.line.epsilon),
            "records": row.client.records,
            "knows": row.client.knows,
            "trials": found.trials,
            "candidates": found.candidates,
            "top_1": asdict(found.top_1),
            "top_10": asdict(found.top_10),
            "mean_rank": asdict(found.mean_rank),
            "chance": 1.0 / found.candidates,
            "above_chance": found.above_chance,
            "most_top_1": row.most,
        }
    return {
        "attack": "membership",
        **_of_line(row.line, row.line.epsilon_at_end),
        "worlds": len(row.found.members),
        **{name: asdict(value) for name, value in _told(row).items()},
        "most_tpr_at_1": row.most_tpr_at_1,
        "most_advantage": row.most_advantage,
        "least_epsilon": finite(row.least_epsilon),
    }


def tables(rows: Sequence[Row]) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """Titles, columns and cells."""
    found: list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]] = []
    named = [row for row in rows if isinstance(row, InversionRow)]
    for client in dict.fromkeys(row.client for row in named):
        of_client = [row for row in named if row.client == client]
        chance = f"chance {1.0 / of_client[0].found.candidates:.2%}"
        title = (
            f"Which of {of_client[0].found.candidates:,} records? A client with {_client(client)}; {chance}"
        )
        found.append((title, INVERSION, [_inversion(row) for row in of_client]))
    members = [row for row in rows if isinstance(row, MembershipRow)]
    if members:
        title = (
            "Was this record there, over all iterations? Chance: AUC 50 %, TPR 1 % (at 1 % FPR), advantage 0"
        )
        found.append((title, MEMBERSHIP, [_membership(row) for row in members]))
    audits = [row for row in rows if isinstance(row, AuditRow)]
    if audits:
        found.append(("Our own noise on its worst inputs", AUDIT, [_audit(row) for row in audits]))
    return found


def notes(rows: Iterable[Row]) -> list[str]:
    """What each mechanism in ``rows`` buys and what not."""
    rows = list(rows)
    mechanisms = dict.fromkeys(
        row.mechanism if isinstance(row, AuditRow) else row.line.mechanism for row in rows
    )
    said = [NOTES[mechanism] for mechanism in mechanisms]
    weak = {
        row.line.label
        for row in rows
        if not isinstance(row, AuditRow) and MEANINGLESS < row.line.epsilon < 1e9
    }
    return said + [f"{label}: no meaningful privacy, whatever a row above shows." for label in sorted(weak)]


def as_csv(rows: Sequence[Row]) -> str:
    """A line for each row; the columns of all attacks side by side, empty where they are not of one."""
    flat = [_flat(plain(row)) for row in rows]
    names = list(dict.fromkeys(name for one in flat for name in one))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            found |= {name if key == "value" else f"{name}_{key}": number for key, number in value.items()}
        else:
            found[name] = value
    return found


def _of_line(line: Contender, epsilon: float) -> dict[str, Any]:
    return {
        "mechanism": line.mechanism,
        "label": line.label,
        "adversary": line.adversary,
        "sees": line.sees,
        "epsilon": finite(epsilon),
        "delta": line.delta,
    }


def _told(row: MembershipRow) -> dict[str, Estimate]:
    told = row.found.told
    return {"auc": told.auc, "tpr_at_1": told.tpr_at_1, "advantage": told.advantage}


def _inversion(row: InversionRow) -> tuple[str, ...]:
    found = row.found
    return (
        *_who(row.line),
        _epsilon(row.line.epsilon),
        f"{found.top_1.value:.1%}",
        _interval(found.top_1),
        f"{found.top_10.value:.1%}",
        f"{found.mean_rank.value:.0f}",
        _most(row.most),
    )


def _membership(row: MembershipRow) -> tuple[str, ...]:
    told = row.found.told
    return (
        *_who(row.line),
        _epsilon(row.line.epsilon_at_end),
        f"{told.auc.value:.1%}",
        _interval(told.auc),
        f"{told.tpr_at_1.value:.1%}",
        _most(row.most_tpr_at_1),
        f"{told.advantage.value:.2f}",
        _most(row.most_advantage, ".2f"),
        f"{row.least_epsilon:.2f}",
    )


def _audit(row: AuditRow) -> tuple[str, ...]:
    verdict = "within" if row.passed else "BROKEN: more leaks than is claimed"
    return row.label, _epsilon(row.epsilon), f"{row.delta:g}", f"{row.least_epsilon:.2f}", verdict


def _who(line: Contender) -> tuple[str, str, str]:
    return line.label, line.adversary, line.sees


def _client(client: Client) -> str:
    if client.records == 1:
        return "1 record"
    rest = "the others are known" if client.knows == "rest" else "none is known"
    return f"{client.records} records, {rest}"


def _interval(estimate: Estimate) -> str:
    return f"{estimate.low:.1%}-{estimate.high:.1%}"


def _epsilon(epsilon: float) -> str:
    return "none" if finite(epsilon) is None else f"{epsilon:.3g}"


def _most(rate: float, form: str = ".1%") -> str:
    return "-" if rate >= 1.0 else format(rate, form)
