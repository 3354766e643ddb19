"""Joint boosting: the trees of the twin in the clear, whoever holds which columns; resumed, tampered with, and read by
a curious party."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from sklearn.datasets import load_breast_cancer

pytest.importorskip("tenseal", reason="the extra `vertical` is not installed")

from federated.vertical.boosting.guest import make_guest
from federated.vertical.boosting.kind import KIND
from federated.vertical.boosting.messages import (
    CHILDREN,
    GRADIENTS,
    KEY,
    KEY_FIELDS,
    OFFER,
    SIDES,
    SPLITS,
    SUMS,
    child_fields,
)
from federated.vertical.boosting.model import GuestModel, HostModel, load
from federated.vertical.boosting.options import BoostingOptions
from federated.vertical.boosting.plain import PlainModel, boost
from federated.vertical.boosting.trees import LEAF
from federated.vertical.evaluation import measures
from federated.vertical.kinds import Setup
from federated.vertical.parties import Outcome, PartResult, PeerFault, Sent, run_local
from federated.vertical.pipeline import Alignment, joint
from federated.vertical.tables import Table, read_table
from federated.vertical.wire import pack, unpack

PARTIES = {"bank": "guest", "shop": "host", "post": "host"}
COLUMNS = {"bank": (0, 2), "shop": (2, 5), "post": (5, 7)}
SMALL = BoostingOptions(trees=2, depth=3, bins=8, least_rows=5)
DATA = Path(__file__).parents[4] / "shared" / "data"

Floats = npt.NDArray[np.float64]


def make_rows(rows: int = 300) -> Floats:
    """Seven columns: with missing values, with few values, one twice."""
    generator = np.random.default_rng(11)
    found = generator.normal(size=(rows, 7))
    found[generator.random(found.shape) < 0.1] = np.nan
    found[:, 3] = generator.integers(0, 3, rows)
    found[:, 6] = found[:, 4]
    return found


def labels_for(rows: Floats, loss: str) -> Floats:
    known = np.nan_to_num(rows)
    score = known[:, 0] + known[:, 3] * known[:, 5] + np.random.default_rng(12).normal(size=len(rows)) * 0.3
    if loss == "squared":
        return score
    cuts = [0.5] if loss == "logistic" else [0.0, 1.0]
    return np.digitize(score, cuts).astype(np.float64)


def tables(
    rows: Floats, labels: Floats, columns: Mapping[str, tuple[int, int]] = COLUMNS
) -> dict[str, Table]:
    ids = tuple(f"id{row}" for row in range(len(rows)))
    found: dict[str, Table] = {}
    for name, (first, last) in columns.items():
        names = tuple(f"secret{column}" for column in range(first, last))
        found[name] = Table(ids, rows[:, first:last], names, labels if name == "bank" else None)
    return found


def train(
    options: BoostingOptions,
    given: Mapping[str, Table],
    *,
    states: Mapping[str, bytes] | None = None,
    **how: Any,
) -> Outcome[Any]:
    parties = {name: PARTIES[name] for name in given}
    roles = {
        name: KIND.make(options, Setup(name, parties, table, 0, len(table)))(
            None if states is None else states[name]
        )
        for name, table in given.items()
    }
    return run_local(roles, **how)


def parts(outcome: Outcome[Any]) -> dict[str, Any]:
    return {name: load(result.model) for name, result in outcome.results.items()}


def joint_scores(found: Mapping[str, Any], given: Mapping[str, Table]) -> Floats:
    guest: GuestModel = found["bank"]
    shares = {host: found[host].partial(given[host].features) for host in guest.hosts}
    return guest.scores(given["bank"].features, shares)


def twin(options: BoostingOptions, rows: Floats, labels: Floats) -> PlainModel:
    return boost(
        rows,
        labels,
        trees=options.trees,
        depth=options.depth,
        bins=options.bins,
        rule=options.rule,
        loss=options.loss,
    )


def splits_of(found: Mapping[str, Any]) -> list[list[tuple[int, float, bool]]]:
    """Each tree's splits by node, with columns counted through all parties as the twin counts them."""
    guest: GuestModel = found["bank"]
    owners = ["bank", *guest.hosts]
    trees = []
    for tree in guest.trees:
        nodes = []
        for owner, split in zip(tree.owner, tree.split, strict=True):
            if owner != LEAF:
                table = found[owners[owner]].splits
                first = COLUMNS[owners[owner]][0]
                nodes.append(
                    (first + table.feature[split], table.threshold[split], table.missing_left[split])
                )
        trees.append(nodes)
    return trees


