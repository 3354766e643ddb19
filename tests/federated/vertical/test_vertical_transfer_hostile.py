"""What a curious or a hostile party of a transfer can do with what it is sent, and what it can send."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tenseal", reason="the extra `vertical` is not installed")

from tenseal import sealapi

from federated.vertical.ckks import FLOOR, SHALLOW, Opener, Scheme, Sealer, stored
from federated.vertical.kinds import Setup
from federated.vertical.parties import PeerFault, Sent, run_local
from federated.vertical.pipeline import check_roles
from federated.vertical.tables import Table
from federated.vertical.transfer import roles
from federated.vertical.transfer.curve import latent_tables
from federated.vertical.transfer.kind import KIND
from federated.vertical.transfer.leakage import watched
from federated.vertical.transfer.model import HostModel, load
from federated.vertical.transfer.options import TransferOptions
from federated.vertical.transfer.residues import Residues
from federated.vertical.transfer.sealed import FLAT, TERM_SCALE, WEIGHT_SCALE, Owner, Plan, Weigher
from federated.vertical.wire import Blobs, pack, unpack
from models.metrics import auc

# As many copies as outputs: each output is one product, without a rotation.
ROWS, FEATURES, WIDTH = 12, 2, 4
OPTIONS = TransferOptions(hidden=WIDTH, steps=3, every=1)


def of_cipher(cipher: sealapi.Ciphertext, polynomial: int) -> np.ndarray:
    """Its numbers [FLOOR, N]."""
    data, count = cipher.dyn_array(), FLOOR * FLAT.degree
    first = polynomial * count
    return np.array([data.at(first + at) for at in range(count)], np.uint64).reshape(FLOOR, -1)


class Pair:
    """An owner and a weigher with its weights."""

    def __init__(
        self, options: TransferOptions = OPTIONS, rows: int = ROWS, features: int = FEATURES
    ) -> None:
        self.plan, rng = Plan(options, rows, features), np.random.default_rng(1)
        self.owner = Owner(self.plan, "weigher", rng.bytes)
        self.weigher = Weigher(self.plan, self.owner.keys(), "owner", rng.bytes)
        self.matrix = np.tanh(rng.standard_normal((rows + options.hidden, options.hidden)))
        self.weights = rng.standard_normal((features + 1, *self.matrix.shape))

    def masked(self, matrix: bytes) -> sealapi.Ciphertext:
        body, _ = self.weigher.hidden(matrix, self.weights)
        (term,) = unpack(body, "weigher", {"terms": Blobs(1, FLAT.most_bytes(FLOOR))})["terms"]
        return self.plan.scheme.read(term, "weigher", FLOOR, TERM_SCALE)

    def first(self, matrix: bytes) -> sealapi.Ciphertext:
        (chunk,) = unpack(matrix, "owner", {"matrix": Blobs(1, FLAT.most_bytes(FLOOR))})["matrix"]
        return self.plan.scheme.read(chunk, "owner", FLOOR, FLAT.scale)


class TestCurious:
    def test_division_gives_no_weights(self) -> None:
        """The key holder divides the second polynomial by the one that it sent. Without the fresh encryption of zero it
        reads all weights; with it, nothing."""
        pair = Pair()
        scheme, layout = pair.plan.scheme, pair.plan.layout
        assert layout.turns == 1
        matrix = pair.owner.sealed(pair.matrix)
        sent = pair.first(matrix)
        ((_, _, slots),) = layout.diagonals(pair.weights, 0, 0)
        bare = scheme.weighted(sent, scheme.encode(slots, FLOOR, WEIGHT_SCALE))
        assert self.divided(pair, bare, sent) == pytest.approx(slots, abs=1e-3)
        found = self.divided(pair, pair.masked(matrix), sent)
        # Uniform numbers decode to far more than any weight, none of them near the truth.
        assert np.median(np.abs(found)) > 2.0**60
        assert abs(np.corrcoef(found, slots)[0, 1]) < 0.06

    @staticmethod
    def divided(pair: Pair, returned: sealapi.Ciphertext, sent: sealapi.Ciphertext) -> np.ndarray:
        residues = pair.plan.residues
        above, below = of_cipher(returned, 1), of_cipher(sent, 1)
        quotient = np.array(
            [
                [
                    int(one) * pow(int(other), -1, int(prime)) % int(prime)
                    for one, other in zip(*row, strict=True)
                ]
                for prime, *row in zip(residues.primes[:, 0], above, below, strict=True)
            ],
            np.uint64,
        )
        return pair.plan.scheme.decode(residues.plain(quotient, WEIGHT_SCALE))

    def test_a_huge_matrix_tells_no_more(self) -> None:
        """A mask that only covered honest values would stand aside for larger ones."""
        pair = Pair()
        for size in (1.0, 2.0**50):
            cipher = pair.masked(pair.owner.sealed(pair.matrix * size))
            numbers = pair.plan.residues.of(
                pair.owner.opener.plain(cipher)
            ) / pair.plan.residues.primes.astype(float)
            counts, _ = np.histogram(numbers, 16, (0.0, 1.0))
            # Chi squared with 15 degrees of freedom is above 45 once in 10,000 runs.
            assert ((counts - numbers.size / 16) ** 2 / (numbers.size / 16)).sum() < 45

    def test_sums_come_back_with_the_noise_and_little_else(self) -> None:
        """The noise is as wide as it says; the encryption's own error, which would tell of the key, drowns in it."""
        errors = {}
        # The second is nearly nothing: what is left then is the error of the encryption.
        for noise in (1e-2, 1e-7):
            pair = Pair(replace(OPTIONS, noise=noise, hidden=16), rows=40, features=15)
            body, mask = pair.weigher.hidden(pair.owner.sealed(pair.matrix), pair.weights)
            found = pair.weigher.sums(pair.owner.answer(body), mask)
            errors[noise] = (found - (pair.weights * pair.matrix).sum(axis=1)).std() / 40
            assert pair.plan.flooding > 1
        assert errors[1e-2] == pytest.approx(1e-2, rel=0.25)
        assert errors[1e-7] < 2e-7
        with pytest.raises(ValueError, match="below the error of the encryption"):
            Plan(replace(OPTIONS, noise=1e-9), ROWS, FEATURES)


