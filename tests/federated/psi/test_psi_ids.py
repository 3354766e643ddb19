"""The stated rule for ids, and what is said of rows that are none."""

from __future__ import annotations

import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federated.psi.ids import MOST_ID_BYTES, IdRefused, IdRule, IdsRefused, floats, normalise

KEEP, FOLD = IdRule(), IdRule("fold")


@pytest.mark.parametrize(
    ("text", "kept", "folded"),
    [
        (" anna@example.org\n", b"anna@example.org", b"anna@example.org"),
        ("Anna", b"Anna", b"anna"),
        ("cafe\u0301", "caf\u00e9".encode(), "caf\u00e9".encode()),
        ("\u00a0Stra\u00dfe\u3000", "Stra\u00dfe".encode(), b"strasse"),
        ("\u01f0", "\u01f0".encode(), "\u01f0".encode()),
        (" \t ", b"", b""),
        ("007", b"007", b"007"),
    ],
)
def test_rule(text: str, kept: bytes, folded: bytes) -> None:
    assert KEEP.apply(text) == kept
    assert FOLD.apply(text) == folded


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20))
@settings(max_examples=100)
def test_rule_is_idempotent_and_blind_to_the_form_of_unicode(text: str) -> None:
    for rule in (KEEP, FOLD):
        once = rule.apply(text)
        assert rule.apply(once.decode()) == once
        assert rule.apply(unicodedata.normalize("NFD", text)) == once


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a\0b", "control"),
        ("a\nb", "control"),
        ("\ud800", "surrogate"),
        ("x" * (MOST_ID_BYTES + 1), "257 bytes"),
        ("é" * (MOST_ID_BYTES // 2 + 1), "258 bytes"),
    ],
)
def test_what_is_no_id(text: str, why: str) -> None:
    with pytest.raises(IdRefused, match=why):
        KEEP.apply(text)


def test_empty_and_repeated_rows_are_named() -> None:
    found = normalise(["b", "", " a ", "a", "b ", "  ", "c"], KEEP)
    assert found.values == [b"b", b"a", b"c"]
    np.testing.assert_array_equal(found.rows, [0, 2, 6])
    assert found.empty.count == 2
    assert found.repeated.count == 2
    assert "row 2 ('')" in found.complaint
    assert "row 4 ('a')" in found.complaint


def test_numbers_that_a_spreadsheet_wrote_are_named() -> None:
    fine = ["7", "7.5", "a7.0", "1e5", "1.0.0", "7.00", ".0", "1E5+10"]
    found = floats(normalise([*fine, "70.0", "", "4.47E+11", "1e+05", "70.0"], KEEP))
    assert found.examples == ((8, "70.0"), (10, "4.47E+11"), (11, "1e+05"))
    assert found.count == 3


def test_many_examples_are_few() -> None:
    found = normalise(["same"] * 1_000, KEEP)
    assert found.repeated.count == 999
    assert len(found.repeated.examples) == 5


def test_refused_rows_end_it_with_examples() -> None:
    with pytest.raises(IdsRefused, match=r"2 \(such as row 2 .*row 3"):
        normalise(["a", "b\0", "c\x07"], KEEP)


def test_cases_that_are_none() -> None:
    with pytest.raises(ValueError, match="keep or fold"):
        IdRule("upper")  # type: ignore[arg-type]