def twin_splits(model: PlainModel) -> list[list[tuple[int, float, bool]]]:
    table = model.splits
    return [
        [
            (table.feature[split], table.threshold[split], table.missing_left[split])
            for owner, split in zip(tree.owner, tree.split, strict=True)
            if owner != LEAF
        ]
        for tree in model.trees
    ]


@pytest.mark.parametrize("loss", ["logistic", "softmax", "squared"])
def test_encrypted_trees_are_the_twins(loss: str) -> None:
    """Two hosts; missing values; columns that are the same at two parties."""
    rows = make_rows()
    labels = labels_for(rows, loss)
    options = replace(SMALL, loss=loss)
    given = tables(rows, labels)
    outcome = train(options, given)
    found, plain = parts(outcome), twin(options, rows, labels)
    assert splits_of(found) == twin_splits(plain)
    for ours, theirs in zip(found["bank"].trees, plain.trees, strict=True):
        assert np.array_equal(ours.value, theirs.value)
        assert ours.gain == theirs.gain
    assert np.array_equal(joint_scores(found, given), plain.scores(rows))
    # Every party split somewhere, or nothing was shown.
    assert all(count > 0 for _, count in found["bank"].importance_by_party().values())
    unseen = make_rows(500)[300:]
    assert np.array_equal(joint_scores(found, tables(unseen, labels[:200])), plain.scores(unseen))
    result: PartResult = outcome.results["bank"]
    assert result.scores is not None
    assert np.array_equal(result.scores, plain.answer(rows))


def test_ties_are_broken_as_the_twin_breaks_them() -> None:
    """Equal gains everywhere: columns repeated within and across parties, mirrored, and few different labels."""
    generator = np.random.default_rng(13)
    bits = generator.integers(0, 2, (120, 3)).astype(np.float64)
    rows = np.concatenate([bits[:, :2], bits, 1 - bits[:, 1:]], axis=1)
    labels = 2.0 * bits[:, 0] + bits[:, 1] - bits[:, 2]
    options = BoostingOptions(trees=3, depth=3, bins=4, least_rows=2, loss="squared")
    outcome = train(options, tables(rows, labels))
    assert splits_of(parts(outcome)) == twin_splits(twin(options, rows, labels))


def test_the_guests_model_alone_is_the_twin_of_its_columns() -> None:
    rows = make_rows()
    labels = labels_for(rows, "logistic")
    found = parts(train(SMALL, tables(rows, labels)))["bank"]
    assert np.array_equal(found.alone(rows[:, :2]), twin(SMALL, rows[:, :2], labels).answer(rows[:, :2]))


def test_a_party_without_ways_to_split_takes_part() -> None:
    rows = make_rows(120)
    rows[:, 2:5] = 1.0
    labels = labels_for(rows, "logistic")
    given = tables(rows, labels)
    outcome = train(SMALL, given)
    assert {kind for _, to, kind in outcome.transcript.counts() if to == "shop"} == {KEY}
    assert np.array_equal(joint_scores(parts(outcome), given), twin(SMALL, rows, labels).scores(rows))
    columnless = {"bank": given["bank"], "post": given["post"]}
    columnless["bank"] = replace(given["bank"], features=rows[:, :0], names=())
    outcome = train(SMALL, columnless)
    assert outcome.results["bank"].figures["splits of guest"] == 0
    assert outcome.results["bank"].figures["splits of post"] > 0


def test_a_job_resumes_from_every_tree() -> None:
    rows = make_rows()
    given = tables(rows, labels_for(rows, "logistic"))
    options = replace(SMALL, trees=3)
    whole = train(options, given)
    assert list(whole.checkpoints["bank"]) == list(whole.checkpoints["post"]) == [0, 1, 2]
    for label in (0, 2):
        states = {name: kept[label] for name, kept in whole.checkpoints.items()}
        again = train(options, given, states=states, label=label)
        assert np.array_equal(joint_scores(parts(again), given), joint_scores(parts(whole), given))
        assert parts(again)["bank"].trees[2].gain == parts(whole)["bank"].trees[2].gain


