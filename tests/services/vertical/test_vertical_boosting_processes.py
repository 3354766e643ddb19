"""Joint boosting between processes, any of which is killed on the way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tenseal", reason="the extra `vertical` is not installed")

from federated.vertical.boosting.objective import Rule
from federated.vertical.boosting.plain import boost
from federated.vertical.tables import Table, write_csv
from tests.support.vertical import PartyProcess, party_files, reports_after_kill

pytestmark = pytest.mark.slow

ROLES = {"bank": "guest", "shop": "host", "post": "host"}
ROWS, TREES = 400, 12


@pytest.mark.parametrize("victim", ["bank", "post"])
def test_a_killed_party_comes_back_and_the_trees_are_the_twins(tmp_path: Path, victim: str) -> None:
    options = {"trees": TREES, "bins": 8, "least_rows": 5, "loss": "squared"}
    files = party_files(tmp_path, ROLES, listening=("bank", "post"), options=options)
    generator = np.random.default_rng(0)
    features = generator.normal(size=(ROWS, 6))
    labels = features[:, 0] + features[:, 2] * features[:, 4] + generator.normal(size=ROWS) / 10
    ids = tuple(str(row) for row in range(ROWS))
    for place, (name, file) in enumerate(files.items()):
        own = features[:, 2 * place : 2 * place + 2]
        write_csv(Table(ids, own, ("a", "b"), labels if name == "bank" else None), file.with_name("rows.csv"))
        file.write_text(file.read_text().replace('what = "sums"', 'what = "boosting"'))

    def begun(running: Mapping[str, PartyProcess]) -> None:
        while running["bank"].until("done")["done"] < 3:
            pass

    reports = reports_after_kill(files, victim, begun)
    survivor = "shop"
    assert reports[survivor]["attempts"] == 2
    rule = Rule(least_rows=5)
    plain = boost(features, labels, trees=TREES, depth=3, bins=8, rule=rule, loss="squared")
    figures = reports["bank"]["figures"]
    assert figures["trees"] == TREES
    gain = sum(sum(tree.gain) for tree in plain.trees)
    assert sum(figures[f"gain of {party}"] for party in ("guest", "shop", "post")) == pytest.approx(
        gain, rel=1e-12
    )
    assert figures["splits of shop"] == reports["shop"]["figures"]["splits"] > 0
    # From a checkpoint, not from the beginning: fewer levels than two whole runs have.
    (sums,) = [
        one for one in reports["bank"]["received"] if one["kind"] == "boosting sums" and one["from"] == "shop"
    ]
    assert sums["messages"] < 3 * (TREES + 3)
