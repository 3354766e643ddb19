"""Bulk predictions: order, hosts that are late or refuse, a file that is gone on with, and what is written down."""

from __future__ import annotations

import asyncio
import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from federated.vertical.tables import TableRefused
from services.cli.app import main
from services.cli.exits import Exit
from services.vertical.config import ConfigRefused
from services.vertical.serving.bulk import Bulk, HostRefuses, HostsGone, Manner, reasons_of
from services.vertical.serving.guest import Answer
from services.vertical.serving.predict import predict_file
from services.vertical.serving.scores import Scores, ScoresRefused
from tests.support.vertical_serving import audit, serving, trained

VALUES = [str(place).encode() for place in range(10)]


@pytest.fixture(autouse=True)
def _sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_VERTICAL_KINDS", "sums=tests.support.vertical_sums:KIND")


def answer_of(
    values: Sequence[bytes],
    hosts: Mapping[str, str],
    missing: Mapping[str, Sequence[int]] = {},
    classes: int = 0,
) -> Answer:
    """Scores that are the ids' numbers; by the guest alone where a host did not answer, or has no such row."""
    numbers = np.array([float(one) for one in values])
    absent = {
        host: np.isin(numbers, list(missing.get(host, ())))
        for host, what in hosts.items()
        if what == "answered"
    }
    degraded = np.full(len(values), any(what != "answered" for what in hosts.values()))
    for one in absent.values():
        degraded |= one
    scores = (
        numbers / 7 if not classes else np.stack([numbers / (7 + place) for place in range(classes)], axis=1)
    )
    return Answer(np.ones(len(values), np.bool_), scores, degraded, hosts, absent, "r1")


class Hosts:
    """Answers as ``outcome`` says of a question (its number, its first id's number); a clock that sleep moves."""

    def __init__(self, outcome: Callable[[int, int], str]) -> None:
        self.outcome, self.now_s, self.asked, self.under_way, self.most = outcome, 0.0, 0, 0, 0
        self.ids: list[str] = []

    async def ask(self, values: Sequence[bytes], request_id: str) -> Answer:
        self.asked += 1
        self.ids.append(request_id)
        number, first = self.asked, int(values[0])
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        # Later batches answer first.
        for _ in range(20 - first):
            await asyncio.sleep(0)
        self.under_way -= 1
        return answer_of(values, {"shop": self.outcome(number, first)})

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        await asyncio.sleep(0)

    def run(self, manner: Manner, start: int = 0) -> list[tuple[int, list[float], list[bool]]]:
        found: list[tuple[int, list[float], list[bool]]] = []
        bulk = Bulk(self.ask, manner, "job", sleep=self.sleep, monotonic=lambda: self.now_s)

        def took(at: int, answer: Answer) -> None:
            found.append((at, (answer.scores * 7).round().tolist(), answer.degraded.tolist()))

        asyncio.run(bulk.run(VALUES, start, took))
        return found


def test_batches_come_in_order_though_several_are_under_way() -> None:
    hosts = Hosts(lambda number, first: "answered")
    found = hosts.run(Manner(batch=3, in_flight=2))
    assert found == [
        (0, [0, 1, 2], [False] * 3),
        (3, [3, 4, 5], [False] * 3),
        (6, [6, 7, 8], [False] * 3),
        (9, [9], [False]),
    ]
    assert hosts.most == 2
    assert hosts.ids == ["job-0", "job-3", "job-6", "job-9"]
    assert [at for at, _, _ in Hosts(lambda number, first: "answered").run(Manner(batch=4), 5)] == [5, 9]
    assert hosts.now_s == 0.0


