"""From a job of kind ``binning`` to the columns of the next: what it leaves, how it is shown, how it is taken up."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tenseal", reason="the extra `vertical` is not installed")

from federated.vertical.binning.evidence import weigh
from federated.vertical.binning.findings import TITLE
from federated.vertical.binning.options import BinningOptions
from federated.vertical.binning.plain import count_classes
from federated.vertical.parties import run_local
from federated.vertical.tables import Table, TableRefused, read_table, write_csv
from services.vertical.columns import read_columns
from services.vertical.config import ConfigRefused, load_party
from services.vertical.party import MODEL, Prepared, leave_behind, prepare, report_of
from services.vertical.report import MOST_SHOWN, tables
from services.vertical.runner import RUN
from services.vertical.traffic import Traffic
from services.vertical.trial import Party, with_columns, write_files
from tests.support.vertical import PartyProcess, party_files, reports_after_kill

ROLES = {"bank": "guest", "shop": "host"}
OPTIONS = {"bins": 5, "least_rows": 5, "select": 3}


def prepared_parties(folder: Path, rows: int = 120) -> dict[str, Path]:
    """Files of two parties with four columns each, of which some tell something of the labels."""
    files = party_files(folder, ROLES, listening=("bank",), options=OPTIONS)
    generator = np.random.default_rng(2)
    features = generator.normal(size=(rows, 8))
    labels = (features[:, 0] + features[:, 5] + features[:, 6] > 0).astype(np.float64)
    ids = tuple(str(row) for row in range(rows))
    for place, (name, file) in enumerate(files.items()):
        own = features[:, 4 * place : 4 * place + 4]
        names = tuple(f"{name}_{letter}" for letter in "abcd")
        write_csv(Table(ids, own, names, labels if name == "bank" else None), file.with_name("rows.csv"))
        file.write_text(file.read_text().replace('what = "sums"', 'what = "binning"'))
    return files


def finish(parties: dict[str, Prepared]) -> dict[str, dict[str, object]]:
    """Run the whole job in this process, and leave behind what processes do; the reports."""
    results = run_local({name: one.make(None) for name, one in parties.items()}).results
    traffic = Traffic(Counter(), Counter(), Counter(), Counter())
    found: dict[str, dict[str, object]] = {}
    for name, one in parties.items():
        result = replace(results[name], figures={**results[name].figures, RUN: "r1"})
        one.folder.mkdir(parents=True)
        found[name] = report_of(one, result, traffic, 1.0)
        leave_behind(one, result, found[name])
    return found


def test_the_next_job_takes_the_columns_that_binning_kept(tmp_path: Path) -> None:
    files = prepared_parties(tmp_path)
    parties = {name: prepare(load_party(file)) for name, file in files.items()}
    reports = finish(parties)
    left = {name: one.folder / "binning.json" for name, one in parties.items()}
    kept = {name: read_columns(path).learned for name, path in left.items()}
    assert kept == {"bank": ("bank_a",), "shop": ("shop_b", "shop_c")}
    for name, file in files.items():
        path = left[name].relative_to(tmp_path / name)
        text = file.read_text().replace('path = "rows.csv"', f'path = "rows.csv"\ncolumns = "{path}"')
        file.write_text(text)
        table = prepare(load_party(file)).table
        assert table is not None
        assert table.names == kept[name]
        whole = read_table(file.with_name("rows.csv"), label_column="y" if name == "bank" else None)
        chosen = [whole.names.index(column) for column in table.names]
        assert np.array_equal(table.features, whole.features[:, chosen])
    # What each party has is its own file's, and the report shows it.
    shown = {title: (columns, rows) for title, columns, rows in tables({"parties": reports})}
    columns, rows = shown[f"{TITLE}, at bank"]
    assert columns == ["column", "bins", "iv", "ks", "kept"]
    assert next(row[0] for row in rows if row[-1] == "yes").startswith(("bank_a", "shop["))
    assert sum(row[-1] == "yes" for row in rows) == 3
    columns, rows = shown[f"{TITLE}, at shop"]
    assert columns == ["column", "at the guest", "bins", "iv", "kept"]
    assert {row[0] for row in rows} == {"shop_a", "shop_b", "shop_c", "shop_d"}
    # Nothing was trained that answers, so nothing is compared.
    assert reports["bank"]["alone"] == {}
    assert (parties["bank"].folder / MODEL).exists()
    # A trial's folder has the same below each party's name.
    trial = [Party(name, role, tmp_path / name / "rows.csv") for name, role in ROLES.items()]
    chosen_trial = with_columns(trial, tmp_path)
    assert [one.columns for one in chosen_trial] == [left["bank"], left["shop"]]
    written = write_files(tmp_path / "next", chosen_trial, {"what": "sums"})
    config = load_party(written["shop"])
    assert config.data is not None
    assert read_columns(config.data.columns).learned == kept["shop"]
    with pytest.raises(ConfigRefused, match=r"has no binning\.json of bank"):
        with_columns(trial, tmp_path / "next")


def test_long_tables_are_cut_for_people() -> None:
    rows = [{"column": f"c{place}", "iv": 0.5} for place in range(MOST_SHOWN + 1)]
    party = {"role": "guest", "seconds": 1.0, "attempts": 1, "bytes_sent": 0, "bytes_received": 0}
    party |= {"figures": {}, "received": [], "tables": {"T": rows}}
    (shown,) = [rows for title, _, rows in tables({"parties": {"bank": party}}) if title == "T, at bank"]
    assert len(shown) == MOST_SHOWN + 1
    assert shown[-1] == ("…", "…")


def test_columns_are_names_in_the_order_that_is_asked_for(tmp_path: Path) -> None:
    (file, _) = prepared_parties(tmp_path).values()
    text = file.read_text()
    for given, names, why in (
        ('["bank_c", "bank_a"]', ("bank_c", "bank_a"), ""),
        ('["bank_z"]', (), "no column 'bank_z'"),
        ('["bank_a", "bank_a"]', (), "asked for twice"),
        ('["id"]', (), "the column of ids"),
        ("[]", (), "data.columns"),
        ('"none.json"', (), "none.json cannot be read"),
        ('"party.toml"', (), "cannot be read as JSON"),
        ('"names.json"', (), "no lists of names"),
        ('"among.json"', (), "'bank_b' is not among the columns"),
    ):
        (tmp_path / "bank" / "names.json").write_text('{"columns": [1]}')
        (tmp_path / "bank" / "among.json").write_text('{"columns": ["bank_b"], "among": ["bank_a"]}')
        file.write_text(text.replace('path = "rows.csv"', f'path = "rows.csv"\ncolumns = {given}'))
        if names:
            table = prepare(load_party(file)).table
            assert table is not None
            assert table.names == names
        else:
            with pytest.raises((ConfigRefused, TableRefused), match=why):
                prepare(load_party(file))


def test_rows_that_are_held_out_had_no_part_in_the_choice_of_columns(tmp_path: Path) -> None:
    """Labels that nothing tells: the columns that were chosen on all rows would look good on the held-out ones."""
    files = prepared_parties(tmp_path)
    held: dict[str, list[int]] = {}
    for file in files.values():
        file.write_text(file.read_text().replace("[job.options]", "test = 0.4\n[job.options]"))
    parties = {name: prepare(load_party(file)) for name, file in files.items()}
    held["binning"] = (
        run_local({name: one.make(None) for name, one in parties.items()}).results["bank"].test.tolist()
    )
    finish(parties)
    for name, file in files.items():
        path = (parties[name].folder / "binning.json").relative_to(tmp_path / name)
        file.write_text(
            file.read_text().replace('path = "rows.csv"', f'path = "rows.csv"\ncolumns = "{path}"')
        )
    parties = {name: prepare(load_party(file)) for name, file in files.items()}
    results = run_local({name: one.make(None) for name, one in parties.items()}).results
    held["next"] = results["bank"].test.tolist()
    assert held["next"] == held["binning"]
    assert results["bank"].figures["own columns"] == 1
    # What the next job's role sees are the chosen columns, and they are what the party answers with.
    assert {row["column"] for row in json.loads(results["shop"].model)["tables"][TITLE]} == {
        "shop_b",
        "shop_c",
    }


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["bank", "shop"])
def test_a_killed_party_comes_back_and_the_counts_are_the_same(tmp_path: Path, victim: str) -> None:
    """Over a network, killed in the middle: what the twin in the clear finds."""
    files = prepared_parties(tmp_path / "killed", rows=3_000)
    for name, file in files.items():
        table = read_table(file.with_name("rows.csv"), label_column="y" if name == "bank" else None)
        many = np.random.default_rng(5).normal(size=(3_000, 600)) if name == "shop" else table.features
        names = tuple(f"{name}_{place}" for place in range(many.shape[1]))
        write_csv(Table(table.ids, many, names, table.labels), file.with_name("rows.csv"))
        file.write_text(
            file.read_text().replace("select = 3", 'tell = "nothing"').replace("bins = 5", "bins = 10")
        )

    at: dict[str, Any] = {"what": "", "done": 0, "total": 0}

    def begun(running: Mapping[str, PartyProcess]) -> None:
        while at["what"] != "rounds of bins" or at["done"] < 2:
            at.update(running["bank"].until("done"))

    reports = reports_after_kill(files, victim, begun)
    survivor = "shop" if victim == "bank" else "bank"
    assert reports[survivor]["attempts"] == 2
    bank = read_table(files["bank"].with_name("rows.csv"), label_column="y")
    shop = read_table(files["shop"].with_name("rows.csv"))
    assert bank.labels is not None
    options = BinningOptions(bins=10, least_rows=5)
    plain = [one for table in (bank, shop) for one in count_classes(table.features, bank.labels, options)]
    told = [row["iv"] for row in reports["bank"]["tables"][TITLE]]
    assert sorted(told) == sorted(weigh(one, options.smoothing).iv[0] for one in plain)
    (sums,) = [one for one in reports["bank"]["received"] if one["kind"] == "binning sums"]
    # From the last round that was kept, not from the beginning.
    assert at["total"] > 3
    assert sums["messages"] <= at["total"] + 1
    assert json.loads(next((tmp_path / "killed" / "shop").glob("state/*/binning.json")).read_text())[
        "columns"
    ]
