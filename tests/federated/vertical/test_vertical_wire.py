"""Bodies of messages: what goes in comes out, and nothing malformed gets through or takes memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from federated.vertical.parties import PeerFault
from federated.vertical.wire import AnyArr, Arr, Blobs, Bytes, Float, Int, Text, pack, unpack

EXPECTED = {
    "turn": Int(0, 100),
    "loss": Float(),
    "name": Text(10),
    "key": Bytes(4),
    "parts": Blobs(3, 8),
    "sums": Arr("<f8", (None, 2)),
}


def body(**changed: object) -> bytes:
    fields = {
        "turn": 3,
        "loss": 0.5,
        "name": "ä",
        "key": b"\0\1",
        "parts": [b"", b"abc"],
        "sums": np.arange(6.0).reshape(3, 2),
    }
    return pack({**fields, **changed})  # type: ignore[dict-item]


def test_every_type_comes_back() -> None:
    found = unpack(body(), "b", EXPECTED)
    assert [found[name] for name in ("turn", "loss", "name", "key", "parts")] == [
        3,
        0.5,
        "ä",
        b"\0\1",
        [b"", b"abc"],
    ]
    np.testing.assert_array_equal(found["sums"], np.arange(6.0).reshape(3, 2))
    assert not found["sums"].flags.writeable


@pytest.mark.parametrize(
    "dtype", ["<f8", "<f4", "<i8", "<i4", "<i2", "|i1", "<u8", "<u4", "<u2", "|u1", "|b1"]
)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (1, 2, 3)])
def test_arrays_of_all_types_and_shapes(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, dtype)
    found = unpack(pack({"x": array}), "b", {"x": Arr(dtype, shape)})["x"]
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"turn": 101}, "not within"),
        ({"turn": -1}, "not within"),
        ({"turn": 1.0}, "of type"),
        ({"loss": float("nan")}, "not finite"),
        ({"name": "a" * 11}, "a length of"),
        ({"key": b"12345"}, "a length of"),
        ({"parts": [b""] * 4}, "a count of"),
        ({"parts": [b"123456789"]}, "a length of"),
        ({"sums": np.ones((3, 3))}, "shape"),
        ({"sums": np.ones(3)}, "dimensions"),
        ({"sums": np.ones((3, 2), np.float32)}, "float32"),
        ({"sums": np.array([[np.inf, 0.0]])}, "not finite"),
        ({"extra": 1}, "fields, expected"),
    ],
)
def test_what_differs_from_what_is_expected_is_the_senders_fault(
    changed: dict[str, object], why: str
) -> None:
    with pytest.raises(PeerFault, match=why) as caught:
        unpack(body(**changed), "shop", EXPECTED)
    assert (caught.value.peer, caught.value.rule) == ("shop", "malformed")


def test_an_array_of_any_type_has_as_many_rows_as_asked_for() -> None:
    assert unpack(pack({"x": np.ones((2, 3), np.int8)}), "b", {"x": AnyArr(2)})["x"].shape == (2, 3)
    for wrong in (np.ones(3), np.float64(1.0) * np.ones(()), np.ones((2, 9))):
        with pytest.raises(PeerFault):
            unpack(pack({"x": wrong}), "b", {"x": AnyArr(2, most=10)})


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_changed_byte_gives_a_fault_or_values_within_bounds(at: int, value: int) -> None:
    twisted = bytearray(body())
    twisted[at % len(twisted)] = value
    try:
        found = unpack(bytes(twisted), "b", EXPECTED)
    except PeerFault:
        return
    assert 0 <= found["turn"] <= 100
    assert found["sums"].shape == (3, 2)


@given(st.integers(0, 400))
def test_a_body_that_is_cut_short_is_a_fault(length: int) -> None:
    whole = body()
    with pytest.raises(PeerFault):
        unpack(whole[: min(length, len(whole) - 1)], "b", EXPECTED)


@given(st.binary(max_size=64))
def test_noise_is_a_fault(noise: bytes) -> None:
    with pytest.raises(PeerFault):
        unpack(noise, "b", EXPECTED)


def test_a_length_that_is_a_lie_takes_no_memory() -> None:
    huge = pack({"x": np.empty((0, 5))})
    lie = huge[:7] + (2**40).to_bytes(8, "little") + huge[15:]
    with pytest.raises(PeerFault, match=r"elements|cut short"):
        unpack(lie, "b", {"x": Arr("<f8", (None, 5))})


@pytest.mark.parametrize(
    "wrong", [{"x": np.array(["a"])}, {"": 1}, {"x" * 65: 1}, {str(n): n for n in range(65)}]
)
def test_what_does_not_travel_is_our_own_fault(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"travel|name|fields"):
        pack(wrong)  # type: ignore[arg-type]
