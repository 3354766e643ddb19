"""Joint regression on real data: as good as the pooled model, better than the guest alone, and how long it takes."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tenseal", reason="the extra `vertical` is not installed")

from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

from federated.vertical.kinds import Setup
from federated.vertical.linear.kind import KIND
from federated.vertical.linear.model import GuestModel, HostModel
from federated.vertical.linear.options import LinearOptions
from federated.vertical.linear.outsourced import Owner, epoch, epoch_plain
from federated.vertical.linear.twin import train_plain
from federated.vertical.parties import run_local
from federated.vertical.tables import Table, read_table

DATA = Path(__file__).parents[4] / "shared" / "data"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def pair_of(name: str) -> tuple[Table, Table]:
    """Guest's and host's rows of the same people, in the guest's order."""
    if not (DATA / f"{name}_guest.csv").exists():
        pytest.skip(f"{name}_*.csv is not in ../shared/data")
    guest = read_table(DATA / f"{name}_guest.csv", label_column="y")
    return guest, read_table(DATA / f"{name}_host.csv").align(guest.ids)


def split(guest: Table) -> tuple[np.ndarray, np.ndarray]:
    rows = np.arange(len(guest))
    train, test = train_test_split(rows, test_size=0.3, random_state=0, stratify=guest.labels)
    return train, test


def pooled_auc(features: np.ndarray, labels: np.ndarray, train: np.ndarray, test: np.ndarray) -> float:
    scaler = StandardScaler().fit(features[train])
    model = LogisticRegression(max_iter=1000).fit(scaler.transform(features[train]), labels[train])
    return float(roc_auc_score(labels[test], model.decision_function(scaler.transform(features[test]))))


def joint_auc(tables: dict[str, Table], options: LinearOptions, train: np.ndarray, test: np.ndarray) -> float:
    """A whole encrypted job and the parts' joint answers; without a ``keeper`` where there is one host."""
    parties = {name: "guest" if name == "guest" else "host" for name in tables}
    if len(tables) > 2 or options.surrogate == "degree5":
        parties["keeper"] = "coordinator"
    roles = {}
    for name in parties:
        table = tables[name].take(train) if name in tables else None
        roles[name] = KIND.make(options, Setup(name, parties, table, 7, len(train)))(None)
    outcome = run_local(roles)
    assert KIND.load is not None
    guest = KIND.load(outcome.results["guest"].model)
    assert isinstance(guest, GuestModel)
    shares = {}
    for name in tables:
        part = KIND.load(outcome.results[name].model)
        if isinstance(part, HostModel):
            shares[name] = part.partial(tables[name].features[test])
    labels = tables["guest"].labels
    assert labels is not None
    return float(roc_auc_score(labels[test], guest.combine(tables["guest"].features[test], shares)))


def test_default_credit() -> None:
    guest, host = pair_of("default_credit_hetero")
    train, test = split(guest)
    labels = guest.labels
    assert labels is not None
    pooled = pooled_auc(np.hstack([guest.features, host.features]), labels, train, test)
    alone = pooled_auc(guest.features, labels, train, test)
    assert (round(pooled, 4), round(alone, 4)) == (0.7166, 0.6482)
    joint = joint_auc({"guest": guest, "host": host}, LinearOptions(), train, test)
    assert abs(joint - pooled) < 0.003
    assert joint > alone + 0.05


@pytest.mark.parametrize("hosts", [1, 2])
def test_breast_cancer(hosts: int) -> None:
    guest, host = pair_of("breast_hetero")
    train, test = split(guest)
    labels = guest.labels
    assert labels is not None
    pooled = pooled_auc(np.hstack([guest.features, host.features]), labels, train, test)
    assert round(pooled, 4) == 0.9988
    tables = {"guest": guest}
    for place, columns in enumerate(np.array_split(np.arange(len(host.names)), hosts)):
        names = tuple(host.names[column] for column in columns)
        tables[f"host{place}"] = Table(host.ids, host.features[:, columns], names)
    assert joint_auc(tables, LinearOptions(), train, test) > pooled - 0.002


def test_breast_cancer_between_two_by_taylors_surrogate() -> None:
    guest, host = pair_of("breast_hetero")
    train, test = split(guest)
    tables = {"guest": guest, "host": host}
    joint = joint_auc(tables, LinearOptions(surrogate="taylor"), train, test)
    # Its optimum is another one: section 9 names .995 to .997 for the exact minimiser, ours ends a little earlier.
    assert 0.99 < joint < 0.998


def test_the_surrogate_reaches_the_pooled_model_in_the_clear() -> None:
    guest, host = pair_of("default_credit_hetero")
    train, test = split(guest)
    labels = guest.labels
    assert labels is not None
    found = {}
    for surrogate in ("degree5", "taylor"):
        options = LinearOptions(surrogate=surrogate, tolerance=0.0)  # type: ignore[arg-type]
        trained = train_plain(guest.take(train), [host.take(train)], options, 7)
        scores = np.zeros(len(test))
        for own, table in zip(trained.parties, (guest, host), strict=True):
            scaled = own.scaling.apply(table.features[test])
            scores += scaled @ own.solver.weights[: scaled.shape[1]]
        found[surrogate] = roc_auc_score(labels[test], scores)
    assert found["degree5"] > 0.7166
    assert found["taylor"] < found["degree5"]


def test_an_epoch_over_encrypted_data_and_weights() -> None:
    # The shape of TenSEAL's tutorial, where an epoch takes 160 s: weights and data encrypted, weights renewed.
    rng = np.random.default_rng(0)
    features, weights = rng.standard_normal((780, 9)), rng.standard_normal(10) * 0.3
    labels = (features @ weights[:9] + rng.logistic(size=780) > 0).astype(float)
    owner = Owner()
    data = owner.encrypt(features, labels)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        renewed = epoch(owner.scheme, data, owner.encrypt_weights(weights), 1.0, 0.05)
        found = owner.decrypt_weights(renewed)
        seconds.append(time.perf_counter() - start)
    assert found == pytest.approx(epoch_plain(features, labels, weights, 1.0, 0.05), abs=1e-4)
    assert min(seconds) < 2.0
