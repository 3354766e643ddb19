"""Federated transfer: equal to the one in the clear, resumed, and what each party can make of what it sees."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tenseal", reason="the extra `vertical` is not installed")

from federated.psi.kind import KIND as PSI
from federated.psi.kind import PsiOptions
from federated.vertical.ckks import FLOOR, Opener, Scheme
from federated.vertical.kinds import Setup
from federated.vertical.parties import Outcome, PeerFault, Sent, run_local
from federated.vertical.pipeline import Alignment, joint
from federated.vertical.tables import Table
from federated.vertical.transfer import roles
from federated.vertical.transfer.kind import KIND
from federated.vertical.transfer.model import GuestModel, HostModel, inputs_of, load
from federated.vertical.transfer.options import TransferOptions
from federated.vertical.transfer.sealed import FLAT, TERM_SCALE, Plan
from federated.vertical.transfer.sides import GuestSide, HostSide, Side
from federated.vertical.transfer.twin import gradients, loss_of, train_plain
from federated.vertical.wire import Arr, Blobs, pack, unpack
from models.metrics import auc

ROWS, REST, SEED = 30, 25, 3
SMALL = TransferOptions(hidden=4, steps=4, every=2, rate=0.3, gamma=1.0, noise=1e-4)
SEEDS = {"guest": 21, "host": 22}


def setups(rows: int = ROWS, columns: int = 3) -> dict[str, Setup]:
    """Guest and host with so many common rows; the guest has others, too."""
    rng = np.random.default_rng(SEED)
    latent = rng.standard_normal((rows + REST, 3))
    parties = {"guest": "guest", "host": "host"}
    ids, names = [f"id{row}" for row in range(rows + REST)], tuple("abcdefgh"[:columns])
    labels = np.where(latent.sum(axis=1) > 0, 1.0, 0.0)
    found = {}
    for name in parties:
        features = latent @ rng.standard_normal((3, columns))
        marks = labels if name == "guest" else None
        table = Table(tuple(ids), features, names, marks)
        common = table.take(np.arange(rows, dtype=np.int64))
        rest = table.take(np.arange(rows, rows + REST, dtype=np.int64)) if name == "guest" else None
        found[name] = Setup(name, parties, common, SEED, rows, rest=rest)
    return found


def sides(options: TransferOptions, given: Mapping[str, Setup]) -> tuple[GuestSide, HostSide]:
    _, guest = roles.guest_side(options, given["guest"], SEEDS["guest"])
    _, host = roles.host_side(options, given["host"], SEEDS["host"])
    return guest, host


def run(
    options: TransferOptions,
    given: Mapping[str, Setup],
    states: Mapping[str, bytes] | None = None,
    **more: Any,
) -> Outcome[Any]:
    made = {}
    for name, setup in given.items():
        seed = SEEDS[name].to_bytes(8, "little")
        random = np.random.default_rng(SEEDS[name])

        def draw(count: int, seed: bytes = seed, random: Any = random) -> bytes:
            return seed if count == 8 else random.bytes(count)

        role = roles.guest if name == "guest" else roles.host
        made[name] = role(options, setup, None if states is None else states[name], draw)
    return run_local(made, **more)


def weights(outcome: Outcome[Any], name: str) -> np.ndarray:
    part = load(outcome.results[name].model)
    assert isinstance(part, GuestModel | HostModel)
    return part.weights


class TestInTheClear:
    def test_gradients_are_those_of_the_loss(self) -> None:
        guest, host = sides(replace(SMALL, gamma=0.7), setups())
        found, step = gradients(guest, host), 1e-5
        for side, gradient in zip((guest, host), found, strict=True):
            assert np.abs(gradient).max() > 1e-3
            for place in np.ndindex(gradient.shape):
                kept = side.weights[place]
                side.weights[place] = kept + step
                above = loss_of(guest, host)
                side.weights[place] = kept - step
                below = loss_of(guest, host)
                side.weights[place] = kept
                assert (above - below) / (2 * step) == pytest.approx(gradient[place], abs=1e-8)

    def test_weighted_matrices_are_the_gradients(self) -> None:
        """What the parties compute with each other's V is the gradient by the chain rule, up to rounding."""
        guest, host = sides(SMALL, setups())
        pairs: list[tuple[GuestSide | HostSide, Side]] = [(guest, host), (host, guest)]
        for (side, other), truth in zip(pairs, gradients(guest, host), strict=True):
            needed, own = side.needs()
            assert isinstance(other, GuestSide | HostSide)
            matrix = other.message()
            found = ((matrix[None] * needed).sum(axis=1) + own) / ROWS
            assert np.abs(found - truth).max() < 1e-12


