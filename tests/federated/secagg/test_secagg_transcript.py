"""What the servers see: no value and no secret of a survivor, uniform words whatever the inputs, never both secrets of
one client. As far as a test can tell."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.secagg import VARIANTS, inputs, names, plan

from federated.secagg.local import Local
from federated.secagg.messages import Unmasking, read_as
from federated.secagg.settings import Plan
from federated.secagg.shamir import Reconstructor, ShareRefused
from federated.secagg.stages import Stage

BINS = 16
# Of 15 degrees of freedom: 60 is passed once in 3 million times.
MOST = 60.0


class Recorder:
    """A client's randomness that remembers what it gave: its secrets are the first three draws."""

    def __init__(self, seed: int) -> None:
        self._draws = np.random.default_rng(seed)
        self.given: list[bytes] = []

    def __call__(self, count: int) -> bytes:
        self.given.append(self._draws.bytes(count))
        return self.given[-1]


def recorded(
    of: Plan, given: dict[str, npt.NDArray[np.int64]], gone: dict[str, Stage], seed: int = 0
) -> tuple[Local, dict[str, Recorder]]:
    draws = {name: Recorder(seed * 1000 + number) for number, name in enumerate(given)}
    local = Local(of, given, gone, draws=draws, keep_messages=True)
    local.run()
    return local, draws


@pytest.mark.parametrize(("protocol", "malicious"), VARIANTS)
def test_no_message_holds_a_value_or_a_secret(protocol: str, malicious: bool) -> None:
    of = plan(
        protocol, malicious, clients=8, length=64, threshold=5 if protocol == "secagg" else 0, dropouts=0.1
    )
    given, gone = inputs(of), {"client-1": Stage.MASKED, "client-5": Stage.UNMASK}
    local, draws = recorded(of, given, gone)
    everything = b"\n".join(body for _, _, body in local.transcript.messages)
    for name, values in given.items():
        words = of.ring.of(values)
        encodings = [
            of.ring.pack(words), words.tobytes(), words.byteswap().tobytes(), values.tobytes(),
            values.astype(">i8").tobytes(), values.astype(np.float32).tobytes(), values.astype(np.float64).tobytes(),
        ]  # fmt: skip
        for encoding in encodings:
            for at in range(0, len(encoding) - 12, 12):
                assert encoding[at : at + 12] not in everything, name
        sealing, masking, seed = draws[name].given[:3]
        for secret in (sealing, masking, seed):
            assert secret not in everything
            assert secret[:12] not in everything
    # The search finds what is there.
    assert local.clients["client-0"]._own.masking in everything


def statistic(words: npt.NDArray[np.uint64], bits: int) -> float:
    """χ² of the lowest and of the highest four bits against the uniform distribution; the larger."""
    found = []
    for part in (words & 15, words >> np.uint64(bits - 4)):
        counts = np.bincount(part.astype(np.int64), minlength=BINS)
        expected = len(words) / BINS
        found.append(float(((counts - expected) ** 2 / expected).sum()))
    return max(found)


