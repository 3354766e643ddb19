"""Joint binning: the counts of the twin in the clear, whoever holds which columns; resumed, tampered with, and read
by a curious party."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("tenseal", reason="the extra `vertical` is not installed")

from federated.vertical.binning import guest as guest_module
from federated.vertical.binning.columns import cut_columns
from federated.vertical.binning.evidence import entropy_bits, outcomes, weigh
from federated.vertical.binning.findings import TITLE
from federated.vertical.binning.host import Shown
from federated.vertical.binning.kind import KIND
from federated.vertical.binning.messages import (
    EVENT_FIELDS,
    EVENTS,
    KEY,
    KEY_FIELDS,
    OFFER,
    OFFER_FIELDS,
    SUMS,
    TOLD,
)
from federated.vertical.binning.options import BinningOptions, Tell
from federated.vertical.binning.plain import count_classes
from federated.vertical.binning.telling import WOE_MOST, check_told, tell, told_bits
from federated.vertical.kinds import Setup
from federated.vertical.parties import Outcome, PeerFault, Sent, run_local
from federated.vertical.tables import Table
from federated.vertical.wire import pack, unpack

PARTIES = {"bank": "guest", "shop": "host", "post": "host"}
COLUMNS = {"bank": (0, 2), "shop": (2, 6), "post": (6, 8)}
SMALL = BinningOptions(bins=6, least_rows=5)

Floats = npt.NDArray[np.float64]


def make_rows(rows: int = 300) -> Floats:
    """Eight columns: with many, few and only missing values, with few values, constant."""
    generator = np.random.default_rng(21)
    found = generator.normal(size=(rows, 8))
    found[:, 3] = generator.integers(0, 3, rows)
    found[generator.random(rows) < 0.2, 2] = np.nan
    found[:3, 4] = np.nan
    found[:, 5] = 7.0
    found[3:, 7] = np.nan
    return found


def labels_for(rows: Floats, classes: int = 2) -> Floats:
    score = np.nan_to_num(rows[:, 0]) + rows[:, 3] + np.nan_to_num(rows[:, 2])
    cuts = np.quantile(score, np.linspace(0, 1, classes + 1)[1:-1])
    return 2.0 * np.digitize(score, cuts).astype(np.float64) - 1.0


def tables(rows: Floats, labels: Floats) -> dict[str, Table]:
    ids = tuple(f"id{row}" for row in range(len(rows)))
    return {
        name: Table(
            ids,
            rows[:, first:last],
            tuple(f"secret{column}" for column in range(first, last)),
            labels if name == "bank" else None,
        )
        for name, (first, last) in COLUMNS.items()
    }


def run(
    options: BinningOptions,
    given: Mapping[str, Table],
    *,
    states: Mapping[str, bytes] | None = None,
    **how: Any,
) -> Outcome[Any]:
    parties = {name: PARTIES[name] for name in given}
    return run_local(
        {
            name: KIND.make(options, Setup(name, parties, table, 0, len(table)))(
                None if states is None else states[name]
            )
            for name, table in given.items()
        },
        **how,
    )


def findings(outcome: Outcome[Any]) -> dict[str, dict[str, Any]]:
    assert KIND.findings is not None
    return {name: dict(KIND.findings(result.model)) for name, result in outcome.results.items()}


def at_the_guest(found: Mapping[str, Any], host: str) -> dict[str, str]:
    """The guest's name of each of the host's columns, by the host's."""
    return {row["column"]: row["at the guest"] for row in found[host]["tables"][TITLE]}