def test_a_host_that_is_late_is_asked_again_and_then_given_up() -> None:
    hosts = Hosts(lambda number, first: "late" if number <= 3 else "answered")
    assert not any(any(degraded) for _, _, degraded in hosts.run(Manner(batch=5, in_flight=1)))
    assert hosts.asked == 5
    # Away for good: the first batch waits, the others do not.
    hosts = Hosts(lambda number, first: "away")
    found = hosts.run(Manner(batch=5, in_flight=1, patience_s=20.0))
    assert all(all(degraded) for _, _, degraded in found)
    assert hosts.now_s == pytest.approx(20.0)
    # Back at the third question: then it is waited for again.
    hosts = Hosts(lambda number, first: "away" if first in (0, 4) else "answered")
    hosts.run(Manner(batch=2, in_flight=1, patience_s=20.0))
    assert hosts.now_s == pytest.approx(40.0)


def test_what_stops_a_bulk_names_the_host() -> None:
    with pytest.raises(HostsGone, match="no answer within 20 s: shop busy"):
        Hosts(lambda number, first: "busy").run(Manner(patience_s=20.0, strict=True))
    # A host that never takes so many rows is not scored without: a smaller batch would do.
    with pytest.raises(HostRefuses, match="shop does not answer with its share: too-many"):
        Hosts(lambda number, first: "too-many").run(Manner(patience_s=20.0))
    with pytest.raises(ValueError, match="1 or more"):
        Manner(batch=0)


@pytest.mark.parametrize("outcome", ["another-model", "malformed", "refused", "unusable"])
def test_what_was_answered_before_a_refusal_stays(outcome: str) -> None:
    hosts = Hosts(lambda number, first: "answered" if first < 4 else outcome)
    took: list[int] = []
    bulk = Bulk(hosts.ask, Manner(batch=2, in_flight=2), "job")
    with pytest.raises(HostRefuses, match=outcome):
        asyncio.run(bulk.run(VALUES, 0, lambda at, answer: took.append(at)))
    assert took == [0, 2]
    assert hosts.asked <= 4


def test_reasons_name_every_host_that_a_row_lacks() -> None:
    answer = answer_of(VALUES[:3], {"shop": "answered", "post": "answered"}, {"shop": [1], "post": [1, 2]})
    assert reasons_of(answer) == ["", "shop not-there; post not-there", "post not-there"]
    answer = answer_of(VALUES[:2], {"shop": "late", "post": "answered"}, {"post": [1]})
    assert reasons_of(answer) == ["shop late", "shop late; post not-there"]


IDS = ["a,1", 'b"2', "c 3", "d4", "e5"]
BELONGS = {"table": "t", "model": "r1", "job": "j"}


def batches(count: int = 5, classes: int = 0) -> list[tuple[int, Answer]]:
    return [
        (at, answer_of(VALUES[at : min(at + 2, count)], {"shop": "answered"}, {"shop": [3]}, classes))
        for at in range(0, count, 2)
    ]


def write_all(output: Path, classes: int = 0, belongs: Mapping[str, str] = BELONGS) -> Scores:
    scores = Scores(output, IDS, belongs)
    try:
        for at, answer in batches(classes=classes):
            if at >= scores.done:
                scores.write(at, answer)
            elif scores.done < min(at + 2, 5):
                # Stopped in the middle of this batch: the rest of it.
                rest = answer_of(VALUES[scores.done : min(at + 2, 5)], answer.hosts, {"shop": [3]}, classes)
                scores.write(scores.done, rest)
        scores.finish()
    finally:
        scores.close()
    return scores


@pytest.mark.parametrize("classes", [0, 3])
def test_a_file_that_was_cut_anywhere_is_gone_on_with(tmp_path: Path, classes: int) -> None:
    output = tmp_path / "scores.csv"
    tally = write_all(output, classes).tally
    assert (tally.joint, tally.degraded, tally.reasons) == (4, 1, {"shop not-there": 1})
    whole = output.read_bytes()
    with output.open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns = [name for name in rows[0] if name.startswith("score")]
    assert columns == (["score"] if not classes else ["score_0", "score_1", "score_2"])
    assert [row["id"] for row in rows] == IDS
    assert [float(row[columns[0]]) for row in rows] == [place / 7 for place in range(5)]
    assert [(row["degraded"], row["why"]) for row in rows[2:4]] == [("false", ""), ("true", "shop not-there")]
    ends = [place + 1 for place, letter in enumerate(whole) if letter == ord("\n")]
    for length in {0, *range(0, len(whole), 7), *ends, *(end - 1 for end in ends)}:
        output.unlink()
        part = tmp_path / "scores.csv.part"
        part.write_bytes(whole[:length])
        (tmp_path / "scores.csv.part.json").write_text(json.dumps(BELONGS))
        scores = write_all(output, classes)
        assert output.read_bytes() == whole
        assert scores.resumed == max(0, whole[:length].count(b"\n") - 1)
        assert scores.tally.degraded == 1
        assert sorted(one.name for one in tmp_path.iterdir()) == ["scores.csv"]
    assert output.stat().st_mode & 0o077 == 0