CASES: dict[str, Callable[[Plan], npt.NDArray[np.int64]]] = {
    "zeros": lambda of: np.zeros(of.length, np.int64),
    "ones": lambda of: np.ones(of.length, np.int64),
    "largest": lambda of: np.full(of.length, of.bound * of.max_weight),
    "smallest": lambda of: np.full(of.length, -of.bound * of.max_weight),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("protocol", ["secagg", "secagg+"])
def test_masked_words_are_uniform_whatever_the_inputs(case: str, protocol: str) -> None:
    of = plan(protocol, clients=4, length=600, threshold=2, dropouts=0.0, colluding=0.0)
    assert of.ring.bits < 32  # reduced words, too
    values = CASES[case](of)
    plain = of.ring.reduced(of.ring.of(values)).astype(np.uint64)
    assert statistic(plain, of.ring.bits) > 1000  # the test can fail
    seen, partial = [], []
    for seed in range(6):
        local, _ = recorded(of, dict.fromkeys(names(4), values), {}, seed)
        bodies = [body for _, stage, body in local.transcript.messages if stage is Stage.MASKED]
        words = [of.ring.unpack(body, of.length) for body in bodies]
        seen += words
        # Nor does adding some of them up take their masks off, even all but one.
        partial += [of.ring.reduced(sum(some)) for count in (2, 3) for some in combinations(words, count)]
    assert len(seen) == 24
    assert statistic(np.concatenate(seen).astype(np.uint64), of.ring.bits) < MOST
    assert all(statistic(part.astype(np.uint64), of.ring.bits) < MOST for part in partial)


def test_masked_words_of_two_inputs_look_alike() -> None:
    """The same statistic over both: two samples of one distribution."""
    of = plan("secagg", clients=3, length=2000, threshold=2, dropouts=0.0, colluding=0.0)
    counts = []
    for case, seed in (("zeros", 1), ("largest", 2)):
        local, _ = recorded(of, dict.fromkeys(names(3), CASES[case](of)), {}, seed)
        bodies = [body for _, stage, body in local.transcript.messages if stage is Stage.MASKED]
        words = np.concatenate([of.ring.unpack(body, of.length) for body in bodies])
        counts.append(np.bincount((words >> np.uint32(of.ring.bits - 4)).astype(np.int64), minlength=BINS))
    one, other = counts
    assert float(((one - other) ** 2 / (one + other)).sum()) < MOST


def test_a_mask_is_never_used_twice() -> None:
    """The same values under the same keys in two iterations: nothing is alike."""
    of = plan("secagg", clients=3, length=200, threshold=2, dropouts=0.0, colluding=0.0)
    given = dict.fromkeys(names(3), np.zeros(of.length, np.int64))
    bodies = []
    for seed in (1, 2):
        local, _ = recorded(of, given, {}, seed)
        bodies += [
            of.ring.unpack(b, of.length) for _, stage, b in local.transcript.messages if stage is Stage.MASKED
        ]
    for one, other in combinations(bodies, 2):
        assert np.count_nonzero(one == other) <= 2


@pytest.mark.parametrize(("protocol", "malicious"), VARIANTS)
@given(st.integers(0, 2**32 - 1))
@settings(max_examples=8, deadline=None)
def test_both_secrets_of_one_client_are_never_revealed(protocol: str, malicious: bool, seed: int) -> None:
    draws = np.random.default_rng(seed)
    clients = 6
    threshold = 4 if protocol == "secagg" else 0
    of = plan(
        protocol, malicious, clients=clients, length=3, threshold=threshold, dropouts=0.0, colluding=0.0
    )
    given = inputs(of)
    gone = {name: Stage(int(draws.integers(2, 6))) for name in given if draws.random() < 0.3}
    local, recorders = recorded(of, given, gone, seed)
    header = local.desk().header()
    if header.clients == 0 or header.stage < Stage.UNMASK:
        return
    board = local.desk()._filled(header)
    unmaskings = {
        next(e.position for e in board.entries if e.name == name): body
        for name, stage, body in local.transcript.messages
        if stage is Stage.UNMASK
    }
    survivors = set(header.members(Stage.MASKED)) if header.masked else set()
    revealed = 0
    for position in header.members(Stage.SHARE):
        name = board.entries[position].name
        _, masking, own = recorders[name].given[:3]
        shares = {
            holder: read_as(Unmasking, body).shares[board._senders(holder).index(position)]
            for holder, body in unmaskings.items()
            if position in board._senders(holder)
        }
        found = set()
        for points in combinations(sorted(shares), of.threshold):
            try:
                found.add(Reconstructor([p + 1 for p in points]).secret([shares[p] for p in points]))
            except ShareRefused:
                found.add(b"no secret")
        # Every share that came back is of the one secret that the survivors say: no set of them gives another.
        assert found <= {own if position in survivors else masking}
        revealed += len(found)
    assert revealed or not unmaskings or len(unmaskings) <= of.threshold
