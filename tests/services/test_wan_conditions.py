"""Conditions of links: what the text says, that it reads back, and what is refused with what is allowed."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.wan.conditions import (
    LEAST_QUEUE_BYTES,
    MAX_DELAY_S,
    MAX_QUEUE_BYTES,
    MAX_RATE_BITS_S,
    MIN_DELAY_S,
    MIN_QUEUE_BYTES,
    MIN_RATE_BITS_S,
    UNLIMITED_QUEUE_BYTES,
    LinkConditions,
    parse_conditions,
    parse_named,
)

CONDITIONS = st.builds(
    LinkConditions,
    delay_s=st.just(0.0) | st.floats(MIN_DELAY_S, MAX_DELAY_S),
    jitter_s=st.just(0.0) | st.floats(MIN_DELAY_S, MAX_DELAY_S),
    rate_bits_s=st.just(0.0) | st.floats(MIN_RATE_BITS_S, MAX_RATE_BITS_S),
    queue_bytes=st.just(0) | st.integers(MIN_QUEUE_BYTES, MAX_QUEUE_BYTES),
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", LinkConditions()),
        ("delay=80ms,rate=100mbit,jitter=5ms", LinkConditions(0.08, 0.005, 100e6)),
        (" rate = 2.5gbit , queue = 1MiB ", LinkConditions(rate_bits_s=2.5e9, queue_bytes=2**20)),
        ("delay=1.5s", LinkConditions(1.5)),
        ("rate=64kbit,delay=0,queue=0", LinkConditions(rate_bits_s=64_000)),
    ],
)
def test_what_the_text_says(text: str, expected: LinkConditions) -> None:
    assert parse_conditions(text) == expected


def test_the_name_before_it() -> None:
    assert parse_named("eu:delay=80ms") == ("eu", LinkConditions(0.08))
    assert parse_named("us-1:") == ("us-1", LinkConditions())


@given(CONDITIONS)
def test_the_text_reads_back_exactly(conditions: LinkConditions) -> None:
    assert parse_conditions(str(conditions)) == conditions


def test_the_text_is_one_that_people_write() -> None:
    assert str(LinkConditions(0.08, 0.005, 100e6)) == "delay=80ms,jitter=5ms,rate=100mbit"
    assert str(LinkConditions(2.0, queue_bytes=2**20)) == "delay=2s,queue=1MiB"
    assert str(LinkConditions()) == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dely=80ms", "'dely' is not a condition of a link: delay, jitter, rate, queue"),
        ("delay", "KEY=VALUE"),
        ("delay=80ms,,rate=1mbit", "KEY=VALUE"),
        ("delay=80", "ms, s"),
        ("delay=-1ms", "ms, s"),
        ("delay=nan", "ms, s"),
        ("delay=80MS", "ms, s"),
        ("rate=100mb", "kbit, mbit, gbit"),
        ("queue=1megabyte", "KiB, MiB, GiB"),
        ("delay=1ms,delay=2ms", "twice"),
        ("delay=61s", "between 1e-06 and 60 s"),
        ("rate=0.5kbit", "between 1000 and"),
        ("queue=1KiB", "between 4096 and"),
        ("rate=" + "9" * 400 + "gbit", "kbit, mbit, gbit"),
    ],
)
def test_refusals_say_what_is_allowed(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_conditions(text)


@pytest.mark.parametrize("text", ["delay=80ms", ":delay=80ms", "E U:delay=80ms", "x" * 33 + ":"])
def test_a_name_is_needed_where_one_is_asked_for(text: str) -> None:
    with pytest.raises(ValueError, match="NAME:CONDITIONS"):
        parse_named(text)


@pytest.mark.parametrize("delay_s", [float("nan"), float("inf"), -0.001])
def test_no_link_has_such_a_delay(delay_s: float) -> None:
    with pytest.raises(ValueError, match="delay"):
        LinkConditions(delay_s)


class TestBounds:
    def test_twice_the_bandwidth_delay_product(self) -> None:
        assert parse_conditions("delay=80ms,rate=100mbit").bound_bytes == 2 * 1_000_000
        assert parse_conditions("delay=40ms,jitter=40ms,rate=100mbit").bound_bytes == 2 * 1_000_000

    def test_at_least_256_kib(self) -> None:
        assert parse_conditions("delay=1ms,rate=1mbit").bound_bytes == LEAST_QUEUE_BYTES
        assert parse_conditions("").bound_bytes == LEAST_QUEUE_BYTES

    def test_a_delay_alone_has_a_bound_too(self) -> None:
        assert parse_conditions("delay=80ms").bound_bytes == UNLIMITED_QUEUE_BYTES

    def test_as_told(self) -> None:
        assert parse_conditions("delay=80ms,rate=100mbit,queue=64KiB").bound_bytes == 64 * 1_024

    @given(CONDITIONS)
    def test_what_is_taken_in_at_once_fits(self, conditions: LinkConditions) -> None:
        assert 1 <= conditions.quantum_bytes <= conditions.bound_bytes <= MAX_QUEUE_BYTES
        assert conditions.quantum_bytes <= 64 * 1_024
        assert conditions.headroom_bytes + conditions.quantum_bytes == conditions.bound_bytes
