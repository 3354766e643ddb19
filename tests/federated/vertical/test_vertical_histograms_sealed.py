"""Masked sums of encrypted numbers: exact, and what their key's holder can and cannot read."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tenseal", reason="the extra `vertical` is not installed")

from tenseal import sealapi

from federated.vertical.histograms import sealed
from federated.vertical.histograms.lanes import HALF, PLAIN, SLOTS, Lanes, choose_lanes
from federated.vertical.histograms.sealed import (
    Hider,
    KeyHolder,
    SumTask,
    context,
    masked_sums,
    read_ciphertext,
    read_key,
    uniform,
)
from federated.vertical.parties import PeerFault
from tests.support.ciphertexts import transparent

Array = npt.NDArray[Any]

ROWS = 600


@pytest.fixture(scope="module")
def holder() -> KeyHolder:
    return KeyHolder()


def task(holder: KeyHolder, lanes: Lanes, values: Array, left: Array) -> SumTask:
    inputs = tuple(holder.encrypt(lanes.spread(values)))
    return SumTask(holder.public, inputs, "guest", lanes, np.packbits(left, axis=1), len(values))


def numbers(lanes: int, candidates: int) -> tuple[Array, Array]:
    generator = np.random.default_rng(8)
    return generator.integers(-(2**29), 2**29, (ROWS, lanes)), generator.random((candidates, ROWS)) < 0.3


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 64), st.integers(0, 5), st.integers(1, 900), st.integers(1, 12), st.integers(0, 2**32))
def test_lanes_carry_every_sum(count: int, doublings: int, rows: int, candidates: int, seed: int) -> None:
    """The whole way in the clear: slots multiplied and added modulo PLAIN, masked, collected."""
    lanes = Lanes(count, 2**doublings)
    generator = np.random.default_rng(seed)
    most = HALF // rows
    values = generator.integers(-most, most + 1, (rows, count))
    left = generator.random((candidates, rows)) < 0.5
    slots = lanes.spread(values)
    assert slots.shape == (lanes.inputs(rows), SLOTS)
    answers = []
    for start in range(0, candidates, lanes.copies):
        some = left[start : start + lanes.copies]
        total = sum(slots[chunk] * lanes.select(some, chunk) for chunk in range(len(slots)))
        answers.append((total + lanes.zero_sum(generator.integers(0, PLAIN, SLOTS))) % PLAIN)
    assert len(answers) == lanes.outputs(candidates)
    assert np.array_equal(lanes.collect(np.array(answers))[:candidates], left.astype(np.int64) @ values)


def test_sums_to_the_very_bound_are_exact() -> None:
    lanes = Lanes(2, 1)
    values = np.array([[HALF - 5, -HALF], [5, 0]])
    assert np.array_equal(lanes.collect(lanes.spread(values)), [[HALF, -HALF]])


def test_more_candidates_take_more_copies_and_all_rows_fit() -> None:
    few, many = choose_lanes(2, 20_000, (1,)), choose_lanes(2, 20_000, (400,))
    assert few.copies == 1
    assert 8 <= many.copies <= 32
    assert choose_lanes(40, 10, (5,)).copies * 40 <= SLOTS
    with pytest.raises(ValueError, match="copies"):
        Lanes(64, 129)


@pytest.mark.parametrize(("count", "copies", "candidates"), [(2, 1, 2), (2, 8, 9), (6, 4, 5)])
def test_the_holder_decrypts_exact_sums(holder: KeyHolder, count: int, copies: int, candidates: int) -> None:
    lanes = Lanes(count, copies)
    values, left = numbers(count, candidates)
    work = task(holder, lanes, values, left)
    answers = masked_sums(work)
    assert len(answers) == lanes.outputs(candidates)
    found = lanes.collect(holder.decrypt(answers, "host"))[:candidates]
    assert np.array_equal(found, left.astype(np.int64) @ values)
    # What is left of the noise budget, for many more inputs than these.
    assert min(holder.budget(one) for one in answers) >= 25


def test_slots_that_are_decrypted_are_uniform(holder: KeyHolder, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = Lanes(2, 4)
    values, left = numbers(2, 4)
    work = task(holder, lanes, values, left)
    slots = holder.decrypt(masked_sums(work), "host")[0]
    # 16 parts of the range, 512 slots expected in each: chi squared with 15 degrees of freedom is below 50.
    counts = np.histogram(slots, 16, (0, PLAIN))[0]
    assert ((counts - 512) ** 2 / 512).sum() < 50
    # Beside each other, masked answers to the same question have nothing in common.
    again = holder.decrypt(masked_sums(work), "host")[0]
    assert (slots == again).sum() <= 1
    # What the mask is for: without it the slots are the rows' numbers where a row goes left, and 0 elsewhere.
    monkeypatch.setattr(Lanes, "zero_sum", lambda _, drawn: np.zeros_like(drawn))
    bare = holder.decrypt(masked_sums(work), "host")[0]
    stretches = bare[: lanes.used].reshape(4, 2, lanes.width)[:, 0, :ROWS]
    assert np.array_equal(stretches != 0, left & (values[:, 0] != 0))


def second_polynomial(cipher: sealapi.Ciphertext) -> Array:
    """Its values at the first prime's roots: Python's whole numbers [SLOTS]."""
    sealapi.Evaluator(context()).transform_to_ntt_inplace(cipher)
    start, numbers = cipher.coeff_modulus_size() * SLOTS, cipher.dyn_array()
    return np.array([numbers.at(start + place) for place in range(SLOTS)], object)


def divide(blob: bytes, sent: bytes) -> Array:
    """The slots [SLOTS] of (the answer's second polynomial / the sent one), as a curious guest computes them."""
    prime = context().first_context_data().parms().coeff_modulus()[0].value()
    above, below = (second_polynomial(read_ciphertext(one, "x")) for one in (blob, sent))
    values = np.array(
        [int(a) * pow(int(b), -1, prime) % prime for a, b in zip(above, below, strict=True)], object
    )
    # Inverse negacyclic transform, values in bit-reversed order, as SEAL keeps them: minimal primitive root.
    candidate = next(
        root
        for base in range(2, 100)
        if pow(root := pow(base, (prime - 1) // (2 * SLOTS), prime), SLOTS, prime) == prime - 1
    )
    square, root, power = candidate * candidate % prime, candidate, candidate
    for _ in range(SLOTS):
        power = power * square % prime
        root = min(root, power)
    inverse = pow(root, -1, prime)
    length = 2
    while length <= SLOTS:
        step = pow(inverse, 2 * SLOTS // length, prime)
        twiddles = np.array([pow(step, place, prime) for place in range(length // 2)], object)
        pairs = values.reshape(-1, 2, length // 2)
        turned = pairs[:, 1] * twiddles % prime
        values = np.concatenate([pairs[:, 0] + turned, pairs[:, 0] - turned], axis=1).reshape(-1) % prime
        length *= 2
    scale = pow(SLOTS, -1, prime)
    coefficients = [int(one) * scale * pow(inverse, place, prime) % prime for place, one in enumerate(values)]
    lifted = [(one if one <= prime // 2 else one - prime) % PLAIN for one in coefficients]
    text = " + ".join(
        f"{one:X}x^{place}" if place else f"{one:X}"
        for place, one in reversed(list(enumerate(lifted)))
        if one
    )
    plain = sealapi.Plaintext(text)
    return np.array(sealapi.BatchEncoder(context()).decode_uint64(plain))


def test_dividing_by_what_was_sent_yields_no_rows(holder: KeyHolder, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = Lanes(2, 4)
    values, left = numbers(2, 4)
    work = task(holder, lanes, values, left)
    (answer,) = masked_sums(work)
    assert np.isin(divide(answer, work.inputs[0]), (0, 1)).sum() <= 1
    hidden = holder.budget(answer)
    # What the second term is for: without it the division gives every bit, mask or no mask.
    monkeypatch.setattr(Hider, "hide", lambda *_: None)
    (bare,) = masked_sums(work)
    assert np.array_equal(divide(bare, work.inputs[0]), lanes.select(left, 0))
    # And the errors that tell of rows are far below those that cover them: bits of the budget that it costs.
    assert holder.budget(bare) - hidden >= 40


def test_the_same_numbers_are_never_encrypted_alike(holder: KeyHolder) -> None:
    slots = Lanes(2, 1).spread(np.zeros((10, 2), np.int64))
    first, second = holder.encrypt(slots), holder.encrypt(slots)
    assert first != second
    assert (
        second_polynomial(read_ciphertext(first[0], "x"))
        == second_polynomial(read_ciphertext(second[0], "x"))
    ).sum() <= 1


def test_uniform_draws_reject_what_is_too_large() -> None:
    given: list[int] = []

    def draw(count: int) -> bytes:
        given.append(count)
        # First all too large but one; then small ones.
        return b"\xff" * (count - 5) + b"\7\0\0\0\0" if len(given) == 1 else b"\1\0\0\0\0" * (count // 5)

    assert uniform(draw, 4).tolist() == [7, 1, 1, 1]
    assert len(given) == 2


def test_what_is_no_ciphertext_is_the_senders_fault(holder: KeyHolder) -> None:
    (good,) = holder.encrypt(np.ones((1, SLOTS), np.int64))
    open_to_all = transparent(sealed.context(), read_ciphertext(good, "x"))
    for body in (b"", b"nothing", good[:-7], good + b"\0" * 600_000, holder.public, open_to_all):
        with pytest.raises(PeerFault) as caught:
            read_ciphertext(body, "guest")
        assert caught.value.peer == "guest"
    with pytest.raises(PeerFault):
        read_key(good[:1_000], "guest")
    other = KeyHolder()
    with pytest.raises(PeerFault, match="cannot be decrypted"):
        other.decrypt([good], "host")


def test_faults_cross_processes() -> None:
    """Masked sums are made in other processes, whose exceptions are pickled."""
    fault = pickle.loads(pickle.dumps(PeerFault("guest", "ciphertext", "too long")))
    assert (fault.peer, fault.rule, fault.detail) == ("guest", "ciphertext", "too long")
    assert (
        pickle.loads(pickle.dumps(SumTask(b"", (), "g", Lanes(1, 1), np.zeros((1, 1), np.uint8), 1))).draw
        is not None
    )


def test_a_candidate_without_rows_is_refused(holder: KeyHolder) -> None:
    values, left = numbers(2, 1)
    with pytest.raises(ValueError, match="any row"):
        masked_sums(task(holder, Lanes(2, 1), values, left & False))
    assert sealed.context().parameters_set()
