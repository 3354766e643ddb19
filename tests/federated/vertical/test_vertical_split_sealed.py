"""The encrypted layer of a split network: exact, equal to its twin, resumed, and what either side can make of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("torch", reason="the extra `stack` is not installed")
pytest.importorskip("tenseal", reason="the extra `vertical` is not installed")

from sympy.polys.domains import ZZ
from sympy.polys.matrices import DomainMatrix
from tenseal import sealapi

from federated.privacy.composition import gaussian_epsilon
from federated.privacy.randomness import SYSTEM
from federated.vertical.ckks import restored
from federated.vertical.kinds import Setup
from federated.vertical.linear.solver import Scaling
from federated.vertical.parties import Outcome, PeerFault, Sent, run_local
from federated.vertical.split import layer, ring, roles
from federated.vertical.split.kind import KIND
from federated.vertical.split.layer import GuestLayer, HostLayer, Plan
from federated.vertical.split.leakage import (
    features_by_inversion,
    labels_by_direction,
    layer_by_rank,
    watched,
)
from federated.vertical.split.model import GuestModel, HostModel, load
from federated.vertical.split.network import flat
from federated.vertical.split.options import SplitOptions
from federated.vertical.split.ring import HALF, PLAIN, SLOTS, Hider, Ints, KeyHolder, product, summed, uniform
from federated.vertical.split.twin import train_plain
from federated.vertical.tables import Table
from federated.vertical.wire import Bytes, pack, unpack
from tests.support.ciphertexts import transparent

SEED = 5
SMALL = SplitOptions(hidden=6, width=3, interactive=2, layer="encrypted", epochs=2, batch=45)
SEEDS = {"guest": 11, "host0": 12, "host1": 13}
ROWS = 90


def tables(hosts: int = 1, rows: int = ROWS, loss: str = "logistic", columns: int = 3) -> dict[str, Table]:
    rng = np.random.default_rng(hosts)
    found = rng.standard_normal((1 + hosts, rows, columns))
    predictor = found.sum(axis=(0, 2)) + found[0, :, 0] * found[1, :, 1]
    marks = {
        "squared": 50 + 7 * predictor,
        "classes": np.digitize(predictor, (-1.0, 1.0)) * 2.0,
    }.get(loss, (predictor > 1).astype(float))
    ids, names = tuple(f"id{row}" for row in range(rows)), tuple(f"c{place}" for place in range(columns))
    others = {f"host{place}": Table(ids, found[1 + place], names) for place in range(hosts)}
    return {"guest": Table(ids, found[0], names, marks)} | others


def run(
    options: SplitOptions, given: dict[str, Table], states: dict[str, bytes] | None = None, **more: Any
) -> Outcome[Any]:
    parties = {name: "guest" if name == "guest" else "host" for name in given}
    made = {}
    for name, table in given.items():
        role: Any = roles.guest if name == "guest" else roles.host
        setup = Setup(name, parties, table, SEED, len(table))
        # What is drawn is halved to a seed; a restart draws something else.
        drawn = (2 * (SEEDS[name] + 100 * (states is not None))).to_bytes(8, "little")
        state = None if states is None else states[name]
        made[name] = role(options, setup, state, lambda count, drawn=drawn: (8 * drawn)[:count])
    return run_local(made, **more)


@pytest.fixture
def sharp(monkeypatch: pytest.MonkeyPatch) -> None:
    """No blur: what is computed is then the same in each run."""
    monkeypatch.setattr(layer, "BLUR_STEPS", 0.0)


class TestRing:
    def test_products_are_exact_and_hidden(self, monkeypatch: pytest.MonkeyPatch) -> None:
        holder, rng = KeyHolder(), np.random.default_rng(1)
        numbers, factors, masks = rng.integers(0, PLAIN, (3, SLOTS))
        hider = Hider(holder.public, "host", rng.bytes)
        cipher = hider.read(holder.encrypt(numbers[None])[0])
        found = hider.hidden(cipher, factors, masks)
        wanted = [(int(a) * int(b) + int(c)) % PLAIN for a, b, c in zip(numbers, factors, masks, strict=True)]
        assert holder.decrypt([found], "guest")[0].tolist() == wanted
        nothing = hider.hidden(cipher, np.zeros(SLOTS, np.int64), masks)
        assert holder.decrypt([nothing], "guest")[0].tolist() == masks.tolist()
        # Errors that the holder could read are covered by others, 2^FLOOD times as large, and it still decrypts.
        assert min(holder.budget(found), holder.budget(nothing)) >= ring.LEAST_BUDGET
        monkeypatch.setattr(ring, "FLOOD", 1)
        bare = Hider(holder.public, "host", rng.bytes)
        assert holder.budget(bare.hidden(cipher, factors, masks)) - holder.budget(found) >= 41
        # The same question twice has answers that share nothing.
        again = hider.hidden(cipher, factors, masks)
        assert found[100:] != again[100:]

    def test_the_second_polynomial_does_not_divide_out(self) -> None:
        """What the holder sent is u*a; a product's is u*a*factor, and without the cover the quotient is the factor."""
        holder, rng = KeyHolder(), np.random.default_rng(6)
        numbers, factors = rng.integers(0, PLAIN, (2, SLOTS))
        hider = Hider(holder.public, "host", rng.bytes)
        cipher, evaluator = hider.read(holder.encrypt(numbers[None])[0]), sealapi.Evaluator(ring.context())
        prime = ring.context().first_context_data().parms().coeff_modulus()[0].value()
        factor, product_alone = sealapi.Plaintext(), sealapi.Ciphertext()
        sealapi.BatchEncoder(ring.context()).encode(factors.tolist(), factor)
        evaluator.transform_to_ntt_inplace(factor, ring.context().first_parms_id())
        evaluator.multiply_plain(cipher, factor, product_alone)
        covered = hider.product(cipher, factors)
        places = range(64)

        def quotients(one: sealapi.Ciphertext) -> list[int]:
            start, above, below = 3 * SLOTS, one.dyn_array(), cipher.dyn_array()
            return [above.at(start + at) * pow(below.at(start + at), -1, prime) % prime for at in places]

        wanted = [factor.data(at) for at in places]
        assert quotients(product_alone) == wanted
        assert not set(quotients(covered)) & set(wanted)

    def test_what_is_no_answer_is_the_senders_fault(self) -> None:
        holder, other = KeyHolder(), KeyHolder()
        numbers = np.ones((1, SLOTS), np.int64)
        (fresh,), (foreign,) = holder.encrypt(numbers), other.encrypt(numbers)
        hider = Hider(other.public, "host", np.random.default_rng(1).bytes)
        answer = hider.hidden(hider.read(foreign), numbers[0], numbers[0])
        for blob, told in (
            (fresh, "not of the form"),
            (answer, "cannot be decrypted"),
            (answer[:-9], "ciphertext"),
        ):
            with pytest.raises(PeerFault, match=told):
                holder.decrypt([blob], "guest")
        with pytest.raises(PeerFault, match="not of the form"):
            hider.read(answer)
        for made, answered in ((fresh, False), (answer, True)):
            open_to_all = transparent(ring.context(), ring._read(made, "x", answered))
            restored(sealapi.Ciphertext, ring.context(), open_to_all, "x", ring.MOST_CIPHERTEXT)
            with pytest.raises(PeerFault, match="not of the form"):
                ring._read(open_to_all, "host", answered)
        with pytest.raises(PeerFault, match="host: ciphertext"):
            Hider(b"no key", "host", np.random.default_rng(1).bytes)

    def test_arithmetic_is_that_of_whole_numbers(self) -> None:
        rng = np.random.default_rng(2)
        narrow = rng.integers(-(2**20), 2**20 + 1, (5, 70))
        wide = rng.integers(0, PLAIN, (70, 3))
        wide[0] = PLAIN - 1
        assert (
            product(narrow, wide).tolist() == (narrow.astype(object) @ wide.astype(object) % PLAIN).tolist()
        )
        for axis in (0, 1):
            assert (
                summed(np.tile(wide, (9, 200)), axis).tolist()
                == (np.tile(wide, (9, 200)).astype(object).sum(axis=axis) % PLAIN).tolist()
            )
        drawn = uniform(rng.bytes, 3_000)
        assert 0 <= drawn.min() < PLAIN / 200
        assert PLAIN * 0.995 < drawn.max() < PLAIN
        # Numbers beyond the prime are drawn again: folded, small ones would be likelier.
        words = iter([np.array([2**64 - 1, 1024], "<u8").tobytes(), np.array([2048, 4096], "<u8").tobytes()])
        assert uniform(lambda _: next(words), 2).tolist() == [1, 2]