class TestTraining:
    def test_weights_are_those_in_the_clear_within_the_stated_error(self) -> None:
        given = setups()
        outcome, (guest, host) = run(SMALL, given), sides(SMALL, given)
        before = loss_of(guest, host)
        starts = guest.weights.copy(), host.weights.copy()
        train_plain(guest, host)
        assert loss_of(guest, host) < before
        # Errors of steps add up like independent ones, six standard deviations wide; momentum repeats each.
        stated = (
            6 * SMALL.noise * SMALL.rate / (1 + SMALL.gamma) / (1 - SMALL.momentum) * np.sqrt(SMALL.steps)
        )
        for name, side, start in zip(given, (guest, host), starts, strict=True):
            assert np.abs(side.weights - start).max() > 20 * stated
            assert np.abs(weights(outcome, name) - side.weights).max() < stated
        assert {one.kind for one in outcome.transcript.messages} == set(KIND.seen) - {"vectors", "gamma"}

    @pytest.mark.slow
    @pytest.mark.parametrize("noise", [1e-7, TransferOptions().noise])
    def test_a_whole_job_is_the_one_in_the_clear(self, noise: float) -> None:
        """With next to no noise to within a hundred-thousandth after all steps; with the usual one, scores rank rows
        alike."""
        options, given = TransferOptions(noise=noise), setups(rows=80, columns=6)
        outcome, (guest, host) = run(options, given), sides(options, given)
        train_plain(guest, host)
        assert outcome.results["guest"].figures["steps"] == options.steps
        stated = (
            6 * noise * options.rate / (1 + options.gamma) / (1 - options.momentum) * np.sqrt(options.steps)
        )
        for name, side in zip(given, (guest, host), strict=True):
            assert np.abs(side.weights).max() > 0.3
            assert np.abs(weights(outcome, name) - side.weights).max() < stated
        parts = {name: load(one.model) for name, one in outcome.results.items()}
        assert isinstance(parts["guest"], GuestModel)
        assert isinstance(parts["host"], HostModel)
        table = given["host"].table
        assert table is not None
        found = parts["guest"].combine(
            np.zeros((len(table), 6)), {"host": parts["host"].partial(table.features)}
        )
        reached = auc(guest.labels[: len(table)], found)
        assert reached == pytest.approx(
            auc(guest.labels[: len(table)], host.vectors() @ guest.phi()), abs=0.01
        )
        assert reached > 0.8

    def test_from_a_checkpoint_it_goes_on(self) -> None:
        given = setups()
        whole = run(SMALL, given)
        states = {name: kept[2] for name, kept in whole.checkpoints.items()}
        resumed = run(SMALL, given, states, label=2)
        assert [list(kept) for kept in resumed.checkpoints.values()] == [[4], [4]]
        for name in given:
            assert weights(resumed, name) == pytest.approx(weights(whole, name), abs=5e-3)
        # At the last label nothing is left to do, and nothing is said.
        done = {name: kept[4] for name, kept in whole.checkpoints.items()}
        assert not run(SMALL, given, done, label=4).transcript.messages

    def test_gamma_is_chosen_by_rows_that_no_trial_saw(self) -> None:
        given = setups(rows=60)
        options = replace(SMALL, gammas=(0.1, 5.0), noise=1e-6)
        outcome = run(options, given)
        assert {one.kind for one in outcome.transcript.messages} == set(KIND.seen)
        # Initial weights are those of one seed in every trial here: the trials can be done again in the clear.
        kept, asked = roles._parts(given["host"])
        assert (len(kept), len(asked)) == (45, 15)
        own, other = given["guest"].table, given["host"].table
        assert own is not None
        assert own.labels is not None
        assert other is not None
        reached = []
        for gamma in options.gammas:
            parts = {name: roles._taken(one, kept) for name, one in given.items()}
            guest, host = sides(replace(SMALL, gamma=gamma), parts)
            train_plain(guest, host)
            scaling, _ = roles.host_side(SMALL, parts["host"], 0)
            shown = np.tanh(inputs_of(scaling, other.features[asked]) @ host.weights)
            reached.append(auc(own.labels[asked], shown @ guest.phi()))
        best = options.gammas[int(np.argmax(reached))]
        assert {one.figures["gamma"] for one in outcome.results.values()} == {best}
        # Afterwards the chosen one learns from all rows.
        guest, host = sides(replace(SMALL, gamma=best), given)
        train_plain(guest, host)
        assert np.abs(weights(outcome, "host") - host.weights).max() < 1e-4
        # From anywhere, also between two trainings, it goes on to the same end.
        labels_of = list(outcome.checkpoints["guest"])
        assert labels_of == list(outcome.checkpoints["host"]) == [2, 4, 5, 7, 9, 10, 12, 14]
        for label in (4, 5, 9, 10, 12):
            states = {name: one[label] for name, one in outcome.checkpoints.items()}
            resumed = run(options, given, states, label=label)
            assert resumed.results["guest"].figures["gamma"] == best
            assert np.abs(weights(resumed, "host") - host.weights).max() < 1e-4

    def test_trials_that_cannot_be(self) -> None:
        given = setups(rows=12, columns=8)
        options = replace(SMALL, gammas=(0.1,))
        with pytest.raises(ValueError, match="9 common rows with 8 features"):
            KIND.make(options, given["host"])
        table = setups(rows=60)["guest"].table
        assert table is not None
        assert table.labels is not None
        asked = roles._parts(setups(rows=60)["guest"])[1]
        table.labels[asked] = 1.0
        with pytest.raises(
            ValueError, match="15 common rows that gammas would be chosen by are of one class"
        ):
            KIND.make(options, replace(setups(rows=60)["guest"], table=table))

    def test_several_chunks_are_one_answer(self) -> None:
        """More rows than a ciphertext holds."""
        options, given = replace(SMALL, hidden=64, steps=1), setups(rows=70, columns=2)
        assert Plan(options, 70, 2).layout.chunks == 3
        outcome, (guest, host) = run(options, given), sides(options, given)
        train_plain(guest, host)
        assert np.abs(weights(outcome, "guest") - guest.weights).max() < 5e-4
        assert np.abs(weights(outcome, "host") - host.weights).max() < 5e-4

    def test_a_whole_job_scores_held_out_customers(self) -> None:
        """Through the pipeline: the guest's rows that the host has not are learned from, too."""
        given = setups(rows=60)
        options = replace(SMALL, steps=1)
        guest = given["guest"]
        assert guest.table is not None
        assert guest.rest is not None
        everybody = Table(
            guest.table.ids + guest.rest.ids,
            np.vstack([guest.table.features, guest.rest.features]),
            guest.table.names,
            roles.all_labels(guest),
        )
        alignment = Alignment(PSI, PsiOptions())
        made = {
            name: joint(KIND, options, setup, alignment, 0.3)(None)
            for name, setup in (
                ("guest", replace(guest, table=everybody, rest=None)),
                ("host", given["host"]),
            )
        }
        figures = run_local(made).results["guest"].figures
        assert figures["common rows"] == 42
        assert figures["rows learned from"] == 42 + REST
        assert 0 <= figures["test auc"] <= 1


