"""Freshness tokens survive the trip through a client, and nothing else passes for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokens import TokenError, decode_token, encode_token, satisfied, token_of

positions = st.dictionaries(st.integers(0, 2**16 - 1), st.integers(0, 2**62), min_size=1, max_size=20)


@given(st.text(max_size=40), positions)
def test_round_trip(incarnation: str, offsets: dict[int, int]) -> None:
    token = token_of(incarnation, offsets.items())
    assert decode_token(encode_token(token)) == token
    assert satisfied(token, incarnation, offsets)


@given(st.text(max_size=60))
def test_junk_is_refused_or_harmless(text: str) -> None:
    try:
        token = decode_token(text)
    except TokenError:
        return
    assert encode_token(token) == text.rstrip("=")


def test_largest_offset_per_partition_counts() -> None:
    token = token_of("a", [(1, 5), (0, 3), (1, 2)])
    assert token.positions == ((0, 3), (1, 5))
    assert not satisfied(token, "a", {0: 3, 1: 4})
    assert not satisfied(token, "a", {1: 9})
    assert satisfied(token, "a", {0: 3, 1: 5})


def test_token_of_another_incarnation_is_never_satisfied() -> None:
    assert not satisfied(token_of("old", [(0, 3)]), "new", {0: 100})


@pytest.mark.parametrize("text", ["", "AQ", "💧", "A" * 100_000, "AgAAAAAAAAAA", "AQAAAAAAAAAA"])
def test_impossible_tokens(text: str) -> None:
    with pytest.raises(TokenError):
        decode_token(text)