class Pool:
    """Workers that are processes."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self.pool = pool

    def map(self, function: Callable[[Any], Any], chunks: Iterable[Any]) -> list[Any]:
        return list(self.pool.map(function, chunks))


@pytest.mark.slow
def test_several_processes_give_the_same_trees() -> None:
    rows = make_rows()
    labels = labels_for(rows, "logistic")
    given = tables(rows, labels)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        roles = {
            name: KIND.make(SMALL, Setup(name, PARTIES, table, 0, len(table), Pool(pool)))(None)
            for name, table in given.items()
        }
        outcome = run_local(roles)
    assert splits_of(parts(outcome)) == twin_splits(twin(SMALL, rows, labels))


# What each party sees.


def test_every_message_is_one_whose_meaning_is_stated() -> None:
    rows = make_rows()
    outcome = train(SMALL, tables(rows, labels_for(rows, "logistic")))
    kinds = {(sender == "bank", kind) for sender, _, kind in outcome.transcript.counts()}
    assert {kind for _, kind in kinds} == set(KIND.seen)
    assert {kind for from_guest, kind in kinds if not from_guest} == {OFFER, SUMS, SIDES}
    # Hosts never talk to each other.
    assert all("bank" in (sender, to) for sender, to, _ in outcome.transcript.counts())


def test_hosts_send_no_edge_and_no_name() -> None:
    rows = make_rows()
    outcome = train(SMALL, tables(rows, labels_for(rows, "logistic")), bodies=True)
    found = parts(outcome)
    for host in ("shop", "post"):
        model: HostModel = found[host]
        said = b"".join(one.body or b"" for one in outcome.transcript.of(sender=host))
        known = [np.float64(one).tobytes() for one in model.splits.threshold if np.isfinite(one)]
        known += [
            np.float64(one).tobytes() for one in rows[:50, COLUMNS[host][0]] if np.isfinite(one) and one % 1
        ]
        assert known
        assert not [one for one in known if one in said]
        assert b"secret" not in said
        # The guest's own file has no column of a host either.
        kept = outcome.results["bank"].model
        assert not [one for one in known if one in kept]
        assert all(name.encode() not in kept for name in model.names)
        assert not any(
            name.startswith("secret") and int(name[6:]) >= 2 for name in found["bank"].importance()
        )


def test_a_hosts_columns_have_other_numbers_in_every_job() -> None:
    rows = make_rows(60)
    given = tables(rows, labels_for(rows, "logistic"))
    options = replace(SMALL, trees=1, depth=1)
    seen = {tuple(parts(train(options, given))["shop"].opaque.tolist()) for _ in range(8)}
    # Eight times the same of six orders: once in 280,000.
    assert len(seen) > 1


def test_hosts_see_row_groups_and_nothing_of_labels_but_those() -> None:
    """Labels turned round: gradients change their sign, groups of rows stay, and so does all that hosts can read."""
    rows = make_rows()
    labels = labels_for(rows, "squared")
    labels -= labels.mean()
    options = replace(SMALL, loss="squared", trees=1)
    views = []
    for sign in (1.0, -1.0):
        outcome = train(options, tables(rows, sign * labels), bodies=True)
        sent = outcome.transcript.of(sender="bank", receiver="shop")
        views.append([(one.kind, one.body if one.kind == CHILDREN else None) for one in sent])
        gradients = [one.size for one in sent if one.kind == GRADIENTS]
        # One ciphertext's bytes, whatever is in it, and so many of them.
        assert all(size > 400_000 for size in gradients)
    assert views[0] == views[1]


def rows_found(least: int) -> tuple[list[int], int]:
    """The rows that a curious guest finds as the one difference of two sums at the root, and the one that is special in
    a host's column."""
    rows = make_rows(200)
    rows[:, 2] = np.arange(200) > 90
    rows[77, 2] = 0.5
    labels = labels_for(rows, "squared")
    found: list[int] = []

    def spy(host: str, sums: npt.NDArray[np.int64], values: npt.NDArray[np.int64]) -> None:
        if len(values) == 200:
            differences = {tuple((one - other).tolist()) for one in sums for other in sums}
            found.extend(row for row in range(200) if tuple(values[row].tolist()) in differences)

    options = replace(SMALL, loss="squared", trees=1, depth=1, least_rows=least)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(make_guest.__globals__, "_check_sums", spy)
        train(options, tables(rows, labels))
    return found, 77


def test_sums_tell_the_guest_of_no_single_row_while_bins_hold_enough() -> None:
    """The leak that is stated: with bins of one row the guest finds that row; ``least_rows`` is against it."""
    found, special = rows_found(least=1)
    assert special in found
    assert rows_found(least=5)[0] == []


