import math

import numpy as np
import pytest

from federated.device import Instructions
from federated.frames import FrameRefused, ModelFrame
from federated.rounds import (
    Accepted,
    Admitted,
    Finished,
    NotYet,
    PollRequest,
    Refused,
    Reply,
    Standing,
    StartRequest,
    UploadRequest,
)
from federated.selection import DeviceFacts
from federated.wire import (
    ReceivedModel,
    decode_model,
    decode_poll,
    decode_reply,
    decode_start,
    decode_upload,
    digest_of,
    encode_model,
    encode_poll,
    encode_reply,
    encode_start,
    encode_upload,
)

TICKET = b"t" * 16


def test_requests_come_back_with_the_client_of_the_address() -> None:
    start = StartRequest("a", DeviceFacts(0.5, False, True, False, math.inf, 1024.0, 20), 7)
    assert decode_start(encode_start(start), "a") == start
    assert decode_poll(encode_poll(PollRequest("a", 3)), "a") == PollRequest("a", 3)


def test_an_upload_brings_its_payload_or_the_digest_of_what_came_in_parts() -> None:
    request = UploadRequest("a", 3, TICKET, digest_of(b"payload"), 20, 10, 0.5)
    whole = encode_upload(request, b"payload")
    assert len(whole) == 34 + len(b"payload")
    assert decode_upload(whole, "a") == (request, b"payload")
    assert decode_upload(encode_upload(request, None), "a") == (request, None)
    assert decode_upload(encode_upload(request, b""), "a")[1] == b""


def test_the_digest_of_a_payload_is_computed_not_believed() -> None:
    lie = UploadRequest("a", 3, TICKET, bytes(16), 20, 10, 0.5)
    read, payload = decode_upload(encode_upload(lie, b"payload"), "a")
    assert payload is not None
    assert read.digest == digest_of(payload) != bytes(16)


@pytest.mark.parametrize(
    "reply",
    [
        Admitted(3, 2, TICKET, 1060.0, True),
        Accepted(3, 1001.5),
        NotYet(1002.0, "full", "detail"),
        Refused("late", "why", 1003.0),
        Refused("foreign_ticket", "why"),
        Finished(20, 18),
        Standing(3, 2, "updating", True, 1004.0),
    ],
)
def test_replies_come_back_on_the_readers_clock(reply: Reply) -> None:
    body = encode_reply(reply, now=1000.0)
    assert len(body) <= 64
    assert decode_reply(body, now=1000.0) == reply
    off_by_years = decode_reply(body, now=0.0)
    assert [getattr(off_by_years, name, None) for name in ("until", "come_back_at")] == [
        None if (at := getattr(reply, name, None)) is None else at - 1000.0
        for name in ("until", "come_back_at")
    ]


def test_a_model_comes_with_its_instructions_and_vectors() -> None:
    control = np.arange(5, dtype=np.float32)
    instructions = Instructions(proximal=0.1, steps=3, full_batch=True, vectors=("control",))
    body = encode_model(7, 6, b"difference", instructions, {"control": control})
    read = decode_model(body, 5)
    assert (read.version, read.base, read.model, read.instructions) == (7, 6, b"difference", instructions)
    np.testing.assert_array_equal(read.vectors["control"], control)
    read.vectors["control"][0] = 9.0  # the device may train on it


def test_plain_instructions_cost_two_bytes() -> None:
    assert len(encode_model(7, 0, b"", Instructions(), {})) == 14
    assert decode_model(encode_model(7, 0, b"", Instructions(), {}), 5) == ReceivedModel(
        7, 0, b"", Instructions(), {}
    )


@pytest.mark.parametrize(
    "frame",
    [
        ModelFrame(1, 0, {"teleport": 1}, {}, b""),
        ModelFrame(1, 0, {"steps": 0}, {}, b""),
        ModelFrame(1, 0, {"steps": True}, {}, b""),
        ModelFrame(1, 0, {"proximal": -1}, {}, b""),
        ModelFrame(1, 0, {"full_batch": 1}, {}, b""),
        ModelFrame(1, 0, {"vectors": "control"}, {}, b""),
        ModelFrame(1, 0, {"vectors": ["control"]}, {}, b""),
        ModelFrame(1, 0, {}, {"control": bytes(20)}, b""),
        ModelFrame(1, 0, {"vectors": ["control"]}, {"control": bytes(16)}, b""),
        ModelFrame(1, 0, {"vectors": ["control"]}, {"control": bytes(16) + b"\x00\x00\xc0\x7f"}, b""),
    ],
)
def test_a_model_that_says_what_this_side_cannot_do_is_refused(frame: ModelFrame) -> None:
    with pytest.raises(FrameRefused):
        decode_model(frame.to_bytes(), 5)


def test_one_message_is_not_taken_for_another() -> None:
    start = encode_start(StartRequest("a"))
    for decode in (
        lambda: decode_poll(start, "a"),
        lambda: decode_upload(start, "a"),
        lambda: decode_reply(start, 0.0),
    ):
        with pytest.raises(FrameRefused, match="instead of"):
            decode()
    with pytest.raises(FrameRefused, match="1 to 64 bytes"):
        decode_start(start + bytes(100), "a")
