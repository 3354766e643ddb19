"""The benchmark of joint models: sets are split as said, figures are those of the joint job, absences are named."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tenseal", reason="the extra `vertical` is not installed")

from benchmarks import __main__ as command
from benchmarks import (
    vertical,
    vertical_answers,
    vertical_boosting,
    vertical_linear,
    vertical_picture,
    vertical_split,
    vertical_transfer,
    vertical_work,
)
from benchmarks.report import Row
from benchmarks.vertical_linear import Wanted
from benchmarks.vertical_transfer import Curve, Learned
from benchmarks.vertical_work import HOST, SetMissing, Split, load, logistic_auc, train
from federated.vertical.boosting.kind import KIND as BOOSTING
from federated.vertical.boosting.options import BoostingOptions
from federated.vertical.tables import Table, write_csv
from federated.vertical.transfer.curve import Point

ROWS = 200


def made(folder: Path, name: str = "made") -> Split:
    """Labels that follow one column of each party, in the files of a set; the host's rows in another order."""
    rng = np.random.default_rng(3)
    features = rng.standard_normal((ROWS, 4))
    labels = (features[:, 0] + 2 * features[:, 2] > 0).astype(np.float64)
    ids = tuple(f"id{row}" for row in range(ROWS))
    write_csv(Table(ids, features[:, :2], ("a", "b"), labels), folder / f"{name}_hetero_guest.csv")
    host = Table(ids, features[:, 2:], ("c", "d"))
    write_csv(host.take(rng.permutation(ROWS)), folder / f"{name}_hetero_host.csv")
    return load(name, folder)