@pytest.mark.parametrize("classes", [2, 4])
def test_counts_and_values_are_the_twins(classes: int) -> None:
    """Two hosts; every count exactly, every information value to the last bit, whatever order the bins come in."""
    rows = make_rows()
    labels = labels_for(rows, classes)
    found = findings(run(SMALL, tables(rows, labels)))
    plain = count_classes(rows, labels, SMALL)
    assert sum(len(one) == 1 for one in plain) == 2
    table = {row["column"]: row for row in found["bank"]["tables"][TITLE]}
    for name, (first, last) in COLUMNS.items():
        known = at_the_guest(found, name) if name != "bank" else {}
        for column in range(first, last):
            called = known.get(f"secret{column}", f"secret{column}")
            ours = [tuple(one["rows"].values()) for one in found["bank"]["bins"][called]]
            twin = [tuple(one) for one in plain[column].tolist()]
            assert (ours == twin) if name == "bank" else (sorted(ours) == sorted(twin))
            evidence = weigh(plain[column], SMALL.smoothing)
            assert table[called]["iv"] == evidence.iv.max()
            assert table[called]["ks"] == evidence.ks[evidence.best]
            assert table[called]["bins"] == len(twin)
        for row in found[name]["tables"][TITLE] if name != "bank" else []:
            # A host is told of the class that a column tells best, in steps.
            assert row["iv"] == round(min(3.0, table[row["at the guest"]]["iv"]), 3)
    order = [row["iv"] for row in found["bank"]["tables"][TITLE]]
    assert order == sorted(order, reverse=True)
    assert order[0] > 0.3
    assert order[-1] == 0.0


def test_every_row_stands_in_one_bin_and_bins_are_large_enough() -> None:
    rows = make_rows()
    columns = cut_columns(rows, SMALL)
    assert columns.bins.tolist() == [6, 6, 7, 3, 6, 1, 6, 1]
    assert columns.rows().min() >= SMALL.least_rows
    column, code = columns.places()
    for place, (at, upto) in enumerate(zip(column, code, strict=True)):
        cut, values = columns.cuts[at][upto], rows[:, at]
        inside = np.isnan(values) if cut.missing else np.zeros(len(values), np.bool_)
        if not cut.missing:
            after, end = -np.inf if cut.after is None else cut.after, np.inf if cut.upto is None else cut.upto
            inside = ((values > after) & (values <= end)) | (cut.joined & np.isnan(values))
        assert np.array_equal(inside, columns.codes[:, at] == upto)
        assert int(inside.sum()) == columns.rows()[place]


def test_weights_are_those_of_the_textbook() -> None:
    counts = np.array([[90, 10], [50, 50], [60, 40]])
    found = weigh(counts, 1e-9)
    events, others = counts[:, 1] / 100, counts[:, 0] / 200
    assert np.allclose(found.woe[:, 0], np.log(events / others))
    assert found.iv[0] == pytest.approx(float(((events - others) * np.log(events / others)).sum()))
    # Two of three bins have a larger share of events: at the threshold between, the statistic is largest.
    assert found.ks[0] == pytest.approx((50 + 40) / 100 - (50 + 60) / 200)
    # A bin without events has a weight still, and its information is bounded.
    empty = weigh(np.array([[10, 0], [5, 5]]), 0.5)
    assert empty.woe[0, 0] == pytest.approx(np.log((0.5 / 6) / (10.5 / 16)))
    assert outcomes(np.ones((3, 5), np.int64)).shape == (3, 5)
    assert entropy_bits(np.array([50, 50])) == pytest.approx(100.0)


def test_a_job_resumes_from_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_module, "OUTPUTS_A_TASK", 1)
    rows = make_rows()
    given = tables(rows, labels_for(rows, 3))
    whole = run(SMALL, given)
    labels = list(whole.checkpoints["bank"])
    assert labels == list(whole.checkpoints["shop"]) == list(whole.checkpoints["post"])
    assert len(labels) > 1
    for label in labels:
        states = {name: kept[label] for name, kept in whole.checkpoints.items()}
        again = run(SMALL, given, states=states, label=label)
        # The same secret order, too: numbers of columns stay what they were.
        assert findings(again) == findings(whole)
        sums = again.transcript.of(sender="shop", kind=SUMS)
        assert len(sums) == len(labels) - 1 - label


def test_a_host_that_has_other_bins_after_a_restart_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_module, "OUTPUTS_A_TASK", 1)
    rows = make_rows()
    given = tables(rows, labels_for(rows))
    states = {name: kept[0] for name, kept in run(SMALL, given).checkpoints.items()}
    # The other host's state is of another run: another order.
    states["shop"] = run(SMALL, given).checkpoints["shop"][0]
    with pytest.raises(PeerFault, match=r"shop: offer: .* not those of the checkpoint"):
        run(SMALL, given, states=states, label=0)


