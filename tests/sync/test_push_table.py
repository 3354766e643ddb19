"""Pushes are applied once: the push table against a brute-force model that remembers every offset."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sync.errors import BadPush, TooManySources
from sync.pushes import NOTHING, Progress, PushTable, Source, Watermark

SOURCES = [Source("log-a", 0), Source("log-a", 1), Source("log-b", 0)]


@settings(deadline=None, max_examples=300)
@given(
    # Offsets in a log grow, but may have gaps, as transaction markers take some.
    st.lists(st.integers(1, 3), min_size=8, max_size=8),
    # What arrives: mostly the next message of a source, else one before it (again) or after it (overtaking).
    st.lists(st.tuples(st.sampled_from(SOURCES), st.sampled_from([0, 0, 0, 1, 2, -1, -2, -3])), max_size=60),
)
def test_each_message_counts_once_and_in_order(gaps: list[int], arrivals: list[tuple[Source, int]]) -> None:
    log = [sum(gaps[: i + 1]) - 1 for i in range(len(gaps))]
    table = PushTable()
    done: dict[Source, list[int]] = {source: [] for source in SOURCES}

    def send(source: Source, at: int) -> None:
        offset, predecessor = log[at], log[at - 1] if at else NOTHING
        verdict = table.decide(source, offset, predecessor)
        if offset in done[source]:
            assert verdict == "duplicate"
        elif done[source] == log[:at]:
            assert verdict == "next"
            table.advance(source, offset, None)
            done[source].append(offset)
        else:
            assert verdict == "gap"
        assert table.applied(source) == (done[source][-1] if done[source] else NOTHING)

    for source, ahead in arrivals:
        send(source, min(max(len(done[source]) + ahead, 0), len(log) - 1))
    # A trainer that sends everything again from the start brings every source to the end, whatever was lost.
    for source in SOURCES:
        for at in range(len(log)):
            send(source, at)
        assert done[source] == log


def test_a_lost_push_overtaken_by_the_next_is_not_taken_for_done() -> None:
    table, source = PushTable(), SOURCES[0]
    table.advance(source, 6, None)
    assert table.decide(source, 8, 7) == "gap"
    assert table.decide(source, 7, 6) == "next"


def test_a_predecessor_older_than_the_applied_offset_is_a_gap() -> None:
    table, source = PushTable(), SOURCES[0]
    table.advance(source, 6, None)
    assert table.decide(source, 8, 5) == "gap"


def test_a_topic_made_again_starts_anew() -> None:
    table = PushTable()
    table.advance(Source("log-a", 0), 100, None)
    assert table.decide(Source("log-made-again", 0), 0, NOTHING) == "next"


@pytest.mark.parametrize(
    ("source", "offset", "predecessor"),
    [
        (SOURCES[0], -1, -1),
        (SOURCES[0], 3, 3),
        (SOURCES[0], 3, 4),
        (SOURCES[0], 3, -2),
        (SOURCES[0], 2**63, 0),
        (Source("log-a", -1), 0, -1),
        (Source("", 0), 0, -1),
    ],
)
def test_refuses_what_no_log_produces(source: Source, offset: int, predecessor: int) -> None:
    table = PushTable()
    with pytest.raises(BadPush, match=str(offset)):
        table.decide(source, offset, predecessor)
    assert len(table) == 0


def test_sources_are_bounded_and_retired_ones_make_room() -> None:
    table = PushTable(max_sources=2)
    for source in SOURCES[:2]:
        table.advance(source, 0, None)
    assert table.decide(SOURCES[0], 1, 0) == "next"
    with pytest.raises(TooManySources, match="log-b"):
        table.decide(SOURCES[2], 0, NOTHING)
    assert table.forget("log-a") == 2
    assert table.decide(SOURCES[2], 0, NOTHING) == "next"


def test_watermarks_are_the_newest_event_of_each_partition() -> None:
    table = PushTable()
    marks = [Watermark("events", 0, 9, 90), Watermark("events", 1, 7, 70), Watermark("events", 0, 5, 50)]
    for source, mark in zip(SOURCES, marks, strict=True):
        table.advance(source, 0, mark)
    table.advance(SOURCES[1], 1, None)
    assert table.watermarks() == {("events", 0): marks[0], ("events", 1): marks[1]}
    table.advance(SOURCES[2], 1, Watermark("events", 0, 11, 110))
    assert table.watermarks()["events", 0].offset == 11


def test_progress_is_a_copy() -> None:
    table = PushTable()
    table.advance(SOURCES[0], 4, None)
    copy = table.progress()
    table.advance(SOURCES[0], 5, None)
    assert copy == {SOURCES[0]: Progress(4)}