def sides(plan: Plan, rng: np.random.Generator) -> tuple[GuestLayer, HostLayer, npt.NDArray[np.float64]]:
    """Both sides of one layer, and the weights."""
    mine, yours = plan.initial(rng), plan.initial(rng)
    host = HostLayer(plan, "guest", mine, SYSTEM)
    guest = GuestLayer(plan, "host", host.key, yours, rng.bytes, SYSTEM)
    return guest, host, plan.weights(mine, yours, "host")


class TestLayer:
    @pytest.mark.parametrize(
        ("width", "share", "batch"), [(3, 2, 45), (5, 1, 700), (9, 4, 300)], ids=["one", "k=1", "three"]
    )
    def test_a_step_is_that_of_a_layer_in_the_clear(self, width: int, share: int, batch: int) -> None:
        options = SplitOptions(width=width, interactive=share, batch=batch, layer="encrypted")
        plan, rng = Plan.of(options, batch), np.random.default_rng(3)
        guest, host, weights = sides(plan, rng)
        for rows in (batch, batch - 1):
            activations = rng.uniform(-0.5, 0.5, (rows, width)).astype(np.float32)
            gradients = rng.normal(0, 0.3, (rows, share)).astype(np.float32) / np.float32(rows)
            masked = guest.masked(host.sealed(activations))
            found = guest.shares(host.products(masked), rows)
            before = host.share
            along = host.gradients(guest.turned(gradients))
            # Rounding of activations and gradients, and the blur: well below six of its deviations.
            assert np.abs(found - activations @ weights).max() < 7 * plan.blur
            assert np.abs(along - gradients @ weights.T).max() < 7 * plan.blur / rows
            # And the blur is there.
            assert np.std(found - activations @ weights) == pytest.approx(plan.blur, rel=0.3)
            assert np.std(along - gradients @ weights.T) == pytest.approx(plan.blur / rows, rel=0.3)
            wanted = weights - plan.rate * rows / plan.stride * (activations.T @ gradients)
            weights = plan.weights(host.share, guest.share, "host")
            assert np.abs(weights - wanted).max() < 1e-3
            # Both shares are new, and nowhere near the weights.
            assert (host.share != before).all()
            assert np.median(np.abs(ring.centred(guest.share).astype(float))) > PLAIN / 100

    def test_the_host_decrypts_even_numbers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plan, rng = Plan.of(replace(SMALL, batch=1_000), 1_000), np.random.default_rng(4)
        guest, host, _ = sides(plan, rng)
        seen: list[Ints] = []
        opened = KeyHolder.decrypt

        def decrypt(holder: KeyHolder, blobs: Any, sender: str) -> Ints:
            seen.append(opened(holder, blobs, sender))
            return seen[-1]

        monkeypatch.setattr(KeyHolder, "decrypt", decrypt)
        activations = np.full((1_000, 3), 0.5, np.float32)
        guest.shares(host.products(guest.masked(host.sealed(activations))), 1_000)
        host.gradients(guest.turned(np.full((1_000, 2), 1e-4, np.float32)))
        for slots in (seen[0][0], *seen[1]):
            # 16 parts of the range: chi squared with 15 degrees of freedom is below 50.
            counts = np.histogram(slots, 16, (0, PLAIN))[0]
            assert ((counts - 512) ** 2 / 512).sum() < 50
        assert [len(one) for one in seen] == [plan.forward, plan.ciphertexts]

    def test_one_batch_tells_the_host_the_span_of_the_weights(self) -> None:
        """The limit of the promise, as stated: a gradient along d activations is made of k numbers."""
        options = SplitOptions(width=8, interactive=2, batch=200, layer="encrypted")
        plan, rng = Plan.of(options, 200), np.random.default_rng(9)
        guest, host, weights = sides(plan, rng)
        gradients = rng.normal(0, 0.1, (200, 2)).astype(np.float32) / np.float32(200)
        guest.masked(host.sealed(rng.uniform(-0.5, 0.5, (200, 8)).astype(np.float32)))
        found = host.gradients(guest.turned(gradients)).astype(np.float64)
        assert layer_by_rank(found, weights, 2) > 0.99
        assert layer_by_rank(rng.standard_normal((200, 8)), weights, 2) < 0.8
        # And what the guest's gradients are, but for the same change of two numbers.
        along = found @ np.linalg.svd(found)[2][:2].T
        left = gradients - along @ np.linalg.lstsq(along, gradients, rcond=None)[0]
        assert (left**2).sum() < 0.02 * (gradients**2).sum()

    def test_a_guest_that_breaks_the_protocol_reads_activations(self) -> None:
        """The limit of the promise, as stated: nothing tells the host by what the guest multiplied."""
        plan, rng = Plan.of(SMALL, 45), np.random.default_rng(7)
        guest, host, weights = sides(plan, rng)
        activations = rng.uniform(-0.5, 0.5, (45, 3)).astype(np.float32)
        guest.share[0, 0] = (guest.share[0, 0] + 60 * 2**plan.weight_bits) % PLAIN
        found = guest.shares(host.products(guest.masked(host.sealed(activations))), 45)
        first = (found[:, 0] - activations @ weights[:, 0]) / 60
        assert np.abs(first - activations[:, 0]).max() < 1e-3

    def test_without_blur_whole_numbers_could_be_solved_for(self) -> None:
        """Nguyen and Stern's attack on z: short vectors that are orthogonal to it are so to the activations, too."""
        plan, rng = Plan.of(SMALL, 45), np.random.default_rng(5)
        numbers = plan.activations(rng.uniform(-0.5, 0.5, (16, 3)).astype(np.float32))
        weights = ring.centred((plan.initial(rng) + plan.initial(rng)) % PLAIN)
        exact = numbers @ weights

        def orthogonal(shown: Ints) -> Ints:
            stretched = np.hstack([np.eye(16, dtype=object), shown.astype(object) * 2**60])
            lattice = DomainMatrix([[ZZ(int(x)) for x in row] for row in stretched], stretched.shape, ZZ)
            return np.array(lattice.lll().to_list(), object)[:13, :16].astype(np.int64)

        assert not (orthogonal(exact) @ numbers).any()
        blurred = ring.centred(plan.blurred(exact % PLAIN, SYSTEM))
        assert (orthogonal(blurred) @ numbers).any(axis=1).sum() > 8


