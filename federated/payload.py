"""An update's vectors as the body of an upload, and back: the same code at the device and at the server.

The vectors stand in the order of their names. One alone is its bytes and nothing else; of several, each but the last
has its length (u32) before it. Without a scheme the bytes are float32, little-endian. Where devices answer by a bit,
one byte, 0 or 1, goes before all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from federated.compression import BodyRefused, Scheme, draw_shared
from federated.device import COMPRESSION, device_generator
from federated.weights import Array

_LENGTH = 4
EVERYONE = 2**64 - 1  # the client of numbers that belong to no single one


@dataclass(frozen=True, slots=True)
class EncodedUpdate:
    """``body``; what the server will read from it ``[D]`` by name; and what error feedback is to remember ``[D]`` by
    name once the server has accepted (empty without)."""

    body: bytes
    decoded: dict[str, Array]
    residuals: dict[str, Array]


def shared_seed(seed: int, iteration: int) -> int:
    """The seed that all clients of an iteration know: of a shared mask, of a sketch."""
    return draw_shared(device_generator(seed, EVERYONE, iteration, COMPRESSION))


def encode_update(
    scheme: Scheme | None,
    vectors: Mapping[str, Array],
    generator: np.random.Generator,
    residuals: Mapping[str, Array] | None = None,
    shared: int = 0,
    bit: int | None = None,
) -> EncodedUpdate:
    """``vectors`` [D] by name as a body, and the device's ``bit``. ``residuals``: what error feedback remembers, by
    name. Raises ValueError on what is not finite."""
    bodies, decoded, kept = list[bytes](), dict[str, Array](), dict[str, Array]()
    for name in sorted(vectors):
        vector = np.ascontiguousarray(vectors[name], np.float32)
        if scheme is None:
            if not np.isfinite(vector).all():
                raise ValueError(f"{name} holds NaN or infinity")
            bodies.append(vector.astype("<f4", copy=False).tobytes())
            decoded[name] = vector
            continue
        memory = (residuals or {}).get(name) if scheme.feedback else None
        encoded = scheme.encode_batch(
            vector[None], [generator], None if memory is None else memory[None], shared
        )
        bodies.append(encoded.bodies[0])
        decoded[name] = encoded.decoded[0]
        if encoded.residuals is not None:
            kept[name] = encoded.residuals[0]
    lengths = [len(body).to_bytes(_LENGTH, "little") for body in bodies[:-1]] + [b""]
    body = b"".join(part for pair in zip(lengths, bodies, strict=True) for part in pair)
    return EncodedUpdate(body if bit is None else bytes([bit]) + body, decoded, kept)


def decode_update(
    scheme: Scheme | None, body: bytes, names: Sequence[str], size: int, shared: int = 0
) -> dict[str, Array]:
    """The vectors ``names`` [``size``] that ``body`` stands for. Raises BodyRefused."""
    vectors, at = dict[str, Array](), 0
    ordered = sorted(names)
    for name in ordered:
        end = len(body)
        if name != ordered[-1]:
            start = at + _LENGTH
            end = start + int.from_bytes(body[at:start], "little")
            if start > len(body) or end > len(body):
                raise BodyRefused("the body is cut short")
            at = start
        vectors[name] = _decode(scheme, body[at:end], size, shared)
        at = end
    return vectors


def split_bit(body: bytes, answers: bool) -> tuple[int | None, bytes]:
    """The device's bit, where devices answer by one, and the rest of ``body``. Raises BodyRefused."""
    if not answers:
        return None, body
    if body[:1] not in (b"\x00", b"\x01"):
        raise BodyRefused("the body does not begin with a bit")
    return body[0], body[1:]


def most_payload(scheme: Scheme | None, vectors: int, size: int, answers: bool = False) -> int:
    """The longest body of ``vectors`` vectors [``size``], perhaps with a bit: what a server need accept."""
    each = 4 * size if scheme is None else scheme.most_bytes(size)
    return vectors * each + (vectors - 1) * _LENGTH + answers


def _decode(scheme: Scheme | None, body: bytes, size: int, shared: int) -> Array:
    if scheme is not None:
        return scheme.decode(body, size, shared)
    if len(body) != 4 * size:
        raise BodyRefused(f"{len(body)} bytes are not {size} float32")
    return np.frombuffer(body, "<f4").astype(np.float32)
