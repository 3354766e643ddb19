import math
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from federated.frames import (
    MOST_TEXT,
    UPLOAD_OVERHEAD,
    AcceptedFrame,
    AdmittedFrame,
    FinishedFrame,
    Frame,
    FrameRefused,
    ModelFrame,
    NotYetFrame,
    PartsFrame,
    PollFrame,
    RefusedFrame,
    StandingFrame,
    StartFrame,
    UploadFrame,
    read_frame,
)
from federated.rounds.messages import RefusalCode, WaitReason
from federated.selection import DeviceFacts

whole = st.integers(0, 2**32 - 1)
wait = st.integers(0, 4_000_000_000).map(lambda ms: ms / 1000)
single = st.floats(width=32, allow_nan=False)
ticket = st.binary(min_size=16, max_size=16)
text = st.text(st.characters(codec="utf-8"), max_size=100)
facts = st.builds(
    DeviceFacts, st.floats(0, 1, width=32), st.booleans(), st.booleans(), st.booleans(),
    st.floats(0, width=32, allow_nan=False), st.floats(0, width=32, allow_nan=False), whole,
)  # fmt: skip
instructions = st.dictionaries(
    text, st.integers(-5, 5) | st.floats(allow_nan=False, allow_infinity=False) | text, max_size=3
)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=20), st.binary(max_size=20), max_size=3
)
frames = st.one_of(
    st.builds(StartFrame, facts, whole),
    st.builds(AdmittedFrame, whole, whole, wait, ticket, st.booleans()),
    st.builds(ModelFrame, whole, whole, instructions, vectors, st.binary(max_size=50)),
    st.builds(PartsFrame, whole, ticket, st.integers(1, 2**32 - 1), whole, finite, ticket),
    st.builds(
        UploadFrame, whole, ticket, st.integers(1, 2**32 - 1), whole,
        st.floats(width=32, allow_nan=False, allow_infinity=False), st.binary(max_size=50),
    ),
    st.builds(AcceptedFrame, whole, wait, st.booleans()),
    st.builds(NotYetFrame, wait, st.sampled_from(get_args(WaitReason)), text),
    st.builds(RefusedFrame, st.sampled_from(get_args(RefusalCode)), text, st.none() | wait),
    st.builds(FinishedFrame, whole, whole),
    st.builds(PollFrame, whole),
    st.builds(
        StandingFrame, whole, whole,
        st.sampled_from(["starting", "updating", "buffering", "aggregating", "stopped", "finished"]),
        st.booleans(), wait,
    ),
)  # fmt: skip


@given(frames)
def test_every_frame_comes_back(frame: Frame) -> None:
    assert read_frame(frame.to_bytes()) == frame


def test_an_upload_adds_34_bytes_to_its_payload() -> None:
    body = UploadFrame(3, b"t" * 16, 20, 10, 0.5, b"p" * 300).to_bytes()
    assert len(body) == 300 + UPLOAD_OVERHEAD
    assert UPLOAD_OVERHEAD == 34


known_kind = st.builds(
    lambda kind, rest: bytes([16 | kind]) + rest, st.integers(1, 11), st.binary(max_size=120)
)


@given(st.binary(max_size=120) | known_kind)
def test_foreign_bytes_are_refused_or_are_a_frame(body: bytes) -> None:
    try:
        frame = read_frame(body)
    except FrameRefused:
        return
    assert read_frame(frame.to_bytes()) == frame


@given(frames, st.data())
def test_a_frame_cut_short_is_refused_or_has_a_shorter_payload(frame: Frame, data: st.DataObject) -> None:
    body = frame.to_bytes()
    cut = body[: data.draw(st.integers(0, len(body) - 1))]
    try:
        read = read_frame(cut)
    except FrameRefused:
        return
    assert isinstance(frame, (UploadFrame, ModelFrame))
    assert isinstance(read, type(frame))
    assert read != frame


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "1 to"),
        (b"\x28" + bytes(4), "version 2, this side speaks 1"),
        (b"\x1f", "unknown kind 15"),
        (b"\x13", "1 bytes, its header has 34"),
        (PollFrame(1).to_bytes() + b"x", "1 bytes follow the header instead of 0"),
        (b"\x15\xff" + bytes(6), "index out of range"),
        (b"\x19\x09" + bytes(13), "index out of range"),
        (b"\x14\x02" + bytes(8), "unknown flags 0x2"),
        (b"\x15\x00" + bytes(4) + b"\x02\x00\xff\xff", "can't decode"),
        (b"\x15\x00" + bytes(4) + b"\x01\x02" + b"a" * 513, "513 bytes of text"),
    ],
)
def test_malformed_frames_are_refused_with_the_reason(body: bytes, message: str) -> None:
    with pytest.raises(FrameRefused, match=message):
        read_frame(body)