def test_a_host_without_columns_and_a_guest_without_take_part() -> None:
    rows = make_rows(60)
    given = tables(rows, labels_for(rows))
    for bare in ("bank", "post"):
        empty = replace(given[bare], features=given[bare].features[:, :0], names=())
        found = findings(run(SMALL, {**given, bare: empty}))
        assert found[bare]["columns"] == []
        assert len(found["bank"]["tables"][TITLE]) == 6
    alone = {name: replace(given[name], features=given[name].features[:, :0], names=()) for name in PARTIES}
    outcome = run(SMALL, alone)
    assert findings(outcome)["bank"]["tables"][TITLE] == []
    assert all(one.size < 1_000 for one in outcome.transcript.of(kind=EVENTS))


def test_columns_are_selected_over_all_parties() -> None:
    rows = make_rows()
    given = tables(rows, labels_for(rows))
    value = [float(weigh(one, 0.5).iv.max()) for one in count_classes(rows, labels_for(rows), SMALL)]
    best = {f"secret{column}" for column in np.argsort(value)[::-1][:3].tolist()}
    found = findings(run(replace(SMALL, select=3), given))
    assert {name for one in found.values() for name in one["columns"]} == best
    assert best & {"secret0", "secret1"}
    assert best & {"secret2", "secret3", "secret4"}
    found = findings(run(replace(SMALL, least_iv=0.05), given))
    assert {name for one in found.values() for name in one["columns"]} == {
        f"secret{column}" for column in range(8) if value[column] >= 0.05
    }
    found = findings(run(SMALL, given))
    assert sum(len(one["columns"]) for one in found.values()) == 8


# What each party sees.


def test_every_message_is_one_whose_meaning_is_stated() -> None:
    rows = make_rows()
    outcome = run(SMALL, tables(rows, labels_for(rows)), bodies=True)
    kinds = {(sender == "bank", kind) for sender, _, kind in outcome.transcript.counts()}
    assert {kind for _, kind in kinds} == set(KIND.seen)
    assert {kind for from_guest, kind in kinds if not from_guest} == {OFFER, SUMS}
    assert all("bank" in (sender, to) for sender, to, _ in outcome.transcript.counts())
    # No name and no edge leaves a host, nor is one in what the guest keeps.
    for host in ("shop", "post"):
        first = COLUMNS[host][0]
        said = b"".join(one.body or b"" for one in outcome.transcript.of(sender=host))
        edges = [cut.upto for one in cut_columns(rows[:, first:], SMALL).cuts for cut in one if cut.upto]
        assert edges
        assert b"secret" not in said
        assert not [one for one in edges if np.float64(one).tobytes() in said]
    kept = outcome.results["bank"].model.decode()
    assert all(f"secret{column}" not in kept for column in range(2, 8))


def test_numbers_of_columns_and_order_of_bins_are_new_in_every_job() -> None:
    columns = cut_columns(make_rows(60), SMALL)
    column, code = columns.places()
    drawn = [Shown.drawn(columns, os.urandom) for _ in range(20)]
    # Twenty times the same of 40,320 orders, or of those of bins: never.
    assert len({tuple(one.places.tolist()) for one in drawn}) > 1
    assert len({tuple(code[one.order].tolist()) for one in drawn}) > 1
    for one in drawn:
        # Column by column as numbered, each with all of its bins.
        assert np.array_equal(np.repeat(np.arange(8), one.bins(columns)), one.places[column[one.order]])
        assert sorted(one.order.tolist()) == list(range(len(column)))


def test_hosts_see_nothing_of_labels_but_what_they_are_told() -> None:
    """Labels turned round: all that a host can read stays as it is, where it is told nothing."""
    rows = make_rows()
    labels = labels_for(rows)
    views = []
    for sign in (1.0, -1.0):
        options = replace(SMALL, tell="nothing")
        sent = run(options, tables(rows, sign * labels), bodies=True).transcript.of(
            sender="bank", receiver="shop"
        )
        views.append([(one.kind, one.body if one.kind == TOLD else None) for one in sent])
        (events,) = [one for one in sent if one.kind == EVENTS]
        cipher = unpack(events.body or b"", "bank", EVENT_FIELDS)["cipher"]
        assert all(len(one) > 400_000 for one in cipher)
    assert views[0] == views[1]


