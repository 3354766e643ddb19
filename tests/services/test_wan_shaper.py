"""When bytes leave a link: against a byte-wise reference, and by what must hold for any link and traffic."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.wan.conditions import LinkConditions, parse_conditions
from services.wan.shaper import MAX_UNREAD_BYTES, End, Flow, Shaper

DELAYS = st.just(0.0) | st.floats(1e-6, 0.5)
RATES = st.just(0.0) | st.floats(8_000.0, 1e9)
CONDITIONS = st.builds(LinkConditions, delay_s=DELAYS, jitter_s=DELAYS, rate_bits_s=RATES)
STEPS = st.lists(st.tuples(st.floats(0.0, 0.2), st.integers(0, 2), st.integers(1, 5_000)), max_size=60)
"""Seconds since the step before, whose turn, and how many bytes."""


@dataclass
class Traffic:
    """A link and what was sent through it: for each connection (sent at, left at, due at, bytes)."""

    shaper: Shaper
    flows: list[Flow] = field(default_factory=list)
    sent: list[list[tuple[float, float, float, bytes]]] = field(default_factory=list)
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.flows = [self.shaper.open() for _ in range(3)]
        self.sent = [[] for _ in self.flows]

    def send(self, steps: list[tuple[float, int, int]]) -> None:
        for number, (pause_s, who, size) in enumerate(steps):
            self.now_s += pause_s
            load = bytes([number % 256]) * size
            due_s = self.flows[who].send(load, self.now_s)
            self.sent[who].append((self.now_s, self.flows[who].parcels[-1].sent_s, due_s, load))

    def every(self) -> list[tuple[float, float, float, bytes]]:
        return [one for of in self.sent for one in of]


def sent_by_the_byte(rate_bits_s: float, now_s: float, free_s: float, size: int) -> float:
    """The slow reference: each byte occupies the transmitter for its own time."""
    free_s = max(free_s, now_s)
    for _ in range(size):
        free_s += 8 / rate_bits_s
    return free_s


@given(st.floats(8_000.0, 1e7), st.lists(st.tuples(st.floats(0.0, 0.1), st.integers(1, 300)), max_size=20))
def test_the_transmitter_is_busy_as_byte_by_byte(rate: float, steps: list[tuple[float, int]]) -> None:
    shaper = Shaper(LinkConditions(rate_bits_s=rate))
    flow, now_s, free_s = shaper.open(), 0.0, 0.0
    for pause_s, size in steps:
        now_s += pause_s
        free_s = sent_by_the_byte(rate, now_s, free_s, size)
        assert flow.send(bytes(size), now_s) == pytest.approx(free_s, rel=1e-9)


@given(CONDITIONS, STEPS, st.integers(0, 5))
def test_never_before_the_delay_nor_after_the_jitter(
    conditions: LinkConditions, steps: list[tuple[float, int, int]], seed: int
) -> None:
    traffic = Traffic(Shaper(conditions, seed))
    traffic.send(steps)
    for now_s, left_s, due_s, _ in traffic.every():
        assert left_s >= now_s
        assert due_s >= left_s + conditions.delay_s
        assert due_s <= left_s + conditions.delay_s + conditions.jitter_s
        assert due_s >= now_s + conditions.delay_s


@given(CONDITIONS, STEPS, st.lists(st.floats(0.0, 0.3), max_size=30))
def test_all_bytes_come_out_in_order_and_when_they_are_due(
    conditions: LinkConditions, steps: list[tuple[float, int, int]], looks: list[float]
) -> None:
    traffic = Traffic(Shaper(conditions))
    traffic.send(steps)
    came: list[list[bytes | End]] = [[] for _ in traffic.flows]
    now_s = 0.0
    for pause_s in [*looks, 1e9]:
        now_s += pause_s
        for flow, got, sent in zip(traffic.flows, came, traffic.sent, strict=True):
            got += flow.take(now_s)
            assert got == [load for *_, due_s, load in sent if due_s <= now_s]
            assert flow.next_release_s is None or flow.next_release_s > now_s
    assert traffic.shaper.under_way == 0
    assert traffic.shaper.unread == traffic.shaper.released_total == sum(len(o[-1]) for o in traffic.every())


@given(CONDITIONS, STEPS)
def test_no_more_passes_than_the_rate_allows(
    conditions: LinkConditions, steps: list[tuple[float, int, int]]
) -> None:
    traffic = Traffic(Shaper(conditions))
    traffic.send(steps)
    if not conditions.rate_bits_s:
        assert all(left_s == now_s for now_s, left_s, *_ in traffic.every())
        return
    leaving = sorted((left_s, len(load)) for _, left_s, _, load in traffic.every())
    for first in range(len(leaving)):
        passed = 0
        for left_s, size in leaving[first + 1 :]:
            passed += size
            allowed = (left_s - leaving[first][0]) * conditions.rate_bits_s / 8
            assert passed <= allowed * (1 + 1e-9) + 1e-6


@pytest.mark.parametrize("flows", [1, 3])
@pytest.mark.parametrize(
    "text", ["rate=1mbit", "rate=100mbit,delay=80ms,jitter=5ms", "rate=2gbit,delay=20ms"]
)
def test_the_long_run_rate_by_senders_that_obey_the_bound(text: str, flows: int) -> None:
    conditions = parse_conditions(text)
    shaper = Shaper(conditions)
    senders = [shaper.open() for _ in range(flows)]
    total, sent, taken, now_s, most = 4 * conditions.bound_bytes, 0, 0, 0.0, 0
    while taken < total:
        for flow in senders:
            while not shaper.full and not flow.congested and sent < total:
                sent += conditions.quantum_bytes
                flow.send(bytes(conditions.quantum_bytes), now_s)
                most = max(most, shaper.under_way)
        now_s = min(due for flow in senders if (due := flow.next_release_s) is not None)
        for flow in senders:
            for load in flow.take(now_s):
                assert isinstance(load, bytes)
                flow.read(len(load))
                taken += len(load)
    assert most <= conditions.bound_bytes
    expected_s = 8 * taken / conditions.rate_bits_s
    assert now_s - conditions.delay_s - conditions.jitter_s <= expected_s * 1.02
    assert now_s >= expected_s * 0.98


def test_jitter_is_used_and_repeats_by_its_seed() -> None:
    def delays(seed: int) -> list[float]:
        flow = Shaper(LinkConditions(0.1, 0.05), seed).open()
        return [flow.send(b"x", now_s) - now_s for now_s in map(float, range(200))]

    assert delays(1) == delays(1)
    assert delays(1) != delays(2)
    drawn = delays(1)
    assert min(drawn) < 0.11
    assert max(drawn) > 0.14
    assert 0.12 < sum(drawn) / len(drawn) < 0.13


def test_connections_draw_their_own() -> None:
    shaper = Shaper(LinkConditions(0.0, 0.05))
    assert shaper.open().send(b"x", 0.0) != shaper.open().send(b"x", 0.0)


def test_an_end_stays_behind_the_bytes() -> None:
    flow = Shaper(parse_conditions("rate=8kbit,delay=10ms,jitter=10ms")).open()
    flow.send(bytes(1_000), 0.0)
    flow.send(End.EOF, 0.0)
    assert list(flow.take(0.999)) == []
    assert list(flow.take(2.0)) == [bytes(1_000), End.EOF]


class TestBounds:
    def test_full_by_all_together(self) -> None:
        shaper = Shaper(parse_conditions("delay=1s,queue=4KiB"))
        a, b = shaper.open(), shaper.open()
        assert not shaper.full
        a.send(bytes(2_048), 0.0)
        b.send(bytes(2_048), 0.0)
        assert shaper.full
        assert not a.congested
        list(a.take(1.0))
        list(b.take(1.0))
        assert not shaper.full

    def test_one_that_is_not_read_holds_up_itself_alone(self) -> None:
        shaper = Shaper(parse_conditions("delay=1s,queue=4KiB"))
        slow, other = shaper.open(), shaper.open()
        slow.send(bytes(4_096), 0.0)
        list(slow.take(1.0))
        assert slow.congested
        assert not shaper.full
        assert not other.congested
        slow.read(4_096)
        assert not slow.congested
        assert shaper.unread == 0

    def test_all_unread_together_are_bounded(self) -> None:
        shaper = Shaper(LinkConditions(queue_bytes=2**28))
        flow = shaper.open()
        flow.send(bytes(MAX_UNREAD_BYTES // 2 + 1), 0.0)
        list(flow.take(0.0))
        assert not shaper.full
        flow.send(bytes(MAX_UNREAD_BYTES // 2), 0.0)
        list(flow.take(0.0))
        assert shaper.full
        flow.close()
        assert not shaper.full

    def test_a_closed_one_takes_its_bytes_along(self) -> None:
        shaper = Shaper(parse_conditions("delay=1s"))
        flow, other = shaper.open(), shaper.open()
        other.send(b"stays", 0.0)
        flow.send(b"goes", 0.0)
        list(flow.take(1.0))
        flow.send(b"goes too", 1.0)
        flow.close()
        assert (shaper.under_way, shaper.unread) == (5, 0)


class TestChange:
    @given(CONDITIONS, CONDITIONS, STEPS, STEPS)
    def test_nothing_is_lost_reordered_or_early(
        self,
        before: LinkConditions,
        after: LinkConditions,
        first: list[tuple[float, int, int]],
        then: list[tuple[float, int, int]],
    ) -> None:
        traffic = Traffic(Shaper(before))
        traffic.send(first)
        changed_s = traffic.now_s
        in_transit = {
            id(parcel): parcel.release_s
            for flow in traffic.flows
            for parcel in flow.parcels
            if parcel.sent_s <= changed_s
        }
        traffic.shaper.change(after, changed_s)
        traffic.send(then)
        for flow, sent in zip(traffic.flows, traffic.sent, strict=True):
            dues = [parcel.release_s for parcel in flow.parcels]
            assert dues == sorted(dues)
            for parcel in flow.parcels:
                if id(parcel) in in_transit:
                    assert parcel.release_s == in_transit[id(parcel)]
                else:
                    assert parcel.sent_s >= changed_s
                    assert parcel.release_s >= parcel.sent_s + after.delay_s
            assert list(flow.take(math.inf)) == [load for *_, load in sent]

    def test_what_waits_leaves_at_the_new_rate(self) -> None:
        shaper = Shaper(parse_conditions("rate=8kbit"))
        flow = shaper.open()
        for _ in range(10):
            flow.send(bytes(1_000), 0.0)
        assert flow.last_release_s == 10.0
        # Half of the second thousand has left by then.
        shaper.change(parse_conditions("rate=80kbit"), 1.5)
        expected = [1.0, *(1.55 + 0.1 * number for number in range(9))]
        assert [parcel.release_s for parcel in flow.parcels] == pytest.approx(expected)
        assert flow.send(bytes(1_000), 1.5) == pytest.approx(2.45)

    def test_a_limit_that_ends_lets_all_of_it_go(self) -> None:
        shaper = Shaper(parse_conditions("rate=8kbit,delay=1s"))
        flow = shaper.open()
        flow.send(bytes(5_000), 0.0)
        flow.send(End.EOF, 0.0)
        shaper.change(LinkConditions(), 1.0)
        assert list(flow.take(1.0)) == [bytes(5_000), End.EOF]

    def test_a_shorter_way_does_not_overtake(self) -> None:
        shaper = Shaper(parse_conditions("delay=1s"))
        flow = shaper.open()
        flow.send(b"first", 0.0)
        shaper.change(LinkConditions(), 0.5)
        assert flow.send(b"second", 0.5) == 1.0