def test_a_file_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    output, part = tmp_path / "scores.csv", tmp_path / "scores.csv.part"
    scores = Scores(output, IDS, BELONGS)
    scores.write(0, batches()[0][1])
    with pytest.raises(ScoresRefused, match="by another process"):
        Scores(output, IDS, BELONGS)
    with pytest.raises(ValueError, match="rows from 4 on after 2"):
        scores.write(4, batches()[2][1])
    with pytest.raises(ValueError, match="2 of 5 rows"):
        scores.finish()
    with pytest.raises(ScoresRefused, match="has the columns"):
        scores.write(2, batches(classes=3)[1][1])
    scores.close()
    with pytest.raises(ScoresRefused, match="begun with another table and model; --fresh"):
        Scores(output, IDS, {**BELONGS, "table": "u", "model": "r2"})
    text = part.read_text()
    for damaged in (
        text.replace("false", "perhaps", 1),
        text.replace("0.0", "nan", 1),
        text.replace("b", "x", 1),
        text.replace(",false,\n", ",false,why\n", 1),
        "x" + text.replace("id,score", "id", 1),
        text + "\0" * 20 + "\n",
    ):
        part.write_text(damaged)
        with pytest.raises(ScoresRefused, match="not a line of these rows"):
            Scores(output, IDS, BELONGS)
    (tmp_path / "scores.csv.part.json").unlink()
    with pytest.raises(ScoresRefused, match="cannot be read"):
        Scores(output, IDS, BELONGS)
    scores = Scores(output, IDS, BELONGS, fresh=True)
    assert scores.done == 0
    scores.close()
    with pytest.raises(ScoresRefused, match="cannot be written"):
        Scores(tmp_path / "none" / "scores.csv", IDS, BELONGS)


# With a host that serves.


def new_rows(folder: Path, ids: Sequence[object]) -> Path:
    """Rows for the bank, whose column is x: in another order than its own, with columns that the model has not."""
    path = folder / "new.csv"
    path.write_text("note,x,id\n" + "".join(f"seven,{place + 1},{one}\n" for place, one in enumerate(ids)))
    return path


def scored(path: Path) -> list[tuple[str, float, str]]:
    with path.open(newline="") as file:
        return [(row["id"], float(row["score"]), row["why"]) for row in csv.DictReader(file)]


def test_new_rows_are_scored_with_the_host_and_both_write_it_down(tmp_path: Path) -> None:
    parties = trained(tmp_path)
    config = parties["bank"].config
    ids = [13, 99, 2, " 7 ", 12]
    data, output = new_rows(tmp_path, ids), tmp_path / "scores.csv"
    done: list[tuple[int, int]] = []

    class Stopped(Exception):
        pass

    def stop(count: int, total: int) -> None:
        done.append((count, total))
        if count == 2:
            raise Stopped

    with serving(parties["shop"]):
        with pytest.raises(Stopped):
            predict_file(config, data, output, Manner(batch=2, in_flight=1), progress=stop)
        assert not output.exists()
        found = predict_file(config, data, output, Manner(batch=2, in_flight=1))
    assert done == [(0, 5), (2, 5)]
    # The host adds 2 for ids it has; those of the bank's training table need not be there.
    assert scored(output) == [
        ("13", 3.0, ""),
        ("99", 2.0, "shop not-there"),
        ("2", 5.0, ""),
        ("7", 6.0, ""),
        ("12", 7.0, ""),
    ]
    assert (found.rows, found.resumed, found.tally.joint, found.tally.degraded) == (5, 2, 4, 1)
    bank, shop = audit(parties["bank"]), audit(parties["shop"])
    assert [(one["rows"], one["outcome"]) for one in bank] == [
        (2, "degraded"),
        (2, "answered"),
        (1, "answered"),
    ]
    assert [(one["who"], one["rows"], one["here"]) for one in shop] == [
        ("bank", 2, 1),
        ("bank", 2, 2),
        ("bank", 1, 1),
    ]
    assert [one["request_id"] for one in bank] == [one["request_id"] for one in shop]
    assert all(one["who"].startswith("predict, by user ") for one in bank)