@pytest.mark.parametrize("told", ["nothing", "iv", "woe"])
def test_a_host_hears_what_the_option_says(told: Tell) -> None:
    rows = make_rows(800)
    labels = labels_for(rows)
    found = findings(run(replace(SMALL, tell=told), tables(rows, labels)))["shop"]
    table, plain = found["tables"][TITLE], count_classes(rows, labels, SMALL)
    assert all(("iv" in row) == (told != "nothing") for row in table)
    for row in table:
        evidence = weigh(plain[int(row["column"][6:])], SMALL.smoothing)
        if told != "nothing":
            assert row["iv"] == round(float(evidence.iv[0]), 3)
        bins = found["bins"][row["column"]]
        assert all(("woe" in one) == (told == "woe") for one in bins)
        if told == "woe":
            # In the order of its own edges again.
            exact = np.clip(evidence.woe[:, 0], -WOE_MOST, WOE_MOST)
            assert [one["woe"][0] for one in bins] == pytest.approx(exact.tolist(), abs=0.0051)


def test_what_could_hold_all_labels_is_not_told() -> None:
    """Bins of many columns are equations of the labels: a curious host that is told all weights solves them, and that
    is what is refused."""
    generator = np.random.default_rng(3)
    rows, labels = generator.normal(size=(120, 30)), (generator.random(120) < 0.5).astype(np.float64)
    options = BinningOptions(bins=8, least_rows=5, tell="woe")
    columns = cut_columns(rows, options)
    counts = columns.rows()
    evidence = [weigh(one, options.smoothing) for one in count_classes(rows, labels, options)]
    woe = tell(evidence, np.ones(30, np.bool_), 1, options).woe[:, 0]
    # Half of all are events, give or take: odds of a bin are the exponential of its weight.
    events = np.rint(counts / (1 + np.exp(-woe - np.log(labels.mean() / (1 - labels.mean())))))
    column, code = columns.places()
    inside = (columns.codes.T[column] == code[:, None]).astype(np.float64)
    solved = np.linalg.lstsq(inside, events, rcond=None)[0] > 0.5
    assert (solved == labels).mean() > 0.9
    held = entropy_bits(np.array([(labels == 0).sum(), (labels == 1).sum()]))
    with pytest.raises(ValueError, match=r"what shop would be told, .* take tell = iv"):
        check_told("shop", told_bits(counts, 30, 1, options), held, options)
    with pytest.raises(ValueError, match="could hold all labels"):
        run(
            options,
            {"bank": tables(rows, labels)["bank"], "shop": tables(rows, labels)["shop"]}
            | {"post": Table(tuple(f"id{row}" for row in range(120)), rows, tuple(map(str, range(30))))},
        )
    # A pure bin does not look purer than the bound.
    pure = weigh(np.array([[0, 60], [60, 0]]), 0.5)
    assert tell([pure], np.ones(1, np.bool_), 1, options).woe.tolist() == [[WOE_MOST], [-WOE_MOST]]


# What a party does that breaks the rules.


def changed(kind: str, change: Callable[[bytes], bytes]) -> Callable[[Sent], list[tuple[str, bytes]]]:
    def twist(message: Sent) -> list[tuple[str, bytes]]:
        assert message.body is not None
        return [(message.kind, change(message.body) if message.kind == kind else message.body)]

    return twist


@pytest.mark.parametrize("kind", [KEY, OFFER, EVENTS, SUMS, TOLD])
def test_bodies_that_are_cut_short_or_repeated_are_the_senders_fault(kind: str) -> None:
    rows = make_rows(60)
    given = tables(rows, labels_for(rows))
    with pytest.raises(PeerFault) as caught:
        run(SMALL, given, twist=changed(kind, lambda body: body[:-1]))
    assert (caught.value.peer == "bank") == (kind not in (OFFER, SUMS))
    assert caught.value.rule == "malformed"
    if kind in (KEY, OFFER, EVENTS):
        with pytest.raises(PeerFault, match="kind"):
            run(SMALL, given, twist=lambda one: [(one.kind, one.body or b"")] * (1 + (one.kind == kind)))


