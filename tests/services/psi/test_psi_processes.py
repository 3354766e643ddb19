"""Intersections between real processes: one of them is killed, and the run goes on from a checkpoint."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.vertical import PartyProcess, party_files

ROLES = {"bank": "guest", "shop": "host"}
ROWS = 360


def files_of(folder: Path, **options: Any) -> dict[str, Path]:
    """Two parties that intersect; the shop's file has its rows backwards, and lacks a third of them."""
    files = party_files(folder, ROLES, listening=("bank",), options=options, rows=ROWS)
    for file in files.values():
        file.write_text(file.read_text().replace('what = "sums"', 'what = "psi"'))
    table = folder / "shop" / "rows.csv"
    header, *lines = table.read_text().splitlines()
    table.write_text(
        "\n".join([header, *(line for line in lines[::-1] if int(line.split(",")[0]) % 3)]) + "\n"
    )
    return files


def joint_ids(file: Path) -> list[str]:
    """What a party wrote down as the joint rows."""
    (rows,) = file.parent.glob("state/*/rows.csv")
    with rows.open(newline="") as lines:
        return [line["id"] for line in csv.DictReader(lines)]


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["ecdh", "rsa"])
@pytest.mark.parametrize("victim", list(ROLES))
def test_goes_on_after_a_party_was_killed(tmp_path: Path, protocol: str, victim: str) -> None:
    files = files_of(tmp_path, protocol=protocol, chunk=15)
    running = {name: PartyProcess(file) for name, file in files.items()}
    try:
        while running["bank"].until("done")["done"] < 8:
            pass
        running[victim].kill()
        time.sleep(0.3)
        running[victim] = PartyProcess(files[victim])
        reports = {name: one.until("report")["report"] for name, one in running.items()}
    finally:
        for one in running.values():
            one.kill() if one.process.poll() is None else one.close()
    common = sorted(str(row) for row in range(ROWS) if row % 3)
    assert [joint_ids(file) for file in files.values()] == [common, common]
    assert {report["figures"]["common"] for report in reports.values()} == {len(common)}
    survivor = next(name for name in ROLES if name != victim)
    assert reports[survivor]["attempts"] == 2
    # From a checkpoint, not from the beginning: the terms travelled once, and few chunks were sent twice.
    kinds = {one["kind"]: one["messages"] for one in reports[survivor]["sent"]}
    assert kinds["psi.hello"] == 1
    assert kinds.get("psi.masked", 0) < 24 + 6


def test_two_processes(tmp_path: Path) -> None:
    files = files_of(tmp_path, protocol="ot")
    running = {name: PartyProcess(file) for name, file in files.items()}
    try:
        reports = {name: one.until("report")["report"] for name, one in running.items()}
    finally:
        for one in running.values():
            one.kill() if one.process.poll() is None else one.close()
    assert (
        joint_ids(files["bank"])
        == joint_ids(files["shop"])
        == sorted(str(row) for row in range(ROWS) if row % 3)
    )
    learnt = {one["learns"] for report in reports.values() for one in report["received"]}
    assert "not described by its kind of job" not in learnt
