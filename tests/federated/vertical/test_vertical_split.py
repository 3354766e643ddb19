"""A split network: equal to the undivided one, resumed, protected, and what curious parties make of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the extra `stack` is not installed")

import torch

from federated.privacy.composition import gaussian_epsilon
from federated.privacy.randomness import SeededRandomness
from federated.vertical.kinds import Setup
from federated.vertical.linear.solver import Scaling
from federated.vertical.parties import Outcome, PeerFault, Sent, run_local
from federated.vertical.pipeline import Alignment, joint
from federated.vertical.split import roles
from federated.vertical.split.events import events
from federated.vertical.split.exchange import apart, read_rows
from federated.vertical.split.kind import KIND
from federated.vertical.split.leakage import (
    features_by_inversion,
    labels_by_direction,
    labels_by_norm,
    labels_over_epochs,
    rows_sent,
)
from federated.vertical.split.model import GuestModel, HostModel, load
from federated.vertical.split.network import Adam, Tower, batches, flat, initialise
from federated.vertical.split.options import SplitOptions
from federated.vertical.split.protection import noised_rows, noised_step
from federated.vertical.split.twin import train_plain
from federated.vertical.tables import Table
from federated.vertical.wire import pack

ROWS, SEED = 90, 5
SMALL = SplitOptions(hidden=6, width=3, epochs=3, batch=40)
SEEDS = {"guest": 11, "host0": 12, "host1": 13}


def tables(hosts: int = 1, rows: int = ROWS, loss: str = "logistic") -> dict[str, Table]:
    """A guest and hosts with three columns each; one of the guest's is constant, one of each host's has a gap."""
    rng = np.random.default_rng(hosts)
    columns = rng.standard_normal((1 + hosts, rows, 3))
    predictor = columns.sum(axis=(0, 2)) + columns[0, :, 0] * columns[1, :, 1]
    columns[0, :, 2] = 4.0
    columns[1:, 0, 0] = np.nan
    marks = {
        "squared": 50 + 7 * predictor,
        "classes": np.digitize(predictor, (-1.0, 1.0)) * 2.0,
    }.get(loss, (predictor > 1).astype(float))
    ids, names = tuple(f"id{row}" for row in range(rows)), ("a", "b", "c")
    found = {f"host{place}": Table(ids, columns[1 + place], names) for place in range(hosts)}
    return {"guest": Table(ids, columns[0], names, marks)} | found


def setups(given: Mapping[str, Table]) -> dict[str, Setup]:
    parties = {name: "guest" if name == "guest" else "host" for name in given}
    return {name: Setup(name, parties, given[name], SEED, len(given[name])) for name in parties}


def run(
    options: SplitOptions,
    given: Mapping[str, Table],
    states: Mapping[str, bytes] | None = None,
    **more: Any,
) -> Outcome[Any]:
    made = {}
    for name, setup in setups(given).items():
        role: Any = roles.guest if name == "guest" else roles.host
        state = None if states is None else states[name]
        # What is drawn is halved to a seed; a restart draws something else.
        drawn = (2 * (SEEDS[name] + 100 * (states is not None))).to_bytes(8, "little")
        made[name] = role(options, setup, state, lambda count, drawn=drawn: (8 * drawn)[:count])
    return run_local(made, **more)


def answers(outcome: Outcome[Any], given: Mapping[str, Table]) -> np.ndarray:
    shares = {}
    for name in given:
        part = load(outcome.results[name].model)
        if isinstance(part, HostModel):
            shares[name] = part.partial(given[name].features)
    guest = load(outcome.results["guest"].model)
    assert isinstance(guest, GuestModel)
    return guest.combine(given["guest"].features, shares)


CASES = {
    "two labels": (SMALL, 1),
    "two hosts": (SMALL, 2),
    "classes": (replace(SMALL, loss="classes"), 2),
    "numbers": (replace(SMALL, loss="squared"), 1),
    "two towers": (replace(SMALL, top="dot"), 1),
    "two towers in batch": (replace(SMALL, top="dot", loss="in_batch", temperature=0.5), 1),
}


class TestUndivided:
    @pytest.mark.parametrize("case", CASES)
    def test_weights_are_those_of_the_undivided_network_bit_for_bit(self, case: str) -> None:
        options, hosts = CASES[case]
        given = tables(hosts, loss=options.loss)
        outcome = run(options, given)
        others = {name: table for name, table in given.items() if name != "guest"}
        plain = train_plain(given["guest"], others, options, SEED, SEEDS)
        guest = load(outcome.results["guest"].model)
        assert isinstance(guest, GuestModel)
        assert flat(guest.net).tobytes() == flat(plain.guest).tobytes()
        for name, tower in zip(others, plain.towers, strict=True):
            part = load(outcome.results[name].model)
            assert isinstance(part, HostModel)
            assert flat(part.net).tobytes() == flat(tower).tobytes()
        assert outcome.results["guest"].figures["loss"] == round(plain.loss, 6)
        # It learned, and all that was said is declared.
        first = run(replace(options, epochs=1), given).results["guest"].figures["loss"]
        assert plain.loss < first
        assert (
            {one.kind for one in outcome.transcript.messages}
            == {"activations", "gradients"}
            <= set(KIND.seen)
        )

    def test_answers_have_the_labels_form(self) -> None:
        given = tables(2, loss="classes")
        found = answers(run(replace(SMALL, loss="classes"), given), given)
        assert found.shape == (ROWS, 3)
        assert found.sum(axis=1) == pytest.approx(np.ones(ROWS), abs=1e-6)
        given = tables(1, loss="squared")
        options = replace(SMALL, loss="squared", epochs=60, rate=0.02)
        labels = given["guest"].labels
        assert labels is not None
        error = float(np.sqrt(np.mean((answers(run(options, given), given) - labels) ** 2)))
        assert error < 0.5 * labels.std()


class TestAdam:
    def test_it_is_the_published_one(self) -> None:
        rows = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))
        nets = [Tower(3, SMALL), Tower(3, SMALL)]
        for net in nets:
            initialise(net, 2)
        mine, other = Adam(nets[0], 0.01), torch.optim.Adam(nets[1].parameters(), lr=0.01, foreach=False)
        for _ in range(5):
            for net, optimiser in zip(nets, (mine, other), strict=True):
                optimiser.zero_grad()
                net(rows).square().mean().backward()
                optimiser.step()
        assert flat(nets[0]) == pytest.approx(flat(nets[1]), abs=1e-6)
        assert np.abs(flat(nets[0])).max() > 0.1


class TestResume:
    @pytest.mark.parametrize("noise", [0.0, 0.5])
    def test_from_a_checkpoint_the_same_network_comes(self, noise: float) -> None:
        options, given = replace(SMALL, noise=noise), tables(2)
        whole = run(options, given)
        states = {name: kept[2] for name, kept in whole.checkpoints.items()}
        resumed = run(options, given, states, label=2)
        assert {name: list(kept) for name, kept in resumed.checkpoints.items()} == {
            name: [3] for name in given
        }
        assert len(resumed.transcript.messages) == len(whole.transcript.messages) / 3
        # The noise, too: drawn anew, it could be averaged away by restarts.
        assert [resumed.results[name].model for name in given] == [
            whole.results[name].model for name in given
        ]

    def test_the_key_of_the_noise_is_drawn_and_kept(self) -> None:
        for name, kept in run(SMALL, tables()).checkpoints.items():
            drawn = 4 * (2 * SEEDS[name]).to_bytes(8, "little")
            assert [apart(state)[2].key for state in kept.values()] == [drawn] * 4

    def test_other_labels_after_a_restart_have_other_noise(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The same noise on something else would tell what has changed: in gradients, and in the host's first step."""
        drawn: list[bytes] = []

        def step(net: Any, *rest: Any) -> None:
            if isinstance(net, Tower):
                drawn.append(rest[-1].words(1).tobytes())
            noised_step(net, *rest)

        monkeypatch.setattr(roles, "noised_step", step)
        options, given = replace(SMALL, noise=1.0), tables()
        whole = run(options, given, bodies=True)
        states = {name: kept[0] for name, kept in whole.checkpoints.items()}
        guest = given["guest"]
        assert guest.labels is not None
        order = next(batches(ROWS, options, SEED, 0))
        labels = guest.labels.copy()
        labels[order[0]] = 1 - labels[order[0]]
        again = run(options, given | {"guest": replace(guest, labels=labels)}, states, label=0, bodies=True)
        sent = [one.transcript.of(kind="gradients")[0].body for one in (whole, again)]
        first, second = (read_rows(body or b"", "guest", len(order), options.width) for body in sent)
        assert (first != second).all()
        assert drawn[0] != drawn[len(drawn) // 2]

    def test_a_checkpoint_of_another_network_is_refused(self) -> None:
        given = tables()
        states = {name: kept[2] for name, kept in run(SMALL, given).checkpoints.items()}
        with pytest.raises(PeerFault, match="this checkpoint: malformed"):
            run(replace(SMALL, width=4), given, states, label=2)


class TestPeers:
    @pytest.mark.parametrize("kind", ["activations", "gradients"])
    @pytest.mark.parametrize(
        "rows",
        [
            np.zeros((40, 4), np.float32),
            np.zeros((45, 3), np.float64),
            np.full((45, 3), np.nan, np.float32),
        ],
        ids=["shape", "type", "nan"],
    )
    def test_malformed_rows_are_the_senders_fault(self, kind: str, rows: np.ndarray) -> None:
        def twist(sent: Sent) -> Iterable[tuple[str, bytes]]:
            return [(sent.kind, pack({"rows": rows}) if sent.kind == kind else sent.body or b"")]

        with pytest.raises(PeerFault, match="malformed") as caught:
            run(SMALL, tables(), twist=twist)
        assert caught.value.peer == ("host0" if kind == "activations" else "guest")

    def test_a_share_that_is_none_is_the_hosts_fault(self) -> None:
        given = tables()
        guest = load(run(SMALL, given).results["guest"].model)
        assert isinstance(guest, GuestModel)
        rows = given["guest"].features
        for share in (
            np.zeros((ROWS, 2), np.float32),
            np.zeros((ROWS, 3)),
            np.full((ROWS, 3), np.inf, np.float32),
        ):
            with pytest.raises(PeerFault, match="host0: malformed"):
                guest.combine(rows, {"host0": share})
        with pytest.raises(ValueError, match="no share of host0"):
            guest.combine(rows, {})
        assert guest.alone(rows).shape == (ROWS,)

    def test_models_that_are_none(self) -> None:
        outcome = run(SMALL, tables())
        body = outcome.results["host0"].model
        for wrong in (body[:-1], body.replace(b"split host 2", b"split host 9"), b""):
            with pytest.raises((PeerFault, ValueError)):
                load(wrong)


class TestOptions:
    @pytest.mark.parametrize(
        ("given", "told"),
        [
            ({"epochs": 0}, "epochs is 0"),
            ({"rate": float("nan")}, "rate"),
            ({"loss": "in_batch"}, "needs the top dot"),
            ({"loss": "classes", "top": "dot"}, "need the top mlp"),
            ({"loss": "in_batch", "top": "dot", "noise": 1.0}, "promise too much"),
        ],
    )
    def test_what_cannot_be_is_refused(self, given: dict[str, Any], told: str) -> None:
        with pytest.raises(ValueError, match=told):
            SplitOptions(**given)

    def test_tables_that_do_not_fit_are_refused(self) -> None:
        two = setups(tables(2))["guest"]
        with pytest.raises(ValueError, match="one host"):
            KIND.make(replace(SMALL, top="dot"), two)
        guest = setups(tables(loss="squared"))["guest"]
        with pytest.raises(ValueError, match="for two labels"):
            KIND.make(SMALL, guest)
        assert guest.table is not None
        with pytest.raises(ValueError, match="has no labels"):
            KIND.make(SMALL, replace(guest, table=replace(guest.table, labels=None)))


class TestProtection:
    def test_rows_are_cut_and_get_the_stated_noise(self) -> None:
        options = replace(SMALL, noise=0.5)
        rows = 100 * np.ones((20_000, 3), np.float32)
        sent = noised_rows(rows, 2.0, options, SeededRandomness(np.random.default_rng(1)))
        assert sent.mean(axis=0) == pytest.approx(np.full(3, 2 / np.sqrt(3)), abs=0.06)
        assert sent.std() == pytest.approx(2 * 2.0 * 0.5, rel=0.02)

    def test_a_step_is_the_mean_of_cut_gradients(self) -> None:
        """With bounds that cut nothing it is the mean's own gradient; else one row moves it by 2C over the rows."""
        options = replace(SMALL, noise=1e-9, step_clip=1e3)
        net = Tower(3, replace(options, noise=0.0))
        initialise(net, 3)
        rows, along = torch.randn(8, 3, generator=torch.Generator().manual_seed(1)), torch.ones(8, 3)

        def of_row(weights: Any, row: Any, gradient: Any) -> Any:
            return (torch.func.functional_call(net, weights, (row[None],))[0] * gradient).sum()

        def step(bound: float, inputs: Any) -> np.ndarray:
            randomness = SeededRandomness(np.random.default_rng(1))
            noised_step(net, of_row, (inputs, along), replace(options, step_clip=bound), randomness)
            return np.concatenate([one.grad.numpy().ravel() for one in net.parameters()])

        free = step(1e3, rows)
        net.zero_grad()
        (net(rows) * along).sum(dim=1).mean().backward()
        truth = np.concatenate([one.grad.numpy().ravel() for one in net.parameters()])
        assert np.abs(truth).max() > 0.1
        assert free == pytest.approx(truth, abs=1e-5)
        other = rows.clone()
        other[0] = -30.0
        moved = float(np.linalg.norm(step(0.05, rows) - step(0.05, other)))
        assert 0.01 * 0.05 / 8 < moved <= 2 * 0.05 / 8 * (1 + 1e-4)

    def test_every_step_of_both_sides_has_noise(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stepped: list[str] = []

        def step(net: Any, *rest: Any) -> None:
            stepped.append(type(net).__name__)
            noised_step(net, *rest)

        monkeypatch.setattr(roles, "noised_step", step)
        run(replace(SMALL, noise=1.0, epochs=1), tables())
        assert sorted(stepped) == ["GuestNet"] * 3 + ["Tower"] * 3

    def test_the_statement_counts_two_releases_an_epoch(self) -> None:
        options = replace(SMALL, noise=3.0)
        figures = run(options, tables()).results["host0"].figures
        assert figures["epsilon"] == round(gaussian_epsilon(3.0, 6, 1e-5), 4)
        assert figures["epsilon of an answer"] == round(gaussian_epsilon(3.0, 1, 1e-5), 4)
        assert "epsilon" not in run(SMALL, tables()).results["host0"].figures

    def test_asking_again_tells_nothing_more(self) -> None:
        given = tables()
        part = load(run(replace(SMALL, noise=1.0, epochs=1), given).results["host0"].model)
        assert isinstance(part, HostModel)
        rows = given["host0"].features
        once = part.partial(rows)
        # Alone, or among others, in any order.
        assert part.partial(rows[7:8]).tobytes() == once[7:8].tobytes()
        assert part.partial(rows[::-1]).tobytes() == once[::-1].tobytes()
        clean = replace(part, options=replace(part.options, noise=0.0)).partial(rows)
        assert np.std(once - clean) == pytest.approx(2.0, rel=0.15)
        assert len(np.unique(once - clean)) == once.size
        with pytest.raises(ValueError, match="without its key"):
            replace(part, key=b"").partial(rows)

    def test_leakage_with_noise_and_without(self) -> None:
        """A curious host reads labels from gradients, a curious guest features from activations; noise ends both."""
        given = tables(rows=600)
        labels = given["guest"].labels
        assert labels is not None
        features = Scaling.of(given["host0"].features, 3.0).apply(given["host0"].features)
        known = int(np.flatnonzero(labels)[0])
        found = {}
        for noise in (0.0, 2.0):
            options = replace(SMALL, hidden=16, width=6, noise=noise, batch=100)
            outcome = run(options, given, bodies=True)

            def seen(
                sender: str, receiver: str, options: Any = options, outcome: Any = outcome
            ) -> np.ndarray:
                ends = {"sender": sender, "receiver": receiver}
                return rows_sent(outcome.transcript, options, 600, SEED, **ends, epoch=2)

            gradients, activations = seen("guest", "host0"), seen("host0", "guest")
            found[noise] = (
                labels_by_norm(gradients, labels),
                labels_by_direction(gradients, labels, known),
                features_by_inversion(activations, features, 200),
            )
        norm, direction, inversion = found[0.0]
        assert norm > 0.7
        assert direction > 0.99
        assert inversion > 0.6
        assert all(abs(one - 0.5) < 0.1 for one in found[2.0][:2])
        assert found[2.0][2] < 0.05

    def test_a_host_adds_up_the_epochs(self) -> None:
        """Noise that hides labels in one epoch's gradients does not hide them in twenty, without any label known."""
        given = tables(rows=600)
        labels = given["guest"].labels
        assert labels is not None
        options = replace(SMALL, width=2, noise=1.0, batch=100, epochs=20)
        outcome = run(options, given, bodies=True)
        ends = {"sender": "guest", "receiver": "host0"}
        gradients = np.array(
            [rows_sent(outcome.transcript, options, 600, SEED, **ends, epoch=epoch) for epoch in range(20)]
        )
        assert np.median([labels_over_epochs(gradients[[epoch]], labels) for epoch in range(20)]) < 0.7
        assert labels_over_epochs(gradients, labels) > 0.8


class TestTwoTowers:
    def test_users_at_one_company_items_at_another(self) -> None:
        """The whole job, rows held out: neither company alone tells whom an item suits."""
        options = SplitOptions(top="dot", epochs=12, batch=100, rate=0.01)
        guest, host = events(3_000, seed=1)
        given = {"guest": guest, "host": host}
        parties = {"guest": "guest", "host": "host"}
        made = {
            name: joint(KIND, options, Setup(name, parties, table, SEED), Alignment(), 0.3)(None)
            for name, table in given.items()
        }
        figures = run_local(made).results["guest"].figures
        assert figures["test auc"] > 0.8
        assert figures["fallback auc"] < 0.65
