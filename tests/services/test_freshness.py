"""What a measurement rests on: when a watermark covered a position, whose probe it was, and what that comes to."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.samples import Watermark
from services.freshness.book import HOME, Book, Sent
from services.freshness.measure import Measured, Plan
from services.freshness.picture import draw
from services.freshness.reached import Reached
from services.freshness.report import report, table
from services.freshness.stages import STAGES
from services.freshness.stamps import (
    Marked,
    Stamp,
    Stamper,
    StampFormatError,
    decode_stamp,
    encode_stamp,
)
from services.freshness.statistics import quantiles
from services.freshness.tracker import Probe, Tracker
from services.freshness.updates import LOG as UPDATES
from services.freshness.updates import UpdateWriter, update_stamp
from services.messagelog.contract import LogUnavailable, Message
from services.parameter_server.types import Applied, Keys, ParameterError, PushReply, Rows
from services.tokens import Token, decode_token, log_fingerprint, token_of
from sync.pushes import PushTable, Source
from sync.pushes import Watermark as Mark

LOG = "events-1"
NAMED = log_fingerprint(LOG)


# --- when a watermark covered a position ---


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(0, 31))
def test_a_position_was_reached_by_the_first_move_that_covers_it(offsets: list[int], asked: int) -> None:
    reached = Reached()
    for at, offset in enumerate(offsets):
        reached.move(offset, float(at))
    first = next((float(at) for at, offset in enumerate(offsets) if offset >= asked), None)
    assert reached.when(asked, 0.0) == first
    assert reached.offset == max(offsets, default=-1)


def test_what_was_accepted_before_watching_began_has_no_time() -> None:
    reached = Reached(since_ms=100.0)
    reached.move(5, 150.0)
    assert reached.when(5, 99.0) is None
    assert reached.when(5, 100.0) == 150.0


def test_moves_are_bounded_and_what_was_forgotten_is_not_guessed() -> None:
    reached = Reached(most=10)
    for offset in range(100):
        reached.move(offset, 10.0 * offset)
    assert reached.when(99, 980.0) == 990.0
    assert reached.when(3, 25.0) is None, "a forgotten move covered it, at a time that is not known any more"


# --- statistics ---


def test_quantiles_are_those_of_numpy_and_none_where_there_is_nothing() -> None:
    samples = np.random.default_rng(1).lognormal(3, 1, 501)
    found = quantiles(samples.tolist())
    assert found is not None
    assert found.n == 501
    assert found.p99_ms == pytest.approx(float(np.percentile(samples, 99)), abs=1e-3)
    assert found.p50_ms < found.p95_ms < found.p99_ms < found.max_ms == round(samples.max(), 3)
    assert quantiles([]) is None


# --- stamps ---

stamp_values = st.builds(
    Stamp,
    stage=st.sampled_from(STAGES),
    kind=st.sampled_from(["event", "update"]),
    log=st.text(max_size=10),
    partition=st.integers(0, 100),
    offset=st.integers(0, 2**62),
    at_ms=st.floats(0, 1e13),
    probes=st.lists(
        st.builds(Marked, st.text(max_size=5), st.integers(0, 9), st.floats(0, 1e13)), max_size=3
    ),
)


@given(stamp_values)
def test_stamps_survive_the_topic(stamp: Stamp) -> None:
    assert decode_stamp(encode_stamp(stamp)) == stamp


@given(st.binary(max_size=30))
def test_whatever_else_is_on_the_topic_is_told_apart(data: bytes) -> None:
    with suppress(StampFormatError):
        assert encode_stamp(decode_stamp(data))


class _Producer:
    def __init__(self) -> None:
        self.appended: list[Message] = []
        self.failure: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.closed = False

    def append(self, messages: Sequence[Message]) -> list[int]:
        self.gate.wait(10)
        if self.failure is not None:
            raise self.failure
        self.appended += messages
        return list(range(len(messages)))

    def close(self) -> None:
        self.closed = True


def _stamp(offset: int, stage: str = "trained", at_ms: float = 1.0) -> Stamp:
    return Stamp(stage, "event", LOG, 0, offset, at_ms)


def test_stamps_are_appended_in_order_and_all_of_them_before_the_end() -> None:
    producer = _Producer()
    stamper = Stamper(lambda: producer)
    for offset in range(50):
        stamper.put(_stamp(offset))
    stamper.close()
    assert [decode_stamp(message.value).offset for message in producer.appended] == list(range(50))
    assert {message.topic for message in producer.appended} == {"probes"}
    assert producer.closed
    assert stamper.dropped == 0


def test_a_slow_log_holds_nobody_up_and_what_finds_no_room_is_counted() -> None:
    producer = _Producer()
    producer.gate.clear()
    stamper = Stamper(lambda: producer, most=4)
    for offset in range(20):  # returns at once, though nothing can be appended
        stamper.put(_stamp(offset))
    producer.gate.set()
    stamper.close()
    assert 12 <= stamper.dropped <= 16, "four waited, and up to four were under way"
    assert len(producer.appended) == 20 - stamper.dropped


def test_a_log_that_is_away_costs_the_stamps_and_nothing_else() -> None:
    producer = _Producer()
    producer.failure = LogUnavailable("away")
    stamper = Stamper(lambda: producer)
    stamper.put(_stamp(1))
    stamper.close()
    assert (stamper.dropped, producer.appended) == (1, [])


def test_without_stamps_there_is_no_thread_and_no_producer() -> None:
    def never() -> _Producer:
        raise AssertionError("opened")

    Stamper(never).close()


# --- the tracker ---


def _tracked(tracker: Tracker, probe_id: str) -> dict[str, float]:
    probe = tracker.find(probe_id)
    assert probe is not None
    return dict(probe.after_ms())


@pytest.mark.parametrize("late", [True, False])
def test_stages_are_found_whenever_the_probe_is_heard_of(late: bool) -> None:
    tracker = Tracker()
    announced = Stamp("processed", "event", LOG, 0, 9, 1_020.0, [Marked("a", 7, 1_000.0)])
    if not late:
        tracker.stamp(announced)
    tracker.stamp(_stamp(9, "trained", 1_030.0))
    tracker.stamp(_stamp(9, "applied", 1_040.0))
    tracker.move("parameters", NAMED, {0: 6, 1: 99}, 1_041.0, 0.0)
    tracker.move("parameters", NAMED, {0: 9}, 1_045.0, 0.0)
    if late:
        tracker.stamp(announced)
    assert _tracked(tracker, "a") == {
        "processed": 20.0, "trained": 30.0, "applied": 40.0, "parameters": 45.0,
    }  # fmt: skip
    tracker.move("recommendations", NAMED, {0: 8}, 1_050.0, 0.0)
    assert _tracked(tracker, "a")["recommendations"] == 50.0
    assert tracker.find("b") is None


def test_a_watermark_of_another_log_or_partition_says_nothing() -> None:
    tracker = Tracker()
    tracker.add(Probe("a", "event", NAMED, 0, 7, 1_000.0))
    tracker.move("parameters", log_fingerprint("events-2"), {0: 100}, 1_001.0, 0.0)
    tracker.move("parameters", NAMED, {1: 100}, 1_001.0, 0.0)
    tracker.move("parameters", NAMED, {0: 6}, 1_001.0, 0.0)
    assert _tracked(tracker, "a") == {}


def test_the_tracker_keeps_the_newest_probes_and_lists_them_by_pages() -> None:
    tracker = Tracker(most=5)
    for n in range(8):
        tracker.add(Probe(f"p{n}", "event", NAMED, 0, n, float(n)))
    assert len(tracker) == 5
    first = tracker.listed("", 3)
    assert first is not None
    assert [probe.id for probe in first] == ["p3", "p4", "p5"]
    rest = tracker.listed("p5", 3)
    assert rest is not None
    assert [probe.id for probe in rest] == ["p6", "p7"]
    assert tracker.listed("p1", 3) is None, "forgotten"


def test_a_summary_is_of_the_recent_probes_by_kind_and_stage() -> None:
    tracker = Tracker()
    for n in range(10):
        tracker.add(Probe(f"e{n}", "event", NAMED, 0, n, 1_000.0 * n))
        tracker.move("parameters", NAMED, {0: n}, 1_000.0 * n + 10 + n, 0.0)
    tracker.add(Probe("u", "update", log_fingerprint(UPDATES), 3, 5, 9_000.0))
    found = tracker.summary(5_000.0)
    assert found["event"]["parameters"].n == 5
    assert found["event"]["parameters"].p50_ms == 17.0
    assert found["event"].keys() == {"parameters"}
    assert found["update"] == {}


# --- marked updates ---


class _Servers:
    """Two shards of push tables behind the calls of a client."""

    def __init__(self) -> None:
        self.shards = [PushTable(), PushTable()]
        self.marks: list[Mark] = []
        self.parts: list[np.ndarray] = []
        self.refusing = False

    def declare(self, model: str, specs: object, fingerprint: str) -> None:
        assert model == "probes"

    def applied(self, model: str, source: Source) -> dict[int, Applied]:
        return {n: Applied(shard.applied(source), -1, 1) for n, shard in enumerate(self.shards)}

    def push(
        self,
        model: str,
        source: Source,
        offset: int,
        predecessors: Mapping[int, int],
        accepted_at_ms: int,
        watermark: Watermark | None,
        parts: Mapping[str, tuple[Keys, Rows]],
    ) -> dict[int, PushReply]:
        assert watermark is not None
        found = {}
        for n, shard in enumerate(self.shards):
            decision = shard.decide(source, offset, predecessors[n])
            if self.refusing:
                found[n] = PushReply("refused", offset, -1, 1, "too long")
                continue
            if decision == "next":
                shard.advance(
                    source, offset, Mark(watermark.log, watermark.partition, offset, accepted_at_ms)
                )
                self.parts.append(parts["marks"][1])
            status = "applied" if decision == "next" else decision
            found[n] = PushReply(status, shard.applied(source), -1, 1)
        return found


def test_updates_are_numbered_by_the_clock_and_never_twice() -> None:
    servers, clock = _Servers(), [5_000_000]
    writer = UpdateWriter(servers, 3, lambda: clock[0])
    writer.open()
    numbers = [writer.push().number for _ in range(3)]
    assert numbers == [5_000, 5_001, 5_002], "the clock stands still"
    clock[0] = 1_000_000  # and goes back
    assert writer.push().number == 5_003
    again = UpdateWriter(servers, 3, lambda: clock[0])
    again.open()
    assert again.push().number == 5_004
    assert servers.shards[1].applied(Source(UPDATES, 3)) == 5_004


def test_each_update_changes_the_rows_and_they_stay_small() -> None:
    servers = _Servers()
    writer = UpdateWriter(servers, 0)
    writer.open()
    for _ in range(10):
        writer.push()
    total = np.cumsum([part[0, 0] for part in servers.parts[::2]])
    assert all(part[0, 0] != 0 for part in servers.parts)
    assert np.abs(total).max() <= 1


def test_two_writers_of_one_slot_lose_nothing() -> None:
    servers = _Servers()
    writers = [UpdateWriter(servers, 0, lambda: 9_000_000) for _ in range(2)]
    for writer in writers:
        writer.open()
    numbers = [writers[n % 2].push().number for n in range(10)]
    assert numbers == sorted(set(numbers)), "each was applied, and none passed for another's"


def test_a_lost_shard_and_a_refusal_are_told() -> None:
    servers = _Servers()
    writer = UpdateWriter(servers, 0)
    writer.open()
    writer.push()
    servers.shards[0] = PushTable()  # restarted, with nothing on disk
    assert writer.push().number == servers.shards[0].applied(Source(UPDATES, 0))
    servers.refusing = True
    with pytest.raises(ParameterError, match="too long"):
        writer.push()


def test_an_update_announces_itself() -> None:
    servers = _Servers()
    writer = UpdateWriter(servers, 7)
    writer.open()
    update = writer.push()
    tracker = Tracker()
    tracker.stamp(update_stamp(update))
    probe = tracker.find(f"update-7-{update.number}")
    assert probe is not None
    assert (probe.kind, probe.log, probe.partition) == ("update", log_fingerprint(UPDATES), 7)
    assert probe.after_ms()["applied"] == pytest.approx(update.applied_at_ms - update.sent_at_ms, abs=1e-3)


# --- the book of a measurement ---


def _sent(n: int, due_s: float) -> Sent:
    return Sent(f"p{n}", "event", due_s, 1e12 + due_s * 1e3)


def _book() -> Book:
    """Two probes: offsets 4 and 5 of partition 0, due at 0 and 1 s, accepted 10 ms later."""
    book = Book(("home", "eu"), 100)
    for n in range(2):
        book.send(_sent(n, float(n)))
        book.accept(f"p{n}", token_of(LOG, [(0, 4 + n)]), "accepted", n + 0.010)
    return book


def _see(book: Book, region: str, offset: int, at_s: float) -> None:
    token = Token(NAMED, ((0, offset),))
    book.see(region, "event", {"parameters": token, "recommendations": token}, at_s)


def test_regions_are_measured_each_by_its_own_watermarks() -> None:
    book = _book()
    _see(book, "home", 4, 0.050)
    assert book.unseen == 2 + 4, "home lacks one in two stages, eu lacks both"
    _see(book, "home", 5, 1.060)
    _see(book, "eu", 5, 1.500)
    found = book.after_ms("event")
    assert found[HOME]["accepted"] == pytest.approx([10.0, 10.0])
    assert found["home"]["parameters"] == pytest.approx([50.0, 60.0])
    assert found["eu"]["recommendations"] == pytest.approx([1_500.0, 500.0])
    assert book.unseen == 0


def test_what_was_visible_before_its_answer_came_counts_from_when_it_was_seen() -> None:
    book = Book(("home",), 100)
    book.send(_sent(0, 0.0))
    _see(book, "home", 9, 0.020)
    book.accept("p0", token_of(LOG, [(0, 4)]), "accepted", 0.030)
    assert book.oldest("home", "event", "parameters") is None
    assert book.after_ms("event")["home"]["parameters"] == pytest.approx([20.0])


def test_the_oldest_unseen_probe_is_asked_for() -> None:
    book = _book()
    text = book.oldest("eu", "event", "recommendations")
    assert text is not None
    assert decode_token(text).positions == ((0, 4),)
    _see(book, "eu", 4, 0.1)
    text = book.oldest("eu", "event", "recommendations")
    assert text is not None
    assert decode_token(text).positions == ((0, 5),)


def test_failed_probes_and_foreign_stamps_count_nowhere() -> None:
    book = _book()
    book.send(_sent(2, 2.0))
    book.fail("p2")
    book.stamp("p2", "processed", 1e12 + 5_000)
    book.stamp("somebody else's", "processed", 1e12)
    book.stamp("p1", "processed", 1e12 + 1_025.0)
    assert book.failed == 1
    assert book.ids("event") == ["p0", "p1"]
    assert book.after_ms("event")[HOME]["processed"] == pytest.approx([25.0])


# --- report and picture ---


def test_the_report_says_what_is_missing_and_the_picture_can_be_drawn(tmp_path: Path) -> None:
    book = _book()
    _see(book, "home", 5, 1.5)
    _see(book, "eu", 4, 0.2)
    plan = Plan("http://home", {"eu": "http://eu"}, rate=2.0, seconds=1.0, kinds=("event",))
    found = report(Measured(plan, "home", book, 0, 1.0, ("eu: slow",)))
    eu = found.row("event", "eu", "parameters")
    assert eu is not None
    assert eu.ms is not None
    assert (eu.ms.n, eu.missing, eu.ms.p50_ms) == (1, 1, pytest.approx(200.0))
    processed = found.row("event", None, "processed")
    assert processed is not None
    assert (processed.ms, processed.missing) == (None, 2)
    shown = {(row[1], row[2]): row for row in table(found)}
    assert shown["eu", "parameters"][3:6] == ("1", "1", "200.0")
    assert shown["home", "processed"][5] == ""
    assert found.problems == ["eu: slow"]
    path = tmp_path / "f.png"
    draw(found, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_the_book_knows_whose_stamps_are_missing() -> None:
    book = _book()
    for stage in ("processed", "trained", "applied"):
        assert book.unstamped("event") == 2
        book.stamp("p0", stage, 1e12)
    assert book.unstamped("event") == 1
    assert book.unstamped("update") == 0
