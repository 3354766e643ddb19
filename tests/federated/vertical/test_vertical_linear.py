"""A joint regression: equal to the one in the clear, resumed, and what each party can make of what it sees."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tenseal", reason="the extra `vertical` is not installed")

from federated.vertical.ckks import FLOOR, Opener, Scheme, Sealer
from federated.vertical.kinds import Setup
from federated.vertical.linear.kind import KIND
from federated.vertical.linear.model import GuestModel, HostModel
from federated.vertical.linear.options import LinearOptions
from federated.vertical.linear.plan import Labels, Plan
from federated.vertical.linear.steps import hidden_loss
from federated.vertical.linear.surrogate import Surrogate, surrogate_of
from federated.vertical.linear.twin import Trained, gradient_error, train_plain
from federated.vertical.masks import Drawn, Masks
from federated.vertical.parties import Outcome, PeerFault, Sent, run_local
from federated.vertical.tables import Table
from federated.vertical.wire import Bytes, Expected, Float, Int, unpack

ROWS, SEED = 90, 5
TAYLOR = LinearOptions(surrogate="taylor", epochs=3, batch=48, tolerance=0.0)
TAYLOR_LINEAR = replace(TAYLOR, family="linear")
DEEP = LinearOptions(epochs=2, batch=90, tolerance=0.0)


def tables(hosts: int, family: str = "logistic") -> dict[str, Table]:
    """A guest and hosts with three columns each; one of the guest's is constant, one of each host's has a gap."""
    rng = np.random.default_rng(hosts)
    columns = rng.standard_normal((1 + hosts, ROWS, 3))
    predictor = columns.sum(axis=(0, 2))
    labels = predictor + rng.logistic(size=ROWS)
    columns[0, :, 2] = 4.0
    columns[1:, 0, 0] = np.nan
    ids = tuple(f"id{row}" for row in range(ROWS))
    names = ("a", "b", "c")
    found = {f"host{place}": Table(ids, columns[1 + place], names) for place in range(hosts)}
    marks = (labels > 0).astype(float) if family == "logistic" else 50 + 7 * labels
    return {"guest": Table(ids, columns[0], names, marks)} | found


def setups(given: Mapping[str, Table], coordinator: bool) -> dict[str, Setup]:
    parties = {name: "guest" if name == "guest" else "host" for name in given}
    if coordinator:
        parties["keeper"] = "coordinator"
    return {name: Setup(name, parties, given.get(name), SEED, ROWS) for name in parties}


def run(
    options: LinearOptions,
    given: Mapping[str, Table],
    coordinator: bool = True,
    states: Mapping[str, bytes | None] | None = None,
    **more: Any,
) -> Outcome[Any]:
    roles = {
        name: KIND.make(options, setup)(None if states is None else states[name])
        for name, setup in setups(given, coordinator).items()
    }
    return run_local(roles, **more)


def twin(options: LinearOptions, given: Mapping[str, Table]) -> Trained:
    return train_plain(given["guest"], [given[name] for name in given if name != "guest"], options, SEED)


def weights(outcome: Outcome[Any], given: Mapping[str, Table]) -> np.ndarray:
    parts = [KIND.load(outcome.results[name].model) for name in given] if KIND.load else []
    return np.concatenate([part.weights for part in parts if isinstance(part, GuestModel | HostModel)])


def stated(options: LinearOptions, trained: Trained) -> float:
    """What weights may differ by: errors of all steps, each scaled by its party's matrix, added up like independent
    ones, six standard deviations wide."""
    plan = Plan.of(options, ROWS, SEED, len(trained.parties) - 1)
    steps = len(trained.losses) * len(plan.batches.rows)
    scale = max(float(np.linalg.norm(own.solver.matrix, 2)) for own in trained.parties)
    return 6 * gradient_error(plan) * scale * options.rate / (1 - options.momentum) * float(np.sqrt(steps))


CASES = {
    "taylor, two hosts": (TAYLOR, 2, True),
    "degree 5": (DEEP, 1, True),
    "linear": (TAYLOR_LINEAR, 1, True),
    "without curvature": (replace(TAYLOR, curvature=False), 1, True),
    "between two": (TAYLOR, 1, False),
    "between two, degree 5": (DEEP, 1, False),
    "between two, linear": (TAYLOR_LINEAR, 1, False),
}


class TestTraining:
    @pytest.mark.parametrize("case", CASES)
    def test_weights_and_losses_are_those_in_the_clear(self, case: str) -> None:
        options, hosts, coordinator = CASES[case]
        given = tables(hosts, options.family)
        outcome, plain = run(options, given, coordinator), twin(options, given)
        truth = np.concatenate([own.solver.weights for own in plain.parties])
        found = weights(outcome, given)
        assert np.abs(truth).max() > 20 * stated(options, plain)
        assert np.abs(found - truth).max() < stated(options, plain)
        figures = outcome.results["guest"].figures
        assert figures["epochs"] == options.epochs
        assert figures["loss"] == pytest.approx(plain.losses[-1], abs=2e-3)
        assert plain.losses[-1] < plain.losses[0]
        # Everything that was said is declared, with what its receiver learns.
        assert {one.kind for one in outcome.transcript.messages} <= set(KIND.seen)

    @pytest.mark.parametrize("coordinator", [True, False])
    def test_it_ends_where_the_loss_stands_still(self, coordinator: bool) -> None:
        options = replace(TAYLOR, epochs=50, tolerance=0.01)
        given = tables(1)
        outcome = run(options, given, coordinator)
        epochs = {name: result.figures["epochs"] for name, result in outcome.results.items()}
        assert set(epochs.values()) == {len(twin(options, given).losses)}
        assert 2 < epochs["guest"] < 20

    def test_many_parties_with_the_same_columns_do_not_overshoot(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given = tables(8, "linear")
        columns = given["guest"].features
        alike = {name: replace(table, features=columns) for name, table in given.items()}
        options = LinearOptions(epochs=12, tolerance=0.0, family="linear")
        losses = twin(options, alike).losses
        assert max(losses[1:]) < losses[0]
        # With steps as of a few parties they do.
        monkeypatch.setattr(Surrogate, "joint_curvature", lambda self, parties: self.curvature)
        losses = twin(options, alike).losses
        assert max(losses[1:]) > losses[0]

    def test_noise_does_not_drive_weights_of_like_columns_far_out(self) -> None:
        given = tables(1)
        columns = given["host0"].features.copy()
        columns[:, 2] = columns[:, 1]
        given["host0"] = replace(given["host0"], features=columns)
        # Nothing holds back the difference of the two weights but the ridge of the steps' own matrix.
        options = replace(TAYLOR, l2=0.0)
        found, truth = (weights(run(options, given), given), twin(options, given).parties[1].solver.weights)
        assert np.abs(found).max() < 2
        assert (found[-1] + found[-2]) == pytest.approx(truth[-1] + truth[-2], abs=0.01)

    @pytest.mark.parametrize("size", [1e-200, 1e-9, 1e200])
    def test_a_linear_regression_in_any_unit(self, size: float) -> None:
        given = tables(1, "linear")
        guest = given["guest"]
        assert guest.labels is not None
        labels = size * guest.labels
        found = Labels.of(labels, TAYLOR_LINEAR)
        assert found.scaled == pytest.approx(Labels.of(guest.labels, TAYLOR_LINEAR).scaled)
        assert found.scaled * found.deviation + found.mean == pytest.approx(labels)

    def test_what_is_said_of_masks_covers_the_farthest_label(self) -> None:
        labels = np.zeros(ROWS)
        labels[7] = 1e6
        farthest = np.abs(Labels.of(labels, TAYLOR_LINEAR).scaled).max()
        assert np.sqrt(ROWS) - 0.1 < farthest < Plan.of(TAYLOR_LINEAR, ROWS, SEED, 1).residual

    def test_labels_of_minus_one_and_one_are_the_same_job(self) -> None:
        given = tables(1)
        guest = given["guest"]
        assert guest.labels is not None
        signs = given | {"guest": replace(guest, labels=2 * guest.labels - 1)}
        one, other = twin(TAYLOR, given), twin(TAYLOR, signs)
        assert one.losses == other.losses
        outcome = run(replace(TAYLOR, epochs=1), signs)
        assert outcome.results["guest"].figures["loss"] == pytest.approx(one.losses[0], abs=2e-3)

    def test_the_parts_answer_together_what_the_weights_say(self) -> None:
        given = tables(2)
        outcome = run(TAYLOR, given)
        assert KIND.load is not None
        parts = {name: KIND.load(outcome.results[name].model) for name in given}
        guest = parts.pop("guest")
        assert isinstance(guest, GuestModel)
        shares = {}
        for name, part in parts.items():
            assert isinstance(part, HostModel)
            shares[name] = part.partial(given[name].features)
        scores = guest.combine(given["guest"].features, shares)
        labels = given["guest"].labels
        assert labels is not None
        assert (scores[labels == 1].mean() - scores[labels == 0].mean()) > 0.3
        assert outcome.results["keeper"].model is None


class TestResuming:
    @pytest.mark.parametrize("coordinator", [True, False])
    def test_from_a_checkpoint_as_if_nothing_had_happened(self, coordinator: bool) -> None:
        given = tables(1)
        whole = run(TAYLOR, given, coordinator)
        states = {name: kept[2] for name, kept in whole.checkpoints.items()}
        again = run(TAYLOR, given, coordinator, states, label=2)
        assert {name: max(kept) for name, kept in again.checkpoints.items()} == dict.fromkeys(states, 3)
        assert np.abs(weights(again, given) - weights(whole, given)).max() < 2 * stated(
            TAYLOR, twin(TAYLOR, given)
        )
        # Keys are new: none stands in a checkpoint, which holds little more than weights.
        assert all(len(state) < 1_000 for state in states.values())

    @pytest.mark.parametrize("coordinator", [True, False])
    def test_a_finished_job_is_not_done_again(self, coordinator: bool) -> None:
        given = tables(1)
        whole = run(TAYLOR, given, coordinator)
        states = {name: kept[3] for name, kept in whole.checkpoints.items()}
        again = run(TAYLOR, given, coordinator, states, label=3)
        assert not again.transcript.messages
        assert weights(again, given).tolist() == weights(whole, given).tolist()


class Opened:
    """What key holders decrypt, in the order of opening."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slots: list[np.ndarray] = []
        real = Opener.open

        def noted(opener: Opener, cipher: Any) -> np.ndarray:
            found = real(opener, cipher)
            self.slots.append(found)
            return found

        monkeypatch.setattr(Opener, "open", noted)


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.corrcoef(one, other)[0, 1])