@pytest.mark.usefixtures("sharp")
class TestUndivided:
    @pytest.mark.parametrize(("loss", "hosts"), [("logistic", 1), ("classes", 2), ("squared", 1)])
    def test_weights_are_those_of_the_undivided_network_bit_for_bit(self, loss: Any, hosts: int) -> None:
        options, given = replace(SMALL, loss=loss), tables(hosts, loss=loss)
        outcome = run(options, given)
        others = {name: table for name, table in given.items() if name != "guest"}
        plain = train_plain(given["guest"], others, options, SEED, SEEDS)
        guest = load(outcome.results["guest"].model)
        assert isinstance(guest, GuestModel)
        assert flat(guest.net).tobytes() == flat(plain.guest).tobytes()
        # In floats, without rounding: nearly the same.
        floats = train_plain(given["guest"], others, options, SEED, SEEDS, rounded=False)
        assert np.abs(flat(guest.net) - flat(floats.guest)).max() < 2e-3
        shares = {}
        for place, name in enumerate(others):
            part = load(outcome.results[name].model)
            assert isinstance(part, HostModel)
            assert part.layer is not None
            assert flat(part.net).tobytes() == flat(plain.towers[place]).tobytes()
            assert part.layer.tobytes() == plain.layers[place].tobytes()
            assert np.abs(part.layer - floats.layers[place]).max() < 1e-4
            shares[name] = part.partial(others[name].features)
            assert shares[name].shape == (ROWS, 2)
        assert outcome.results["guest"].figures["loss"] == round(plain.loss, 6)
        assert np.isfinite(guest.combine(given["guest"].features, shares)).all()
        with pytest.raises(PeerFault, match="host0: malformed"):
            guest.combine(given["guest"].features, shares | {"host0": np.zeros((ROWS, 3), np.float32)})
        clear = {"activations", "gradients"}
        assert {one.kind for one in outcome.transcript.messages} == set(KIND.seen) - clear

    def test_from_a_checkpoint_the_same_network_comes(self) -> None:
        given = tables(2)
        whole = run(SMALL, given)
        states = {name: kept[1] for name, kept in whole.checkpoints.items()}
        resumed = run(SMALL, given, states, label=1)
        for name in given:
            assert resumed.results[name].model == whole.results[name].model
        # A state has a share of the weights, evenly random, and not the weights.
        fields = unpack(
            states["host0"], "x", {"net": Bytes(10_000), "layer": Bytes(10_000), "key": Bytes(32)}
        )
        assert len(fields["layer"]) >= 8 * 6
        with pytest.raises(PeerFault, match="this checkpoint: malformed"):
            run(replace(SMALL, interactive=1), given, states, label=1)