class TestCurious:
    def test_a_key_holder_decrypts_noise(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Slots are as wide as masks, and do not go along with the gradient's terms."""
        openers: list[Opener] = []
        real = Opener.__init__

        def noted(self: Opener, scheme: Scheme) -> None:
            openers.append(self)
            real(self, scheme)

        monkeypatch.setattr(Opener, "__init__", noted)
        given = setups()
        options = replace(SMALL, steps=1, every=1)
        outcome = run(options, given, bodies=True)
        plan = Plan(options, ROWS, 3)
        # The guest made its key first; what the host masked is under it.
        body = outcome.transcript.of(sender="host", kind="masked")[0].body
        assert body is not None
        (term,) = unpack(body, "host", {"terms": Blobs(100, FLAT.most_bytes(FLOOR))})["terms"]
        cipher = plan.scheme.read(term, "host", FLOOR, TERM_SCALE)
        residues = plan.residues.of(openers[0].plain(cipher)) / plan.residues.primes.astype(np.float64)
        # Uniform modulo either prime: chi squared with 15 degrees of freedom is above 45 once in 10,000 runs.
        for numbers in residues:
            counts, _ = np.histogram(numbers, 16, (0.0, 1.0))
            assert ((counts - FLAT.degree / 16) ** 2 / (FLAT.degree / 16)).sum() < 45
        # In the slots no sum is to be seen: masks are a thousand million times as large.
        slots = openers[0].open(cipher)
        assert np.abs(slots).mean() > 2.0**30


class TestPeers:
    @pytest.mark.parametrize(
        ("kind", "body", "rule"),
        [
            ("features", pack({"features": ROWS}), "features"),
            ("features", pack({"features": 0}), "malformed"),
            ("keys", pack({"public": b"none", "rotations": b"none"}), "ciphertext"),
            ("matrix", pack({"matrix": [b"none"]}), "ciphertext"),
            ("matrix", pack({"matrix": []}), "malformed"),
            ("masked", pack({"terms": [b"none"]}), "ciphertext"),
            ("masked", pack({"terms": [b"none"] * 2}), "malformed"),
            ("sums", pack({"sums": np.zeros((1, 2, 4), np.uint64)}), "malformed"),
            ("sums", pack({"sums": np.full((1, 2, 512), 2**60, np.uint64)}), "malformed"),
            ("vectors", pack({"vectors": np.full((7, 4), 2.0)}), "malformed"),
            ("vectors", pack({"vectors": np.full((7, 4), np.nan)}), "malformed"),
        ],
    )
    def test_what_no_honest_party_sends(self, kind: str, body: bytes, rule: str) -> None:
        def twist(sent: Sent) -> Iterable[tuple[str, bytes]]:
            assert sent.body is not None
            return [(sent.kind, body if sent.kind == kind and sent.sender == "host" else sent.body)]

        with pytest.raises(PeerFault, match=f"host: {rule}"):
            run(replace(SMALL, gammas=(1.0,)), setups(), twist=twist)

    def test_sums_beyond_the_modulus_are_no_sums(self) -> None:
        def twist(sent: Sent) -> Iterable[tuple[str, bytes]]:
            assert sent.body is not None
            if sent.kind != "sums" or sent.sender != "host":
                return [(sent.kind, sent.body)]
            sums = unpack(sent.body, "host", {"sums": Arr("<u8", (None, None, None))})["sums"].copy()
            sums[0, 0, 0] = Scheme(FLAT).primes[0]
            return [(sent.kind, pack({"sums": sums}))]

        with pytest.raises(PeerFault, match="host: malformed: numbers beyond"):
            run(SMALL, setups(), twist=twist)

    def test_ciphertexts_mixed_up_are_noticed_or_only_spoil(self) -> None:
        """Sums of other masks than one's own are of their size."""
        kept: list[bytes] = []

        def twist(sent: Sent) -> Iterable[tuple[str, bytes]]:
            assert sent.body is not None
            if sent.kind == "masked" and sent.sender == "host":
                kept.append(sent.body)
                return [(sent.kind, kept[0])]
            return [(sent.kind, sent.body)]

        with pytest.raises(PeerFault, match="guest: gradient"):
            run(SMALL, setups(), twist=twist)

    def test_too_few_rows_are_refused(self) -> None:
        given = setups(rows=4)
        with pytest.raises(ValueError, match="it takes more than 4 rows"):
            KIND.make(SMALL, given["guest"])

    def test_shares_and_models_that_are_none(self) -> None:
        outcome = run(replace(SMALL, steps=1, every=1), setups())
        body = outcome.results["guest"].model
        guest = load(body)
        assert isinstance(guest, GuestModel)
        rows = np.zeros((5, 3))
        for share in (np.zeros((5, 3)), np.zeros((5, 4), np.float32), np.full((5, 4), 2.0)):
            with pytest.raises(PeerFault, match="host: malformed"):
                guest.combine(rows, {"host": share})
        with pytest.raises(ValueError, match="no share of host"):
            guest.combine(rows, {})
        assert guest.combine(rows, {"host": np.zeros((5, 4))}) == pytest.approx(np.full(5, 0.5))
        for wrong in (body[:-1], body.replace(b"guest 1", b"guest 9")):
            with pytest.raises((PeerFault, ValueError)):
                load(wrong)

    @pytest.mark.parametrize(
        ("given", "told"),
        [
            ({"steps": 0}, "steps is 0"),
            ({"gammas": (-1.0,)}, "gammas are"),
            ({"gammas": (1.0,) * 17}, "at most 16"),
            ({"gamma": -1.0}, "gamma"),
            ({"noise": 0.0}, "noise"),
        ],
    )
    def test_options_that_cannot_be(self, given: dict[str, Any], told: str) -> None:
        with pytest.raises(ValueError, match=told):
            TransferOptions(**given)
