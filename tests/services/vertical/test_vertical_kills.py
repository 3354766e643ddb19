"""Parties killed at seeded random times: alone, twice in a row, all at once; the result is that of a quiet run."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the extra `stack` is not installed")
pytest.importorskip("tenseal", reason="the extra `vertical` is not installed")

from federated.vertical.tables import Table, write_csv
from services.vertical.party import MODEL, ROWS, read_part
from tests.support.vertical import PartyProcess, party_files

MOST_S = 240.0
QUICK: dict[str, Any] = {"turns": 30, "pause_s": 0.02}


@dataclass(frozen=True)
class Work:
    """A kind with options. ``apart``: of its ``test auc`` from a quiet run's, since noise is drawn anew."""

    what: str
    options: dict[str, Any]
    rows: int = 12
    coordinator: bool = False
    apart: float = 0.0
    kills_s: tuple[float, float] = (0.3, 4.0)


@dataclass
class Running:
    """A party whose lines are read as they come."""

    file: Path
    lines: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.party = PartyProcess(self.file)
        self.reader = threading.Thread(target=self._read, args=(self.party,))
        self.reader.start()

    def _read(self, party: PartyProcess) -> None:
        assert party.process.stdout is not None
        for line in party.process.stdout:
            # The last one of a party that is killed may be a part of one.
            if line.endswith("\n"):
                self.lines.append(json.loads(line))

    @property
    def ended(self) -> bool:
        return self.party.process.poll() is not None

    def kill(self) -> None:
        self.party.process.kill()
        self.party.process.wait()
        self.reader.join()
        self.party.close()

    def report(self) -> dict[str, Any]:
        self.kill()
        assert "report" in self.lines[-1], (self.lines[-1], self.party.errors.read_text()[-2000:])
        found: dict[str, Any] = self.lines[-1]["report"]
        return found


def files_of(folder: Path, work: Work) -> dict[str, Path]:
    roles = {"bank": "guest", "shop": "host"} | ({"notary": "coordinator"} if work.coordinator else {})
    listening = ("bank", "shop") if work.coordinator else ("bank",)
    files = party_files(
        folder, roles, listening=listening, options=work.options, rows=work.rows, wait=f"{MOST_S:.0f}s"
    )
    rng = np.random.default_rng(0)
    latent = rng.standard_normal((work.rows, 3))
    labels = (latent.sum(axis=1) + rng.logistic(size=work.rows) / 2 > 0).astype(np.float64)
    for name, file in files.items():
        test = 0.0 if work.what in ("psi", "binning", "sums") else 0.3
        text = file.read_text().replace('what = "sums"', f'what = "{work.what}"\ntest = {test}')
        text = text if work.what == "psi" else text.replace('align = "none"', 'align = "psi"')
        if name == "notary":
            text = text.replace('[data]\npath = "rows.csv"\n', "")
        elif work.what != "sums":
            columns = latent @ rng.standard_normal((3, 4)) + 0.3 * rng.standard_normal((work.rows, 4))
            order = rng.permutation(work.rows)[: work.rows * 9 // 10]
            ids = tuple(str(row) for row in order.tolist())
            marks = labels[order] if name == "bank" else None
            write_csv(Table(ids, columns[order], ("a", "b", "c", "d"), marks), file.with_name("rows.csv"))
        file.write_text(text)
    return files


def run(folder: Path, work: Work, draw: random.Random, kills: int) -> dict[str, dict[str, Any]]:
    """The parties' reports, with what their ``rows.csv`` and ``part.model`` hold, after ``kills`` kills."""
    files = files_of(folder, work)
    parties = {name: Running(file) for name, file in files.items()}
    began_s, times = time.monotonic(), sorted(draw.uniform(*work.kills_s) for _ in range(kills))
    try:
        while times or not all(one.ended for one in parties.values()):
            now_s = time.monotonic() - began_s
            assert now_s < MOST_S, {name: one.lines[-1:] for name, one in parties.items()}
            if times and now_s >= times[0]:
                times.pop(0)
                victims = [*parties] if draw.random() < 0.25 else [draw.choice([*parties])]
                for name in victims:
                    parties[name].kill()
                for name in victims:
                    parties[name].start()
                    if draw.random() < 0.25:
                        time.sleep(draw.uniform(0.0, 0.5))
                        parties[name].kill()
                        parties[name].start()
            time.sleep(0.01)
        found = {name: one.report() for name, one in parties.items()}
    finally:
        for one in parties.values():
            if not one.ended:
                one.kill()
    for name, file in files.items():
        folder = next((file.parent / "state").iterdir())
        found[name]["rows"] = (folder / ROWS).read_text() if (folder / ROWS).exists() else ""
        if (folder / MODEL).exists():
            # Parts of different runs would not fit together.
            found[name]["part of"] = read_part(folder / MODEL).run
    return found


def check(folder: Path, work: Work, seed: int, rounds: int, kills: int) -> None:
    quiet = run(folder / "quiet", work, random.Random(0), 0)
    for turn in range(rounds):
        found = run(folder / str(turn), work, random.Random(f"{seed}-{turn}"), kills)
        assert len({report["figures"]["run"] for report in found.values()}) == 1
        assert {report["part of"] for report in found.values() if "part of" in report} <= {
            found["bank"]["figures"]["run"]
        }
        for name, report in found.items():
            assert report["rows"] == quiet[name]["rows"]
            assert same(report["figures"], quiet[name]["figures"], work.apart), (turn, name)


def same(found: Mapping[str, Any], quiet: Mapping[str, Any], apart: float) -> bool:
    """Whether the model is as good, and what is not drawn is equal."""
    known = [
        name
        for name in ("total", "common", "joint rows", "held-out rows", "trees", "epochs", "steps")
        if name in quiet
    ]
    assert known
    near = abs(found.get("test auc", 0.0) - quiet.get("test auc", 0.0)) <= apart
    return near and all(found[name] == quiet[name] for name in known)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
class TestAtLength:
    def test_sums(self, tmp_path: Path) -> None:
        check(tmp_path, Work("sums", QUICK, kills_s=(0.3, 3.0)), 1, rounds=6, kills=3)

    @pytest.mark.parametrize(
        "work",
        [
            Work("psi", {"chunk": 64}, 3_000, kills_s=(0.5, 4.0)),
            Work("binning", {}, 400),
            Work("boosting", {"trees": 6, "depth": 2, "bins": 8}, 400, kills_s=(0.5, 5.0)),
            Work(
                "linear",
                {"epochs": 6, "batch": 100, "tolerance": 1e-9},
                400,
                coordinator=True,
                apart=1e-3,
                kills_s=(0.5, 8.0),
            ),
            Work("split", {"epochs": 60, "batch": 40, "hidden": 8}, 300, apart=0.08, kills_s=(0.5, 8.0)),
            Work("transfer", {"steps": 24, "every": 2, "hidden": 4}, 200, apart=0.1, kills_s=(0.5, 8.0)),
        ],
        ids=lambda work: work.what,
    )
    def test_kinds(self, tmp_path: Path, work: Work) -> None:
        check(tmp_path, work, 2, rounds=2, kills=3)