@pytest.fixture
def split(tmp_path: Path) -> Split:
    return made(tmp_path)


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No data set is there."""

    def absent(name: str) -> Split:
        raise SetMissing(f"{name} is not there")

    for module in (vertical_linear, vertical_boosting, vertical_split, vertical_transfer):
        monkeypatch.setattr(module, "load", absent)


class TestSets:
    def test_rows_are_aligned_and_split_by_class(self, split: Split) -> None:
        assert split.host.ids == split.guest.ids
        assert sorted([*split.train, *split.test]) == list(range(ROWS))
        assert len(split.test) == 0.3 * ROWS
        parts = [split.labels[rows].mean() for rows in (split.train, split.test)]
        assert parts[0] == pytest.approx(parts[1], abs=0.02)
        assert logistic_auc(split, split.pooled) > 0.98 > logistic_auc(split, split.guest.features)

    def test_files_that_are_not_there_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(SetMissing, match=r"absent_hetero_guest\.csv"):
            load("absent", tmp_path)

    @pytest.mark.skipif(
        not (vertical_work.DATA / "default_credit_hetero_guest.csv").exists(),
        reason="default_credit_*.csv is not in ../shared/data",
    )
    def test_pooled_and_alone_are_the_published_figures(self) -> None:
        found = load("default_credit")
        assert round(logistic_auc(found, found.pooled), 4) == 0.7166
        assert round(logistic_auc(found, found.guest.features), 4) == 0.6482

    @pytest.mark.parametrize(
        "measure",
        [
            lambda: vertical_linear._sets(vertical_linear.Sizes()),
            lambda: vertical_boosting.measure(vertical_boosting.Sizes()),
            lambda: vertical_split.measure(vertical_split.Sizes()),
            lambda: vertical_transfer.rows(
                vertical_transfer.learn(vertical_transfer.Sizes((vertical_transfer.CREDIT,)))
            ),
        ],
    )
    @pytest.mark.usefixtures("nowhere")
    def test_a_set_that_is_not_there_is_no_silent_pass(self, measure: Callable[[], list[Row]]) -> None:
        rows = measure()
        assert rows
        for row in rows:
            assert row.met is False
            assert row.work.endswith("not measured")
            assert "is not there" in row.note


class TestJobs:
    def test_scores_bytes_and_steps_are_those_of_the_job(self, split: Split) -> None:
        options = BoostingOptions(trees=2, depth=2, bins=4)
        job = train(BOOSTING, options, split)
        twin = vertical_boosting.plain_of(options, split.pooled[split.train], split.labels[split.train])
        assert np.array_equal(job.scores, twin.answer(split.pooled[split.test]))
        assert len(job.steps) == options.trees
        assert 0.0 < sum(job.steps) <= job.seconds
        assert job.bytes == sum(job.sent.values()) > job.sent[HOST] > 0
        assert split.auc(job.scores) > split.auc(job.alone)

    def test_an_aim_is_the_pooled_model_less_what_is_allowed(self) -> None:
        wanted = Wanted("made", 0.003, above=True)
        near, above = vertical_linear._quality("w", 0.700, 0.702, 0.640, wanted, aimed=True)
        assert near.aim == pytest.approx(0.699)
        assert above.ours == pytest.approx(0.06)
        assert (near.met, above.met) == (True, True)
        far, below = vertical_linear._quality("w", 0.68, 0.702, 0.640, wanted, aimed=True)
        assert (far.met, below.met) == (False, False)
        assert {row.met for row in vertical_linear._quality("w", 0.68, 0.702, 0.64, wanted, aimed=False)} == {
            None
        }

    def test_the_encrypted_epoch_stands_beside_the_tutorials(self) -> None:
        row, plain, _ = vertical_linear.outsourced(vertical_linear.Sizes(rounds=1))
        assert (row.peer, row.aim) == (160.0, 2.0)
        assert row.met == (row.ours <= 2.0)
        assert row.ours > plain.ours > 0.0
        assert "off by" in row.note


class TestAnswers:
    def test_percentiles_of_what_requests_took(self) -> None:
        asked = vertical_answers.Asked(tuple(float(one) for one in range(1, 102)), 3)
        low, high = vertical_answers._latency("w", asked)
        assert (low.ours, high.ours) == (51.0, 100.0)
        assert "3 rows by the guest alone" in low.note

    def test_a_command_that_fails_says_why(self, tmp_path: Path) -> None:
        with pytest.raises(vertical_answers.CommandEnded, match=r"absent\.csv"):
            vertical_answers.command(
                "split", str(tmp_path / "absent.csv"), "--label", "y", "--out", str(tmp_path)
            )


def points(share: float, *aucs: tuple[float, float]) -> tuple[Point, ...]:
    """A seed each: the transfer's AUC and that of the host's regression."""
    return tuple(
        Point(share, 98, 1.0, ours, {"logistic": alone, "boosting": alone - 0.1}, (ours + alone) / 2)
        for ours, alone in aucs
    )


class TestTransfer:
    def test_one_seed_below_misses_the_aim(self) -> None:
        above, below = points(0.01, (0.7, 0.6), (0.8, 0.7)), points(0.01, (0.7, 0.6), (0.69, 0.7))
        for found, met in ((above, True), (below, False)):
            learned = Learned((Curve(vertical_transfer.LATENT, (found, points(0.05, (0.7, 0.8)))),))
            one, stacked, five, _ = vertical_transfer.rows(learned)
            assert one.met is met
            assert (stacked.aim, stacked.met) == (None, None)
            assert (five.aim, five.met) == (None, None)
            assert five.ratio == pytest.approx(0.875)
            assert "logistic" in str(one.peer_name)

    def test_curves_are_learned_at_every_share(self) -> None:
        sizes = vertical_transfer.Sizes((vertical_transfer.LATENT,), (0.05, 0.2), 1_000, (0, 1), steps=5)
        (found,) = vertical_transfer.learn(sizes).curves
        assert [[one.rows for one in part] for part in found.points] == [[35, 35], [140, 140]]


class TestPicture:
    def test_it_shows_every_auc_beside_a_pooled_one(self, tmp_path: Path) -> None:
        joint = Row("a set: AUC", "AUC", 0.7, 0.69, True, None, 0.71, "pooled", 0.99)
        rows = [
            joint,
            replace(joint, work="another: AUC", aim=None, met=None),
            replace(joint, work="a set: AUC above the guest's alone", peer=None),
            replace(joint, work="transfer, a set: AUC"),
            Row("an epoch", "s", 1.0),
        ]
        assert [row.work for row in vertical_picture.shown(rows)] == ["a set: AUC", "another: AUC"]
        curve = Curve("made", (points(0.01, (0.7, 0.6)), points(0.2, (0.7, 0.8))))
        vertical_picture.draw(rows, [curve], tmp_path / "vertical.png")
        assert (tmp_path / "vertical.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_prints_rows_of_every_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if not (vertical_work.DATA / "breast_hetero_guest.csv").exists():
        pytest.skip("breast_*.csv is not in ../shared/data")
    tiny = vertical.Measures(
        vertical_linear.Sizes((Wanted("breast", 0.002, False),), ("taylor",), epochs=2, rounds=1),
        vertical_boosting.Sizes(("breast",), trees=1),
        vertical_split.Sizes(("breast",), epochs=1),
        vertical_transfer.Sizes((vertical_transfer.LATENT,), (0.05,), rows=1_000, seeds=(0,), steps=5),
        vertical_answers.Sizes(requests=20, batch=3, options=("epochs=2", 'surrogate="taylor"')),
    )
    monkeypatch.setattr(vertical, "QUICK", tiny)
    # The thread limits of children are not to outlive this test.
    monkeypatch.setattr(vertical, "limit_threads", lambda environ: None)
    plot = tmp_path / "vertical.png"
    monkeypatch.setattr(sys, "argv", ["benchmarks", "vertical", "--quick", "--json", "--plot", str(plot)])
    assert command.main() == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    works = [row["work"] for row in rows]
    assert len(set(works)) == len(works)
    for start in (
        "breast, logistic",
        "CKKS epoch",
        "breast, SecureBoost",
        "breast, split",
        "breast of",
        "transfer, latent",
    ):
        assert any(work.startswith(start) for work in works), start
    (killed,) = [row for row in rows if row["work"].endswith("killed: p50")]
    assert "3 rows by the guest alone" in killed["note"]
    assert plot.read_bytes().startswith(b"\x89PNG")