@pytest.mark.parametrize("told", [b"[]", b"{", b'{"a":NaN}', b"[" * 60_000, b"\xff"])
def test_malformed_instructions_are_refused(told: bytes) -> None:
    head = ModelFrame(1, 1, {}, {}, b"").to_bytes()[:9]
    assert read_frame(head + b"\x02\x00\x00{}") == ModelFrame(1, 1, {}, {}, b"")
    changed = head + len(told).to_bytes(2, "little") + b"\x00" + told
    with pytest.raises(FrameRefused):
        read_frame(changed)


@pytest.mark.parametrize(("examples", "loss"), [(0, 0.5), (1, math.nan), (1, math.inf), (1, 1e300)])
def test_uploads_without_examples_or_with_a_loss_that_is_none_are_refused(examples: int, loss: float) -> None:
    with pytest.raises(FrameRefused, match="examples and a loss"):
        read_frame(UploadFrame(1, b"t" * 16, examples, 1, loss, b"").to_bytes())


@pytest.mark.parametrize(
    "changed", [{"battery": 1.5}, {"battery": math.nan}, {"compute": -1.0}, {"bandwidth": math.nan}]
)
def test_impossible_facts_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(FrameRefused, match="impossible facts"):
        read_frame(StartFrame(DeviceFacts(**changed)).to_bytes())


def test_a_frame_that_is_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(FrameRefused, match="1 to 100 bytes, not 134"):
        read_frame(UploadFrame(1, b"t" * 16, 1, 1, 0.5, bytes(100)).to_bytes(), most=100)


def test_waits_are_rounded_up_and_bounded_and_texts_are_cut_at_a_character() -> None:
    read = read_frame(NotYetFrame(0.0101, "full", "ü" * 400).to_bytes())
    assert isinstance(read, NotYetFrame)
    assert read.come_back_s == 0.011
    assert read.detail == "ü" * (MOST_TEXT // 2)
    late = read_frame(AcceptedFrame(1, -5.0).to_bytes())
    assert isinstance(late, AcceptedFrame)
    assert late.come_back_s == 0.0
    far = read_frame(RefusedFrame("late", "", math.inf).to_bytes())
    assert isinstance(far, RefusedFrame)
    assert far.come_back_s == 4_000_000.0


@pytest.mark.parametrize(
    "table",
    [
        b"\x01\x04\x00\x00\x00w\x00\x00",  # 4 bytes are said to follow, 2 do
        b"\x01\xff\xff\xff\xff\xff",  # a name of 255 letters and 4 GB
        b"\x02\x01\x00\x00\x00\x00w\x01\x00\x00\x00\x00w",  # twice the same
        b"\x11" + b"\x00" * 200,  # 17 vectors
    ],
)
def test_vectors_that_are_not_there_are_refused(table: bytes) -> None:
    head = ModelFrame(1, 1, {}, {}, b"").to_bytes()[:9]
    with pytest.raises(FrameRefused):
        read_frame(head + b"\x02\x00" + table[:1] + b"{}" + table[1:])


def test_our_own_mistakes_are_told_apart() -> None:
    with pytest.raises(ValueError, match="does not fit into 32 bits"):
        PollFrame(-1).to_bytes()
    with pytest.raises(ValueError, match="a ticket or digest has 16 bytes"):
        UploadFrame(1, b"t", 1, 1, 0.5, b"").to_bytes()
    with pytest.raises(ValueError, match="bytes of instructions"):
        ModelFrame(1, 0, {"a": "x" * 70_000}, {}, b"").to_bytes()