def test_what_cannot_be_scored_is_named_before_anything_is_asked(tmp_path: Path) -> None:
    parties = trained(tmp_path, runs={"shop": "r2"})
    bank, output = parties["bank"].config, tmp_path / "scores.csv"
    for ids, why in (
        ([1, 1], "stand more than once"),
        (["é", "e\u0301"], "rows whose id stood before"),
        (["a\u0000b"], "texts that are no ids"),
    ):
        with pytest.raises(TableRefused, match=why):
            predict_file(bank, new_rows(tmp_path, ids), output, Manner())
    (tmp_path / "other.csv").write_text("id,y\n1,2\n")
    with pytest.raises(TableRefused, match="has no column 'x'"):
        predict_file(bank, tmp_path / "other.csv", output, Manner())
    data = new_rows(tmp_path, [5])
    with pytest.raises(ConfigRefused, match="shop is no guest"):
        predict_file(parties["shop"].config, data, output, Manner())
    with pytest.raises(ConfigRefused, match=r"serve\.most_ids is 1000"):
        predict_file(bank, data, output, Manner(batch=2_000))
    with serving(parties["shop"]), pytest.raises(HostRefuses, match="has run r2, not r1: another model"):
        predict_file(bank, data, output, Manner())
    (parties["bank"].folder / "part.model").unlink()
    with pytest.raises(ConfigRefused, match="train first"):
        predict_file(bank, data, output, Manner())
    assert not output.exists()


def headwater(*arguments: str) -> int:
    try:
        main(["fl", "vertical", *arguments])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_the_command_says_what_became_of_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parties = trained(tmp_path)
    data, output = new_rows(tmp_path, [5, 6]), tmp_path / "scores.csv"
    asked = (
        "predict",
        "--config",
        str(tmp_path / "bank" / "party.toml"),
        "--data",
        str(data),
        "--output",
        str(output),
    )
    assert headwater(*asked, "--patience", "100ms", "--strict") == Exit.NOT_READY
    assert "the same command goes on" in capsys.readouterr().err
    assert headwater(*asked, "--patience", "100ms") == 0
    assert "2 rows, 0 scored by all parties, 2 by the guest alone (2 shop away)" in capsys.readouterr().out
    with serving(parties["shop"]):
        assert headwater(*asked, "--yes", "--format", "json") == 0
    summary: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (summary["rows"], summary["joint"], summary["degraded"], summary["why"]) == (2, 2, 0, {})
    assert scored(output) == [("5", 3.0, ""), ("6", 4.0, "")]
    for wrong, code, why in (
        (("--deadline", "soon"), Exit.USAGE, "--deadline"),
        (("--patience", "0s"), Exit.USAGE, "no time above 0"),
        (("--batch", "5000"), Exit.SETTINGS, "serve.most_ids"),
    ):
        assert headwater(*asked, "--yes", *wrong) == code
        assert why in capsys.readouterr().err


def test_a_file_that_is_there_is_replaced_only_when_one_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "scores.csv"
    output.write_text("mine")
    monkeypatch.setattr("typer.confirm", lambda text, err: False)
    code = headwater("predict", "--config", "none.toml", "--data", "none.csv", "--output", str(output))
    assert (code, output.read_text()) == (Exit.DECLINED, "mine")