# What a party does that breaks the rules.


def tampered(kind: str, change: Callable[[bytes], bytes | None]) -> Callable[[Sent], list[tuple[str, bytes]]]:
    """Changes the second message of ``kind``; None drops the field of bytes to nothing."""
    seen = [0]

    def twist(message: Sent) -> list[tuple[str, bytes]]:
        assert message.body is not None
        if message.kind != kind:
            return [(message.kind, message.body)]
        seen[0] += 1
        body = change(message.body) if seen[0] == 2 else message.body
        return [] if body is None else [(message.kind, body)]

    return twist


@pytest.mark.parametrize("kind", [KEY, OFFER, GRADIENTS, SUMS, SPLITS, SIDES, CHILDREN])
def test_bodies_that_are_cut_short_are_the_senders_fault(kind: str) -> None:
    rows = make_rows(120)
    with pytest.raises(PeerFault) as caught:
        train(SMALL, tables(rows, labels_for(rows, "logistic")), twist=tampered(kind, lambda body: body[:-1]))
    assert (caught.value.peer == "bank") == (kind not in (OFFER, SUMS, SIDES))
    assert caught.value.rule in ("malformed", "ciphertext")


@pytest.mark.parametrize("kind", [GRADIENTS, SUMS, SIDES, CHILDREN])
def test_a_message_that_comes_twice_is_refused(kind: str) -> None:
    rows = make_rows(120)

    def twice(message: Sent) -> list[tuple[str, bytes]]:
        assert message.body is not None
        return [(message.kind, message.body)] * (1 + (message.kind == kind))

    with pytest.raises(PeerFault) as caught:
        train(SMALL, tables(rows, labels_for(rows, "logistic")), twist=twice)
    assert caught.value.rule in ("kind", "malformed", "ciphertexts")


@pytest.mark.parametrize("kind", [GRADIENTS, SUMS])
def test_a_changed_ciphertext_is_noticed(kind: str) -> None:
    """One bit in the middle of a ciphertext: not readable, or noise where sums should be."""
    rows = make_rows(120)

    def change(body: bytes) -> bytes:
        at = len(body) - 200_000
        return body[:at] + bytes((body[at] ^ 1,)) + body[at + 1 :]

    with pytest.raises(PeerFault) as caught:
        train(SMALL, tables(rows, labels_for(rows, "logistic")), twist=tampered(kind, change))
    assert caught.value.rule in ("ciphertext", "sums", "sides")


def test_rows_that_a_host_makes_up_are_noticed() -> None:
    rows = make_rows()

    def change(body: bytes) -> bytes:
        return body[:-1] + bytes((body[-1] ^ 0x10,))

    seen = [0]

    def twist(message: Sent) -> list[tuple[str, bytes]]:
        assert message.body is not None
        # The first sides that say anything: rows' bits stand at the end.
        if message.kind == SIDES and len(message.body) > 100 and not seen[0]:
            seen[0] = 1
            return [(message.kind, change(message.body))]
        return [(message.kind, message.body)]

    with pytest.raises(PeerFault, match="sides"):
        train(SMALL, tables(rows, labels_for(rows, "logistic")), twist=twist)
    assert seen[0]


def host_against(answers: Callable[[str, bytes], bytes], options: BoostingOptions = SMALL) -> None:
    """Run with the guest's messages to the shop changed by ``answers``."""
    rows = make_rows(200)
    given = tables(rows, labels_for(rows, "logistic"))

    def twist(message: Sent) -> list[tuple[str, bytes]]:
        assert message.body is not None
        if message.sender == "bank" and message.receiver == "shop":
            return [(message.kind, answers(message.kind, message.body))]
        return [(message.kind, message.body)]

    train(options, given, twist=twist)


def test_a_guest_that_isolates_rows_is_refused() -> None:
    """A node of one row would give away that row's bins, column by column."""

    def answers(kind: str, body: bytes) -> bytes:
        if kind != CHILDREN:
            return body
        left = unpack(body, "bank", child_fields(200))["left"].copy()
        left[:] = 0
        left[0] = 0x80
        return pack({"left": left})

    with pytest.raises(PeerFault, match="fewer rows than agreed") as caught:
        host_against(answers)
    assert caught.value.peer == "bank"