class TestBlurred:
    def test_it_learns_as_well_and_stays_close(self) -> None:
        given = tables(rows=200)
        options = replace(SMALL, batch=100, epochs=3)
        outcome = run(options, given)
        plain = train_plain(given["guest"], {"host0": given["host0"]}, options, SEED, SEEDS)
        guest = load(outcome.results["guest"].model)
        assert isinstance(guest, GuestModel)
        assert 0 < np.abs(flat(guest.net) - flat(plain.guest)).max() < 0.02
        assert outcome.results["guest"].figures["loss"] == pytest.approx(plain.loss, abs=2e-3)
        assert "sees 2 numbers" in str(outcome.results["host0"].figures["protection"])

    def test_a_restart_repeats_blur_and_noise(self) -> None:
        """Masks and keys are new. Were blur and noise new, restarts would average them away."""
        given, options = tables(), replace(SMALL, noise=1.0, batch=90)
        whole = run(options, given, bodies=True)
        states = {name: kept[0] for name, kept in whole.checkpoints.items()}
        again = run(options, given, states, label=0, bodies=True)
        for name in given:
            assert again.results[name].model == whole.results[name].model
            assert list(again.checkpoints[name]) == [1, 2]
            # Other shares of the same weights.
            assert again.checkpoints[name][1] != whole.checkpoints[name][1]
        for kind in ("keys", "sealed", "masked", "products", "turned"):
            ours, theirs = (one.transcript.of(kind=kind)[0].body for one in (again, whole))
            assert ours is not None
            assert ours != theirs

    def test_noise_protects_labels_alone(self) -> None:
        options = replace(SMALL, noise=3.0, epochs=1)
        outcome = run(options, tables())
        assert outcome.results["guest"].figures["epsilon"] == round(gaussian_epsilon(3.0, 2, 1e-5), 4)
        assert "epsilon" not in outcome.results["host0"].figures
        part = load(outcome.results["host0"].model)
        # Answers have no noise: hosts' rows have the encryption.
        rows = tables()["host0"].features
        assert part.partial(rows).tobytes() == part.partial(rows).tobytes()


