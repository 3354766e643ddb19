"""Measures against scikit-learn's and by hand; a whole job as one role."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score, roc_curve

from federated.psi.kind import KIND as PSI
from federated.psi.kind import PsiOptions
from federated.vertical.evaluation import baselines, ks, measures, task_of
from federated.vertical.kinds import Setup
from federated.vertical.parties import PartResult, PeerFault, Role, Sent, run_local
from federated.vertical.pipeline import ALIGNED, Alignment, check_roles, held_out, joint
from federated.vertical.tables import Table
from federated.vertical.wire import pack
from tests.support.vertical_sums import KIND, SumsOptions

ROLES = {"bank": "guest", "post": "host", "shop": "host"}


def test_auc_and_ks_are_those_of_scikit_learn() -> None:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 500).astype(np.float64)
    scores = np.round(labels + generator.normal(size=500), 1)
    found = measures(labels, scores)
    false, hits, _ = roc_curve(labels, scores)
    assert found["auc"] == pytest.approx(roc_auc_score(labels, scores))
    assert found["ks"] == pytest.approx(np.abs(hits - false).max())
    assert measures(2 * labels - 1, scores) == found


def test_what_labels_are_decides_what_is_measured() -> None:
    numbers = np.array([0.5, 1.5, 2.5, 3.5])
    assert task_of(numbers) == "number"
    assert measures(numbers, numbers + 2.0) == {"rmse": 2.0}
    classes = np.array([0.0, 1.0, 3.0, 3.0])
    scores = np.eye(3)[[0, 1, 2, 0]]
    assert measures(classes, scores) == {"accuracy": 0.75}
    assert measures(np.ones(3), np.ones(3)) == {}
    assert ks(np.array([True, False]), np.array([1.0, 0.0])) == 1.0


def test_baselines_of_both_tasks_know_what_there_is_to_know() -> None:
    generator = np.random.default_rng(1)
    features = generator.normal(size=(400, 3))
    features[0, 0] = np.nan
    labels = (features[:, 1] > 0).astype(np.float64)
    found = baselines((features[:300], labels[:300]), (features[300:], labels[300:]))
    assert found["logistic"]["auc"] > 0.95
    assert found["boosting"]["auc"] > 0.95
    numbers = baselines((features[:300], features[:300, 1]), (features[300:], features[300:, 1]))
    assert numbers["ridge"]["rmse"] < 0.1


def tables(rows: int = 20) -> dict[str, Table]:
    ids = tuple(str(row) for row in range(rows))
    generator = np.random.default_rng(2)
    found = {name: Table(ids, generator.normal(size=(rows, 2)), ("x", "z")) for name in ROLES}
    found["bank"] = replace(found["bank"], labels=(np.arange(rows) % 4 == 0).astype(np.float64))
    return found


def roles(given: dict[str, Table], test: float = 0.25) -> dict[str, object]:
    return {
        name: joint(KIND, SumsOptions(turns=2), Setup(name, ROLES, given[name], 7), Alignment(), test)(None)
        for name in ROLES
    }


def test_a_whole_job_trains_on_the_rest_and_scores_what_is_held_out() -> None:
    given = tables()
    outcome = run_local(roles(given))  # type: ignore[arg-type]
    results: dict[str, PartResult] = dict(outcome.results)
    test = results["bank"].test
    assert test is not None
    assert len(test) == 5
    assert given["bank"].labels is not None
    assert given["bank"].labels[test].sum() == 1  # a quarter of five positives
    kept = np.setdiff1d(np.arange(20), test)
    expected = 2 * sum(given[name].features[kept].sum() for name in ("post", "shop"))
    assert results["bank"].figures["total"] == pytest.approx(expected)
    scores = sum(given[name].features[test].sum(axis=1) for name in ROLES)
    assert results["bank"].scores == pytest.approx(scores)
    assert results["bank"].figures["test auc"] == measures(given["bank"].labels[test], scores)["auc"]
    assert list(outcome.checkpoints["shop"]) == [ALIGNED, ALIGNED + 1, ALIGNED + 2]


def labels_told(held: np.ndarray, labels: np.ndarray, test: float, seed: int) -> float:
    """Part of the labels that a host knows for certain from held-out positions, the seed, and how large the classes
    are: a class's n-th row is held out if n is among its drawn places."""
    rows, sizes = len(labels), [int((labels == value).sum()) for value in (0, 1)]
    generator = np.random.default_rng([seed, 0x7E57])
    drawn = [set(generator.permutation(size)[: round(test * size)].tolist()) for size in sizes]
    is_held = np.isin(np.arange(rows), held)

    def fits(row: int, zeros: int, value: int) -> bool:
        place = (zeros, row - zeros)[value]
        return 0 <= place < sizes[value] and (place in drawn[value]) == is_held[row]

    def steps(row: int, zeros: int) -> list[tuple[int, int]]:
        return [(value, zeros + 1 - value) for value in (0, 1) if fits(row, zeros, value)]

    # How many rows of class 0 there may be before each row, from the start and back from the end.
    before = [{0}]
    for row in range(rows):
        before.append({to for zeros in before[-1] for _, to in steps(row, zeros)})
    after, certain = {sizes[0]}, 0
    for row in reversed(range(rows)):
        kept = {(zeros, value) for zeros in before[row] for value, to in steps(row, zeros) if to in after}
        certain += {value for _, value in kept} == {labels[row]}
        after = {zeros for zeros, _ in kept}
    return certain / rows