def test_a_guest_that_takes_what_is_not_offered_is_refused() -> None:
    def answers(kind: str, body: bytes) -> bytes:
        if kind != SPLITS:
            return body
        return pack(
            {
                "owner": np.array([2], np.uint8),
                "ties": np.array([1], np.int32),
                "best": np.array([9_999], np.int32),
            }
        )

    with pytest.raises(PeerFault, match="not offered"):
        host_against(answers)


def test_a_guest_with_other_rules_is_refused() -> None:
    def answers(kind: str, body: bytes) -> bytes:
        if kind != KEY:
            return body
        fields = unpack(body, "bank", KEY_FIELDS)
        return pack({**fields, "least": 1})

    with pytest.raises(PeerFault, match="least_rows"):
        host_against(answers)


def test_a_key_that_is_none_is_refused() -> None:
    def answers(kind: str, body: bytes) -> bytes:
        return pack({**unpack(body, "bank", KEY_FIELDS), "public": b"no key"}) if kind == KEY else body

    with pytest.raises(PeerFault) as caught:
        host_against(answers)
    assert caught.value.peer == "bank"


def test_tables_that_do_not_fit_are_refused() -> None:
    rows = make_rows(60)
    given = tables(rows, labels_for(rows, "squared"))
    with pytest.raises(ValueError, match="two values"):
        train(replace(SMALL, loss="logistic"), given)
    with pytest.raises(ValueError, match="labels"):
        train(SMALL, {**given, "bank": replace(given["bank"], labels=None)})
    with pytest.raises(ValueError, match=r"60 rows allow no split with 31 .* take lower least_rows"):
        train(replace(SMALL, least_rows=31), given)


# As good as all columns in one place.


def test_the_whole_job_scores_what_was_held_out() -> None:
    found = load_breast_cancer()
    ids = tuple(str(row) for row in range(len(found.data)))
    columns = {"bank": (0, 10), "shop": (10, 30)}
    roles = {}
    for name, (first, last) in columns.items():
        names = tuple(f"c{column}" for column in range(first, last))
        labels = found.target.astype(np.float64) if name == "bank" else None
        table = Table(ids, found.data[:, first:last], names, labels)
        parties = {one: PARTIES[one] for one in columns}
        options = BoostingOptions(trees=3, bins=8)
        roles[name] = joint(KIND, options, Setup(name, parties, table, 5), Alignment(), 0.3)(None)
    figures = run_local(roles).results["bank"].figures
    assert figures["test auc"] > 0.97
    assert figures["splits of shop"] > 0
    assert 0.9 < figures["fallback auc"] < 1.0


@pytest.mark.slow
def test_default_credit_is_as_good_as_pooled() -> None:
    """20 trees of depth 3 with 32 bins on real data: the very scores of the twin in the clear."""
    if not (DATA / "default_credit_hetero_guest.csv").exists():
        pytest.skip(f"no default_credit in {DATA}")
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]

    bank = read_table(DATA / "default_credit_hetero_guest.csv", label_column="y")
    shop = read_table(DATA / "default_credit_hetero_host.csv").align(bank.ids)
    assert bank.labels is not None
    kept, held = train_test_split(np.arange(len(bank)), test_size=0.3, random_state=0, stratify=bank.labels)
    options = BoostingOptions()
    began = time.monotonic()
    outcome = train(options, {"bank": bank.take(kept), "shop": shop.take(kept)})
    spent = time.monotonic() - began
    found = parts(outcome)
    scores = found["bank"].combine(bank.features[held], {"shop": found["shop"].partial(shop.features[held])})
    rows = np.concatenate([bank.features, shop.features], axis=1)
    pooled = twin(options, rows[kept], bank.labels[kept])
    assert np.array_equal(scores, pooled.answer(rows[held]))
    truth = bank.labels[held]
    peer = HistGradientBoostingClassifier(
        max_iter=20, max_depth=3, max_bins=32, learning_rate=0.3, l2_regularization=1.0, early_stopping=False
    ).fit(rows[kept], bank.labels[kept])
    ours = measures(truth, scores)["auc"]
    theirs = measures(truth, peer.predict_proba(rows[held])[:, 1])["auc"]
    alone = measures(truth, found["bank"].alone(bank.features[held]))["auc"]
    print(
        f"joint {ours:.4f}, scikit-learn's {theirs:.4f}, guest alone {alone:.4f}, {spent / 20:.2f} s a tree"
    )
    assert ours > theirs - 0.003
    assert ours > alone + 0.03