class TestPeers:
    @pytest.mark.parametrize(
        ("kind", "body", "told"),
        [
            ("keys", pack({"public": b"none"}), "host0: ciphertext"),
            ("sealed", pack({"ciphertexts": []}), "host0: malformed"),
            ("sealed", pack({"ciphertexts": [b"none"]}), "host0: ciphertext"),
            ("masked", pack({"ciphertexts": [b"none"]}), "guest: ciphertext"),
            ("turned", pack({"ciphertexts": [b"none"] * 2}), "guest: malformed"),
            ("products", pack({"sums": np.full((45, 2), PLAIN)}), "host0: malformed"),
            ("products", pack({"sums": np.full((45, 2), HALF)}), "host0: range"),
            ("products", pack({"sums": np.zeros((44, 2), np.int64)}), "host0: malformed"),
            ("weights", pack({"shares": np.full((1, 3, 2), -1)}), "guest: malformed"),
            ("weights", pack({"shares": np.zeros((1, 2, 2), np.int64)}), "guest: malformed"),
        ],
    )
    def test_malformed_messages_are_the_senders_fault(self, kind: str, body: bytes, told: str) -> None:
        def twist(sent: Sent) -> Iterable[tuple[str, bytes]]:
            return [(sent.kind, body if sent.kind == kind else sent.body or b"")]

        with pytest.raises(PeerFault, match=told):
            run(replace(SMALL, epochs=1, batch=90 if kind == "weights" else 45), tables(), twist=twist)

    def test_an_answer_of_an_earlier_batch_is_noticed(self) -> None:
        """Its masks are others, so what comes of it lies anywhere in the range."""
        kept: list[bytes] = []

        def twist(sent: Sent) -> Iterable[tuple[str, bytes]]:
            if sent.kind == "turned":
                kept.append(sent.body or b"")
            return [(sent.kind, kept[0] if sent.kind == "turned" else sent.body or b"")]

        with pytest.raises(PeerFault, match="range"):
            run(replace(SMALL, epochs=1), tables(), twist=twist)