def shallow(change: Callable[[Scheme, Sealer], sealapi.Ciphertext]) -> bytes:
    scheme = Scheme(SHALLOW)
    return stored(change(scheme, Sealer(scheme, Opener(scheme).public())))


class TestCiphertexts:
    """What stands in the place of an owner's matrix."""

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            ("other parameters", ": ciphertext: "),
            ("other scale", "a scale of"),
            ("other level", "at level 1"),
            ("transparent", "not encrypted"),
            ("cut short", ": ciphertext: "),
            ("key in its place", ": malformed: "),
        ],
    )
    def test_no_ciphertext_of_the_job(self, change: str, told: str) -> None:
        pair = Pair()
        scheme, slots = pair.plan.scheme, np.ones(FLAT.slots)
        good = stored(pair.owner.opener.seal(slots, FLOOR, FLAT.scale))
        if change == "other parameters":
            body = shallow(lambda other, sealer: sealer.seal(np.ones(SHALLOW.slots), FLOOR, FLAT.scale))
        elif change == "other scale":
            body = stored(pair.owner.opener.seal(slots, FLOOR, TERM_SCALE))
        elif change == "other level":
            body = stored(pair.owner.opener.seal(slots, FLOOR - 1, FLAT.scale))
        elif change == "transparent":
            body = transparent(scheme, pair.owner.opener.seal(slots, FLOOR, FLAT.scale))
        elif change == "cut short":
            body = good[: len(good) // 2]
        else:
            body = stored(pair.owner.opener.public())
        with pytest.raises(PeerFault, match=f"owner.*{told}"):
            pair.weigher.hidden(pack({"matrix": [body]}), pair.weights)

    def test_a_key_for_a_rotation_is_missing_or_another_schemes(self) -> None:
        pair = Pair(rows=200, features=20)
        steps = pair.plan.layout.steps()
        public = stored(pair.owner.opener.public())
        other = Scheme(SHALLOW)
        for rotations, told in (
            (stored(pair.owner.opener.rotations(steps[:-1])), "no key for a rotation"),
            (stored(Opener(other).rotations(steps[:1])), "ciphertext"),
            (b"", "ciphertext"),
        ):
            body = pack({"public": public, "rotations": rotations})
            with pytest.raises(PeerFault, match=f"owner: .*{told}"):
                Weigher(pair.plan, body, "owner", np.random.default_rng(0).bytes)


def transparent(scheme: Scheme, cipher: sealapi.Ciphertext) -> bytes:
    """``cipher`` with a second polynomial of zeros, as SEAL stores it without compression."""
    residues = Residues(scheme, 1)
    numbers = np.concatenate([of_cipher(cipher, 0).reshape(-1), np.zeros(FLOOR * FLAT.degree, np.uint64)])
    head = np.array([*scheme.id_of(FLOOR)], np.uint64).tobytes() + bytes([1])
    sizes = np.array([2, FLAT.degree, FLOOR], np.uint64).tobytes()
    data = np.array([numbers.size], np.uint64).tobytes() + numbers.tobytes()
    tail = np.array([cipher.scale]).tobytes() + np.array([1], np.uint64).tobytes()
    return residues._framed(head + sizes + tail + residues._framed(data))


def setups(
    labels: np.ndarray | None = None, rows: int = 30, constant: bool = False, hosts: int = 1
) -> dict[str, Setup]:
    rng = np.random.default_rng(0)
    latent = rng.standard_normal((rows, 3))
    parties = {"guest": "guest"} | {f"host{place}" if hosts > 1 else "host": "host" for place in range(hosts)}
    marks = (latent.sum(axis=1) > 0).astype(np.float64) if labels is None else labels
    found = {}
    for name in parties:
        features = latent @ rng.standard_normal((3, 3))
        if constant:
            features[:, 1] = 7.0
        table = Table(
            tuple(str(row) for row in range(rows)),
            features,
            ("a", "b", "c"),
            marks if name == "guest" else None,
        )
        found[name] = Setup(name, parties, table, 0, rows)
    return found


def run(given: dict[str, Setup], options: TransferOptions = OPTIONS, **more: Any) -> Any:
    made = {
        name: (roles.guest if name == "guest" else roles.host)(options, one, None)
        for name, one in given.items()
    }
    return run_local(made, **more)


class TestSums:
    """The limit of the promise, as stated: sums of the same rows, step after step."""

    def test_a_host_solves_its_sums_for_labels_and_for_phi(self) -> None:
        options, rows = TransferOptions(), 98
        guest_table, host_table = latent_tables(3_000, 1)
        common, rest = np.arange(rows), np.arange(rows, 2_000)
        parties = {"guest": "guest", "host": "host"}
        given = Setup("guest", parties, guest_table.take(common), 0, rows, rest=guest_table.take(rest))
        _, guest = roles.guest_side(options, given, 2)
        scaling, host = roles.host_side(options, Setup("host", parties, host_table.take(common), 0, rows), 3)
        guessed = watched(guest, host, np.random.default_rng(4))
        assert guest_table.labels is not None
        labels = guest_table.labels
        # Who knew all causes of a label could guess it with .84.
        assert sided(labels[common], guessed.labels) > 0.92
        # Customers that nobody asked the guest about.
        vectors = HostModel(scaling, host.weights).partial(host_table.features[2_000:])
        joint = sided(labels[2_000:], vectors @ guest.phi())
        assert sided(labels[2_000:], vectors @ guessed.phi) > joint - 0.03 > 0.7
        truth = host.vectors()
        apart = [np.corrcoef(truth[:, column], guessed.guest[:, column])[0, 1] for column in range(8)]
        assert 0.3 < np.mean(apart) < 0.9


def sided(labels: np.ndarray, scores: np.ndarray) -> float:
    """AUC of scores whose sign is not known."""
    found = auc(labels, scores)
    return max(found, 1 - found)


class TestOlderMessages:
    """Of an earlier step, in the place of today's; the network's own numbers refuse them, this is what is left."""

    @pytest.mark.parametrize("kind", ["masked", "sums"])
    def test_answers_to_other_masks_are_noticed(self, kind: str) -> None:
        with pytest.raises(PeerFault, match="gradient: too large"):
            run(setups(), twist=replayed(kind))

    def test_an_older_matrix_only_spoils(self) -> None:
        figures = run(setups(), twist=replayed("matrix")).results["guest"].figures
        assert figures["steps"] == OPTIONS.steps


def replayed(kind: str) -> Callable[[Sent], Iterable[tuple[str, bytes]]]:
    kept: list[bytes] = []

    def twist(sent: Sent) -> Iterable[tuple[str, bytes]]:
        assert sent.body is not None
        if sent.kind == kind and sent.sender == "host":
            kept.append(sent.body)
            return [(kind, kept[0])]
        return [(sent.kind, sent.body)]

    return twist


class TestTables:
    @pytest.mark.parametrize("rows", [0, 1, 4])
    def test_few_common_rows_are_refused(self, rows: int) -> None:
        with pytest.raises(ValueError, match=f"{rows} common rows with 3 features"):
            roles.own_table(setups(rows=rows)["host"])

    def test_labels_of_one_class_are_refused(self) -> None:
        with pytest.raises(ValueError, match="of two values"):
            roles.own_table(setups(labels=np.ones(30))["guest"])

    def test_constant_columns_have_no_weight_in_an_answer(self) -> None:
        given = setups(constant=True)
        result = run(given).results["host"]
        part = load(result.model)
        assert isinstance(part, HostModel)
        table = given["host"].table
        assert table is not None
        other = table.features.copy()
        other[:, 1] = 1e300
        assert part.partial(other) == pytest.approx(part.partial(table.features))

    def test_two_hosts_are_refused_by_name(self) -> None:
        with pytest.raises(ValueError, match="transfer takes 1 as host, there are 2"):
            check_roles(KIND, setups(hosts=2)["guest"])
