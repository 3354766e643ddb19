"""Messages survive the journey, and nothing else is read as one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federated.secagg.messages import (
    SEALED_BYTES,
    Advertisement,
    Choice,
    Consent,
    Delivery,
    Message,
    MessageRefused,
    Neighbours,
    Roster,
    RosterEntry,
    Sharing,
    Signatures,
    Survivors,
    Unmasking,
    bitmap,
    is_member,
    most_bytes,
    positions_of,
    read_as,
    read_message,
    size_of,
)
from federated.secagg.stages import Stage

CLIENTS = 30


def exactly(size: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=size, max_size=size)


positions = st.sets(st.integers(0, CLIENTS - 1), max_size=8).map(lambda found: tuple(sorted(found)))
plain = st.builds(Advertisement, exactly(32), exactly(32))
signed = st.builds(Advertisement, exactly(32), exactly(32), exactly(32), exactly(64), exactly(64))
name = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
lines = st.tuples(positions, st.lists(st.tuples(name, plain | signed), min_size=8, max_size=8)).map(
    lambda pair: tuple(RosterEntry(at, *who) for at, who in zip(pair[0], pair[1], strict=False))
)
bits = positions.map(lambda found: bitmap(found, CLIENTS))
messages = st.one_of(
    plain,
    signed,
    st.builds(Choice, positions),
    st.builds(Sharing, exactly(32), st.lists(exactly(SEALED_BYTES), max_size=4).map(tuple)),
    st.builds(Consent, exactly(64)),
    st.builds(Unmasking, st.lists(exactly(33), max_size=4).map(tuple)),
    st.builds(
        Roster, st.just(CLIENTS), st.integers(0, CLIENTS - 1),
        st.just(()) | exactly(48).map(lambda leaf: (leaf,) * CLIENTS), lines,
    ),
    st.builds(Neighbours, st.just(CLIENTS), positions, lines),
    st.builds(Delivery, bits, st.lists(exactly(SEALED_BYTES), max_size=4).map(tuple)),
    st.builds(Survivors, bits),
    st.builds(Signatures, st.tuples(positions, exactly(64)).map(lambda pair: tuple((p, pair[1]) for p in pair[0]))),
)  # fmt: skip


@settings(deadline=None)
@given(messages)
def test_what_was_said_is_what_is_read(message: Message) -> None:
    assert read_message(message.to_bytes()) == message


@settings(deadline=None)
@given(messages, st.integers(0, 10_000), st.sampled_from(["cut", "longer"]))
def test_cut_or_longer_is_refused(message: Message, at: int, how: str) -> None:
    body = message.to_bytes()
    # An advertisement without its signatures is one.
    changed = body[: at % len(body)] if how == "cut" else body + b"\0"
    if isinstance(message, Advertisement) and len(changed) == 65:
        assert read_message(changed) == Advertisement(message.sealing, message.masking)
        return
    with pytest.raises(MessageRefused):
        read_message(changed)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=80), st.integers(0, 255))
def test_no_bytes_do_more_than_be_refused(rest: bytes, first: int) -> None:
    body = bytes([first]) + rest
    try:
        read = read_message(body)
    except MessageRefused:
        return
    assert read.to_bytes() == body


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "no bytes"),
        (b"\x21" + bytes(64), "version 2"),
        (b"\x1f", "unknown kind 15"),
        (b"\x12\x02\x00\x05\x00\x05\x00", "ascending"),
        (b"\x13" + bytes(32) + b"\xff\xff", "are said to follow"),
        (b"\x16\x05\x00\x05\x00\x00\x00\x00\x00", "position 5 of 5"),
        (b"\x16\x05\x00\x00\x00\x04\x00\x00\x00", "4 leaves"),
        (b"\x17\x02\x00\x00\x00\x03\x00", "3 entries of 2"),
        (b"\x16\x02\x00\x00\x00\x00\x00\x01\x00" + b"\x02\x00\x01\x00\x00a" + bytes(64), "position 2 of 2"),
        (b"\x16\x02\x00\x00\x00\x00\x00\x01\x00" + b"\x00\x00\x00\x00\x00" + bytes(65), "name of 0"),
        (b"\x16\x02\x00\x00\x00\x00\x00\x01\x00" + b"\x00\x00\x01\x00\x00\xff" + bytes(64), "UTF-8"),
    ],
)
def test_malformed_is_refused_by_what_is_wrong(body: bytes, says: str) -> None:
    with pytest.raises(MessageRefused, match=says):
        read_message(body)


def test_another_kind_than_is_due_is_refused() -> None:
    with pytest.raises(MessageRefused, match="Consent where Choice is due"):
        read_as(Choice, Consent(bytes(64)).to_bytes())


@given(positions)
def test_sets_as_bitmaps(found: tuple[int, ...]) -> None:
    body = bitmap(found, CLIENTS)
    assert positions_of(body, CLIENTS) == found
    assert size_of(body) == len(found)
    assert [place for place in range(CLIENTS) if is_member(body, place)] == list(found)


@pytest.mark.parametrize("body", [b"", bytes(3), bytes(5), b"\0\0\0\x40"])
def test_a_set_among_others_is_refused(body: bytes) -> None:
    with pytest.raises(MessageRefused):
        positions_of(body, CLIENTS)


def test_the_longest_message_of_a_stage() -> None:
    many, sealed = tuple(range(CLIENTS)), (bytes(SEALED_BYTES),) * CLIENTS
    longest = {
        Stage.ADVERTISE: Advertisement(bytes(32), bytes(32), bytes(32), bytes(64), bytes(64)),
        Stage.CHOOSE: Choice(many),
        Stage.SHARE: Sharing(bytes(32), sealed),
        Stage.CONSISTENT: Consent(bytes(64)),
        Stage.UNMASK: Unmasking((bytes(33),) * CLIENTS),
    }
    assert {s: len(m.to_bytes()) for s, m in longest.items()} == {s: most_bytes(s, CLIENTS) for s in longest}


def test_a_roster_for_another_reader() -> None:
    body = Roster(CLIENTS, 3, (), (RosterEntry(2, "a", Advertisement(bytes(32), bytes(32))),))
    moved = read_as(Roster, Roster.moved(body.to_bytes(), 17))
    assert moved == Roster(CLIENTS, 17, (), body.entries)