class TestOptions:
    @pytest.mark.parametrize(
        ("given", "told"),
        [
            ({"top": "dot"}, "the host's own vector"),
            ({"interactive": 3}, "could solve for all"),
            ({"batch": 8_193}, "at most 8192 rows"),
            ({"layer_rate": 0.0}, "layer_rate"),
        ],
    )
    def test_what_cannot_be_is_refused(self, given: dict[str, Any], told: str) -> None:
        with pytest.raises(ValueError, match=told):
            replace(SMALL, **given)

    def test_tables_that_do_not_fit_are_refused(self) -> None:
        parties = {"guest": "guest", "host0": "host"}
        narrow = Setup("host0", parties, tables(columns=2)["host0"], SEED, ROWS)
        wide = tables(columns=3)["host0"]
        for spoilt in (np.full(ROWS, 7.0), wide.features[:, 0] * 2 + 1):
            # A constant, or another column over again, hides nothing.
            features = np.column_stack([wide.features[:, :2], spoilt])
            with pytest.raises(ValueError, match="has 2 columns that differ"):
                KIND.make(SMALL, replace(narrow, table=replace(wide, features=features)))
        with pytest.raises(ValueError, match="could hold the columns themselves"):
            KIND.make(SMALL, narrow)
        fine = replace(narrow, table=tables()["host0"])
        with pytest.raises(ValueError, match="leave 6 bits"):
            KIND.make(replace(SMALL, layer_rate=1e-6), fine)
        with pytest.raises(ValueError, match="at most 512"):
            Plan.of(replace(SMALL, width=64, interactive=63, batch=4_000), 4_000)


class TestLeakage:
    def test_fewer_numbers_tell_less_and_gradients_tell_labels_all_the_same(self) -> None:
        """What the encrypted layer is worth, and what it is not."""
        given = tables(rows=600, columns=6)
        labels = given["guest"].labels
        assert labels is not None
        features = Scaling.of(given["host0"].features, 3.0).apply(given["host0"].features)
        known, found = int(np.flatnonzero(labels)[0]), {}
        clear = SplitOptions(hidden=16, width=6, epochs=3, batch=100)
        for name, options in (
            ("clear", clear),
            ("encrypted", replace(clear, layer="encrypted", interactive=1)),
        ):
            seen = watched(given["guest"], {"host0": given["host0"]}, options, SEED, SEEDS)["host0"]
            found[name] = (
                features_by_inversion(seen.of_epoch(2), features, 200),
                features_by_inversion(seen.of_all_epochs(), features, 200),
                labels_by_direction(seen.gradients[2], labels, known),
            )
        assert found["clear"][0] > 0.6
        assert found["encrypted"][0] < 0.3
        assert found["encrypted"][0] <= found["encrypted"][1] < 0.6
        # Of one number a gradient is its sign, and the top turns some: still far from 0.5, and on real rows 1.
        assert found["clear"][2] > 0.99
        assert found["encrypted"][2] > 0.7