def test_a_changed_ciphertext_is_noticed() -> None:
    rows = make_rows(60)
    for kind in (EVENTS, SUMS):

        def change(body: bytes) -> bytes:
            at = len(body) - 200_000
            return body[:at] + bytes((body[at] ^ 1,)) + body[at + 1 :]

        with pytest.raises(PeerFault) as caught:
            run(SMALL, tables(rows, labels_for(rows)), twist=changed(kind, change))
        assert caught.value.rule in ("ciphertext", "sums")


def emptied(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """All rows of the second bin moved into the first: the column's sum stays."""
    found = rows.copy()
    found[0], found[1] = rows[0] + rows[1], 0
    return found


def offered(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[bytes], bytes]:
    return lambda body: pack(change(unpack(body, "", OFFER_FIELDS)))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda fields: {**fields, "bins": fields["bins"] * 0}, "do not fit"),
        (lambda fields: {**fields, "rows": fields["rows"] + 1}, "do not have all rows"),
        (lambda fields: {**fields, "rows": emptied(fields["rows"])}, "fewer rows than agreed"),
    ],
)
def test_an_offer_that_no_honest_host_makes_is_refused(
    change: Callable[[dict[str, Any]], dict[str, Any]], why: str
) -> None:
    rows = make_rows()
    given = tables(rows, labels_for(rows))
    given["shop"] = replace(given["shop"], features=rows[:, 2:4], names=("a", "b"))
    del given["post"]
    with pytest.raises(PeerFault, match=why) as caught:
        run(SMALL, given, twist=changed(OFFER, offered(change)))
    assert caught.value.peer == "shop"


@pytest.mark.parametrize(
    ("kind", "fields", "change", "why"),
    [
        (KEY, KEY_FIELDS, {"least": 1}, "least_rows"),
        (KEY, KEY_FIELDS, {"rows": 99}, "rows"),
        (KEY, KEY_FIELDS, {"public": b"no key"}, "bank"),
        (EVENTS, EVENT_FIELDS, {"copies": 4_096, "cipher": []}, "as many as the rows need"),
        (EVENTS, EVENT_FIELDS, {"rounds": 17}, "malformed"),
    ],
)
def test_a_guest_with_other_rules_is_refused(
    kind: str, fields: Any, change: dict[str, Any], why: str
) -> None:
    rows = make_rows(60)

    def other(body: bytes) -> bytes:
        return pack({**unpack(body, "bank", fields), **change})

    with pytest.raises(PeerFault, match=why) as caught:
        run(SMALL, tables(rows, labels_for(rows)), twist=changed(kind, other))
    assert caught.value.peer == "bank"


def test_labels_and_options_that_do_not_fit_are_refused() -> None:
    rows = make_rows(60)
    given = tables(rows, labels_for(rows))
    for labels in (rows[:, 0], np.ones(60)):
        with pytest.raises(ValueError, match="labels of binning are classes"):
            run(SMALL, {**given, "bank": replace(given["bank"], labels=labels)})
    with pytest.raises(ValueError, match="labels"):
        run(SMALL, {**given, "bank": replace(given["bank"], labels=None)})
    for wrong in ({"bins": 1}, {"least_rows": 0}, {"smoothing": 0.0}, {"select": -1}, {"least_iv": np.nan}):
        with pytest.raises(ValueError, match=r"must be|not within"):
            BinningOptions(**wrong)
    assert json.loads(run(SMALL, given).results["bank"].model)["columns"] == ["secret0", "secret1"]


def test_counts_that_do_not_add_up_are_the_hosts_fault() -> None:
    """Each bin's alone could be: a column's together have every row of a class once."""
    rows = make_rows(60)
    given = tables(rows, labels_for(rows))["bank"]
    assert given.labels is not None
    setup = Setup("bank", PARTIES, given, 0, 60)
    guest = guest_module._Guest(SMALL, setup, given, given.labels, np.unique(given.labels))
    offer = guest_module.Offer(np.array([2, 2]), np.array([30, 30, 20, 40]))
    ones = int(guest.totals[1])
    right = np.array([[ones - 4], [4], [7], [ones - 7]])
    assert [one.sum() for one in guest._counts("shop", offer, right)] == [60, 60]
    wrong = right + np.array([[0], [0], [1], [0]])
    with pytest.raises(PeerFault, match="shop: sums: the bins of a column do not add up"):
        guest._counts("shop", offer, wrong)
