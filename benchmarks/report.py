"""What every benchmark prints: one row a measurement, ours beside a peer's, and whether the aim was met."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement.

    ``ratio`` is ours over the peer's, turned so that larger is better for us; None without a peer.
    ``aim`` is what was hoped for in ``unit``; ``met`` is None where nothing was aimed at.
    """

    work: str
    unit: str
    ours: float
    aim: float | None = None
    met: bool | None = None
    spread: tuple[float, float] | None = None
    peer: float | None = None
    peer_name: str | None = None
    ratio: float | None = None
    note: str = ""


def at_most(aim: float, ours: float) -> bool:
    """Whether ``ours`` is met where less is better."""
    return ours <= aim


def machine() -> dict[str, str | int]:
    """What the figures were measured on."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count() or 1,
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
    }


def commit() -> str | None:
    """The commit measured, with ``+`` where the tree was changed; None outside a checkout."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or None


def as_json(name: str, rows: Sequence[Row]) -> dict[str, object]:
    """The object that ``--json`` prints."""
    return {
        "benchmark": name,
        "machine": machine(),
        "commit": commit(),
        "rows": [asdict(row) for row in rows],
    }


def print_table(name: str, rows: Sequence[Row], console: Console) -> None:
    """The same for people."""
    table = Table(title=f"{name} ({machine()['cores']} cores, {machine()['cpu']})", title_justify="left")
    for column in ("work", "ours", "unit", "aim", "met", "peer", "ratio", "note"):
        table.add_column(column, justify="right" if column in {"ours", "aim", "peer", "ratio"} else "left")
    for row in rows:
        spread = f" ({row.spread[0]:,.4g}–{row.spread[1]:,.4g})" if row.spread else ""
        peer = row.peer_name or ""
        if row.peer_name is not None:
            peer += " not installed" if row.peer is None else f" {row.peer:,.4g}"
        table.add_row(
            row.work,
            f"{row.ours:,.4g}{spread}",
            row.unit,
            "" if row.aim is None else f"{row.aim:,.4g}",
            {True: "yes", False: "no", None: ""}[row.met],
            peer,
            "" if row.ratio is None else f"{row.ratio:.2f}",
            row.note,
        )
    console.print(table)