def test_held_out_positions_do_not_tell_labels() -> None:
    generator = np.random.default_rng(3)
    labels = generator.permutation(np.repeat([0.0, 1.0], 100))
    table = Table(tuple(map(str, range(200))), generator.normal(size=(200, 1)), ("x",), labels)
    held = held_out(table, 0.3, 5)
    assert held.tolist() == held_out(table, 0.3, 5).tolist()
    assert labels[held].sum() == 30
    assert labels_told(held, labels, 0.3, 5) < 0.05
    # By the seed alone:
    generator = np.random.default_rng([5, 0x7E57])
    groups = [generator.permutation(np.flatnonzero(labels == value))[:30] for value in (0, 1)]
    assert labels_told(np.concatenate(groups), labels, 0.3, 5) > 0.1


def test_a_whole_job_goes_on_from_each_of_its_checkpoints() -> None:
    given = tables()
    whole = run_local(roles(given))  # type: ignore[arg-type]
    for label in (ALIGNED, ALIGNED + 1, ALIGNED + 2):
        again = run_local(
            {
                name: joint(
                    KIND, SumsOptions(turns=2), Setup(name, ROLES, given[name], 7), Alignment(), 0.25
                )(whole.checkpoints[name][label])
                for name in ROLES
            },
            label=label,
        )
        assert again.results["shop"].figures == whole.results["shop"].figures
        assert again.results["bank"].scores == pytest.approx(whole.results["bank"].scores)


def test_tables_in_another_order_are_refused_by_digest() -> None:
    given = tables()
    given["shop"] = given["shop"].take(np.arange(20)[::-1].copy())
    with pytest.raises(PeerFault, match="bank: alignment"):
        run_local(roles(given))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("rows", pack({"count": 21, "test": np.array([0])})),
        ("rows", pack({"count": 20, "test": np.array([20])})),
        ("rows", pack({"count": 20, "test": np.array([3, 3])})),
        ("partial", pack({"partial": np.ones(4)})),
        ("partial", pack({"partial": np.ones((5, 2))})),
        ("partial", pack({"partial": np.full(5, np.nan)})),
    ],
)
def test_a_lie_about_rows_or_a_share_is_its_senders_fault(kind: str, body: bytes) -> None:
    def lie(sent: Sent) -> Iterable[tuple[str, bytes]]:
        return [(sent.kind, body if sent.kind == kind else sent.body or b"")]

    with pytest.raises(PeerFault) as caught:
        run_local(roles(tables()), twist=lie)  # type: ignore[arg-type]
    assert caught.value.peer == ("bank" if kind == "rows" else "post")


def test_parties_that_a_kind_does_not_have_and_too_few_rows() -> None:
    setup = Setup("bank", {"bank": "guest", "c": "coordinator"}, None, 0)
    with pytest.raises(ValueError, match="takes 1 to 8 as host, there are 0"):
        check_roles(KIND, setup)
    with pytest.raises(ValueError, match="sums has no coordinator"):
        check_roles(KIND, Setup("bank", {"bank": "guest", "h": "host", "c": "coordinator"}, None, 0))
    with pytest.raises(ValueError, match="9 rows are joint"):
        run_local(roles(tables(9)))  # type: ignore[arg-type]


@pytest.mark.parametrize("hosts", [1, 2])
def test_rows_are_aligned_by_psi_and_the_job_goes_on_from_each_checkpoint(hosts: int) -> None:
    parties = dict(list(ROLES.items())[: hosts + 1])
    given = {name: table for name, table in tables(30).items() if name in parties}
    for place, name in enumerate(parties):
        shuffled = np.random.default_rng(place).permutation(30)[: 30 - 3 * place]
        given[name] = given[name].take(shuffled.astype(np.int64))
    psi = Alignment(PSI, PsiOptions(chunk=4))

    def made(name: str, state: bytes | None = None) -> Role[PartResult]:
        return joint(KIND, SumsOptions(turns=2), Setup(name, parties, given[name], 7), psi, 0.25)(state)

    whole = run_local({name: made(name) for name in parties})
    ids = [[given[name].ids[row] for row in whole.results[name].rows] for name in parties]
    assert all(one == ids[0] for one in ids)
    assert set(ids[0]) == set.intersection(*(set(table.ids) for table in given.values()))
    labels = list(whole.checkpoints["bank"])
    assert labels[-3:] == [ALIGNED, ALIGNED + 1, ALIGNED + 2]
    for label in labels:
        again = run_local({name: made(name, whole.checkpoints[name][label]) for name in parties}, label=label)
        assert again.results["bank"].figures == pytest.approx(whole.results["bank"].figures)