ONE_BATCH = replace(TAYLOR, batch=ROWS, epochs=1)


class TestCuriousKeyHolders:
    def first_terms(self, given: Mapping[str, Table]) -> np.ndarray:
        """The guest's terms x * d of the first step, as they lie in the slots."""
        plain = twin(ONE_BATCH, given).parties[0]
        plan = Plan.of(ONE_BATCH, ROWS, SEED, 1)
        (rows,) = plan.batches.rows
        labels = given["guest"].labels
        assert labels is not None
        residual = surrogate_of(ONE_BATCH).residual(np.zeros(ROWS), labels[rows])
        return plan.batches.columns(plain.features[rows])[0] * plan.batches.spread(residual)

    def test_what_the_coordinator_decrypts_is_noise(self, monkeypatch: pytest.MonkeyPatch) -> None:
        given = tables(1)
        opened = Opened(monkeypatch)
        run(ONE_BATCH, given)
        terms = self.first_terms(given)
        used = terms != 0
        plan = Plan.of(ONE_BATCH, ROWS, SEED, 1)
        # Guest's and host's terms, and the loss.
        assert len(opened.slots) == 3
        for slots in opened.slots:
            assert abs(correlation(slots[used], terms[used])) < 4 / np.sqrt(used.sum())
            scaled = slots / plan.masks.reach
            assert scaled.std() == pytest.approx(3**-0.5, abs=0.04)
            assert abs(scaled.mean()) < 0.04
        # Sums over the rows are as masked as the rows: nothing near the gradient's size.
        sums = opened.slots[0][: 4 * ROWS].reshape(4, ROWS).sum(axis=1)
        assert np.abs(sums).min() > 1e6 * ROWS

    def test_without_masks_it_would_see_every_term(self, monkeypatch: pytest.MonkeyPatch) -> None:
        given = tables(1)
        opened = Opened(monkeypatch)
        monkeypatch.setattr(
            Masks, "draw", lambda self, count, draw: Drawn(np.zeros(count, np.int64), np.zeros(count))
        )
        run(ONE_BATCH, given)
        terms = self.first_terms(given)
        assert max(abs(correlation(slots, terms)) for slots in opened.slots) > 0.999

    def test_between_two_the_host_cannot_tell_labels_from_residuals(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given = tables(1)
        opened = Opened(monkeypatch)
        run(ONE_BATCH, given, coordinator=False)
        plan = Plan.of(ONE_BATCH, ROWS, SEED, 1)
        (rows,) = plan.batches.rows
        labels = given["guest"].labels
        assert labels is not None
        spread = plan.batches.spread(labels[rows] - 0.5)
        used = spread != 0
        # The host opens residuals, the guest's terms and the loss; the guest opens the host's terms.
        assert len(opened.slots) == 4
        for slots in opened.slots:
            assert abs(correlation(slots[used], spread[used])) < 4 / np.sqrt(used.sum())

    @pytest.mark.parametrize("coordinator", [True, False])
    def test_the_guests_penalty_is_not_told_beside_the_loss(self, coordinator: bool) -> None:
        given = tables(1)
        options = replace(TAYLOR, epochs=2, l2=20.0)
        outcome = run(options, given, coordinator, bodies=True)
        plan = Plan.of(options, ROWS, SEED, 1)
        steps = 2.0**plan.loss_masks.grid * ROWS / plan.surrogate.loss_factor
        expected: dict[str, Expected] = {
            "terms": Bytes(2**24),
            "whole": Int(-(2**63), 2**63 - 1),
            "part": Float(),
        }
        for epochs, sent in enumerate(outcome.transcript.of(kind="loss"), 1):
            assert sent.body is not None
            part = unpack(sent.body, "guest", expected)["part"]
            penalty = twin(replace(options, epochs=epochs), given).parties[0].solver.penalty_loss
            # The parts of masks alone, each uniform on a step, six deviations wide: nothing near the term's size.
            most = 6 * np.sqrt(plan.batches.stride / 12) + 1
            assert abs(part) < most < penalty * steps / 100

    def test_weights_beyond_what_masks_hide_end_the_job(self) -> None:
        given = tables(1)
        plan = Plan.of(TAYLOR, ROWS, SEED, 1)
        own = twin(replace(TAYLOR, epochs=1), given).parties[0]
        own.solver.weights = own.solver.weights * 1e9
        opener = Opener(plan.scheme)
        sealer = Sealer(plan.scheme, opener.public())
        zero = sealer.zero(FLOOR, plan.circuit.loss_scale)
        with pytest.raises(ValueError, match="take a lower rate"):
            hidden_loss(plan, own, sealer, zero, os.urandom)

    def test_returned_gradients_carry_noise(self) -> None:
        given = tables(1)
        options = replace(ONE_BATCH, noise=0.01)
        one, other = (weights(run(options, given), given) for _ in range(2))
        assert np.abs(one - other).max() > 1e-4


class TestCuriousParties:
    def test_a_host_cannot_open_residuals_nor_the_guest_shares(self) -> None:
        given = tables(1)
        outcome = run(ONE_BATCH, given, bodies=True)
        scheme = Scheme(surrogate_of(ONE_BATCH).parameters)
        labels = given["guest"].labels
        assert labels is not None
        for kind, level in (("residual", FLOOR), ("share", scheme.parameters.top)):
            (sent,) = outcome.transcript.of(kind=kind)
            assert sent.body is not None
            cipher = scheme.read(sent.body, sent.sender, level, scheme.parameters.scale)
            rubbish = Opener(scheme).open(cipher)
            assert np.abs(rubbish).max() > 1e6

    def test_what_a_host_receives(self) -> None:
        outcome = run(replace(TAYLOR, epochs=1), tables(2))
        got = {one.kind for one in outcome.transcript.of(receiver="host0")}
        assert got == {"keys", "residual", "gradient", "verdict"}
        # Sizes follow from the batches alone, so they tell nothing either.
        assert len({one.size for one in outcome.transcript.of(receiver="host0", kind="gradient")}) == 1


def flip(kind: str, place: float, **only: str) -> Any:
    """Change a byte of the first message of ``kind``."""
    done: list[bool] = []

    def twist(sent: Sent) -> Iterable[tuple[str, bytes]]:
        assert sent.body is not None
        if sent.kind != kind or done or any(getattr(sent, key) != value for key, value in only.items()):
            return [(sent.kind, sent.body)]
        done.append(True)
        body = bytearray(sent.body)
        body[int(place * len(body))] ^= 0x10
        return [(sent.kind, bytes(body))]

    return twist


class TestTampering:
    @pytest.mark.parametrize("coordinator", [True, False])
    @pytest.mark.parametrize("kind", ["share", "residual", "masked", "loss"])
    @pytest.mark.parametrize("place", [0.0, 0.6])
    def test_a_changed_ciphertext_ends_the_job(self, kind: str, place: float, coordinator: bool) -> None:
        with pytest.raises(PeerFault) as caught:
            run(TAYLOR, tables(1), coordinator, twist=flip(kind, place))
        assert caught.value.rule in {"malformed", "ciphertext", "range"}

    def test_changed_keys(self) -> None:
        with pytest.raises(PeerFault) as caught:
            run(TAYLOR, tables(1), twist=flip("keys", 0.5, receiver="guest"))
        assert caught.value.rule in {"malformed", "ciphertext", "range"}

    @pytest.mark.parametrize(
        "kind", ["width", "keys", "share", "masked", "gradient", "penalty", "loss", "verdict"]
    )
    def test_a_message_cut_short(self, kind: str) -> None:
        def twist(sent: Sent) -> Iterable[tuple[str, bytes]]:
            assert sent.body is not None
            return [(sent.kind, sent.body[:-1] if sent.kind == kind else sent.body)]

        with pytest.raises(PeerFault) as caught:
            run(TAYLOR, tables(1), twist=twist)
        assert caught.value.rule in {"malformed", "ciphertext"}

    def test_an_older_ciphertext_in_its_place_is_no_gradient(self) -> None:
        # A replayed message is dropped by the network; one that a party sends twice has other masks.
        kept: list[bytes] = []

        def twist(sent: Sent) -> Iterable[tuple[str, bytes]]:
            assert sent.body is not None
            if sent.kind != "masked" or sent.sender != "guest":
                return [(sent.kind, sent.body)]
            kept.append(sent.body)
            return [(sent.kind, kept[0])]

        # It decrypts, but under other masks than those that are taken off.
        with pytest.raises(PeerFault, match="gradient"):
            run(TAYLOR, tables(1), twist=twist)


class TestRefusals:
    def test_batches_no_larger_than_the_features(self) -> None:
        for coordinator in (True, False):
            with pytest.raises(ValueError, match="tell all its labels"):
                run(replace(TAYLOR, batch=4), tables(1), coordinator)

    @pytest.mark.parametrize("coordinator", [True, False])
    def test_batches_whose_gradients_hold_all_labels(self, coordinator: bool) -> None:
        given = tables(1)
        # More rows than features, but three columns of a host tell more than 24 bits.
        options = replace(TAYLOR, batch=24)
        with pytest.raises(ValueError, match="a host with 3 features"):
            run(options, given, coordinator)
        # The other parties do not take a host's word for it.
        plan = Plan.of(options, ROWS, SEED, 1)
        plan.check_host(1)
        with pytest.raises(ValueError, match="more noise"):
            plan.check_host(3)
        run(replace(options, epochs=1, noise=0.02), given, coordinator)

    def test_tables_of_different_length(self) -> None:
        given = tables(1)
        given["host0"] = given["host0"].take(np.arange(ROWS - 1))
        for coordinator in (True, False):
            with pytest.raises(PeerFault, match="rows"):
                run(TAYLOR, given, coordinator)

    def test_labels_that_do_not_fit(self) -> None:
        given = tables(1)
        guest = given["guest"]
        assert guest.labels is not None
        for labels, options in (
            (guest.labels + 1, TAYLOR),
            (np.ones(ROWS), TAYLOR),
            (np.ones(ROWS), replace(TAYLOR, family="linear")),
            (None, TAYLOR),
        ):
            given["guest"] = replace(guest, labels=labels)
            with pytest.raises(ValueError, match="label"):
                KIND.make(options, setups(given, True)["guest"])

    def test_two_hosts_need_a_coordinator(self) -> None:
        with pytest.raises(ValueError, match="need a coordinator"):
            KIND.make(TAYLOR, setups(tables(2), False)["guest"])

    def test_a_host_without_columns(self) -> None:
        given = tables(1)
        given["host0"] = Table(given["host0"].ids, np.zeros((ROWS, 0)), ())
        with pytest.raises(ValueError, match="no features"):
            KIND.make(TAYLOR, setups(given, True)["host0"])
