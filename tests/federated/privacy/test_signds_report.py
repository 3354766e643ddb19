"""SignDS reports as bytes: nothing but what was drawn fits in, and their length tells nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from federated.compression import BodyRefused
from federated.privacy.section import PrivacySection
from federated.privacy.signds import SignReports, reports_of
from federated.privacy.signds.report import decode, encode, form_of

SECTION = PrivacySection(mechanism="signds", sign_k=0.1, sign_eps=50.0)


@given(st.integers(1, 3_000), st.integers(1, 60), st.integers(0, 2**32 - 1), st.sampled_from([1, -1]))
def test_what_is_written_is_read_and_has_one_length(dimension: int, named: int, seed: int, sign: int) -> None:
    named = min(named, dimension)
    places = np.sort(np.random.default_rng(seed).choice(dimension, named, replace=False))
    form = form_of(dimension, named)
    (body,) = encode(form, np.array([sign], np.int8), places[None])
    assert len(body) == form.length
    read_sign, read = decode(form, body)
    assert (read_sign, read.tolist()) == (sign, places.tolist())


@pytest.mark.parametrize(
    ("dimension", "named"), [(1_000, 16), (66_521, 43), (66_521, 238), (10**6, 43), (10**8, 471)]
)
def test_it_takes_few_bits_more_than_any_code_must(dimension: int, named: int) -> None:
    form = form_of(dimension, named)
    least = 1 + math.log2(math.comb(dimension, named))
    assert least <= 8 * form.length <= least + 0.7 * named + 8


@given(st.binary(min_size=0, max_size=24))
def test_bytes_from_anywhere_are_refused_or_are_the_only_ones_of_a_report(body: bytes) -> None:
    form = form_of(200, 5)
    try:
        sign, places = decode(form, body)
    except BodyRefused:
        return
    assert len(places) == 5
    assert (np.diff(places) > 0).all()
    assert 0 <= places.min() <= places.max() < 200
    assert encode(form, np.array([sign], np.int8), places[None]) == [body]


def test_damaged_reports_are_refused_or_read_as_another_report() -> None:
    form = form_of(1_000, 16)
    places = np.sort(np.random.default_rng(1).choice(1_000, 16, replace=False))
    (body,) = encode(form, np.array([1], np.int8), places[None])
    refused = 0
    for bit in range(8 * len(body)):
        changed = bytearray(body)
        changed[bit // 8] ^= 128 >> bit % 8
        try:
            sign, read = decode(form, bytes(changed))
        except BodyRefused:
            refused += 1
        else:
            assert (np.diff(read) > 0).all()
            assert read[-1] < 1_000
            assert (sign, read.tolist()) != (1, places.tolist())
    assert refused >= form.unary  # one coordinate more or fewer
    for other in (body[:-1], body + b"\0", b""):
        with pytest.raises(BodyRefused, match="bytes"):
            decode(form, other)


def test_a_coordinate_beyond_the_vector_is_refused() -> None:
    wide, form = form_of(1_023, 3), form_of(1_000, 3)
    assert (wide.length, wide.low) == (form.length, form.low)
    (body,) = encode(form, np.array([1], np.int8), np.array([[5, 6, 999]]))
    assert decode(form, body)[1].tolist() == [5, 6, 999]
    beyond = encode(form, np.array([1], np.int8), np.array([[5, 6, 1_003]]))[0]
    with pytest.raises(BodyRefused, match="beyond"):
        decode(form, beyond)


def test_the_scheme_reads_what_it_writes_and_writes_reports_alone() -> None:
    scheme = reports_of(SECTION)
    dimension, dice = 2_000, [np.random.default_rng(1)] * 2
    named = scheme.plan(dimension).named
    rows = np.zeros((2, dimension), np.float32)
    rows[0, 3 : 3 + named] = 1.0
    rows[1, -named:] = -1.0
    encoded = scheme.encode_batch(rows, dice)
    assert encoded.residuals is None
    assert {len(body) for body in encoded.bodies} == {scheme.most_bytes(dimension)}
    for row, body in zip(rows, encoded.bodies, strict=True):
        assert (scheme.decode(body, dimension) == row).all()
    for place, value in ((0, 1.0), (3, 0.0), (3, 2.0), (3, -1.0), (4, np.nan)):
        other = rows.copy()
        other[0, place] = value
        with pytest.raises(ValueError, match="report"):
            scheme.encode_batch(other, dice)


def test_servers_and_devices_of_other_options_do_not_share_a_mark() -> None:
    assert reports_of(SECTION) == reports_of(SECTION)
    marks = {SignReports((), False, False, 0.1, epsilon).mark for epsilon in (1.0, 2.0, 4.0, 8.0, 16.0)}
    assert len(marks) > 3
    assert not reports_of(SECTION).shared_support
