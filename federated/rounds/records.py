"""The records that servers share: one Header per job, one Entry per client of an iteration, one Slot per counted
upload. Their size does not depend on how many clients there are.

Header and Entry are named tuples since they are changed with every request, which takes a tenth of the time so.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

from federated.rounds.phases import Event, Phase

FORMAT = 1
FLIGHT_SLICES = 8  # of a client's window, in buffered mode
DIGEST_BYTES = 16


class RecordRefused(ValueError):
    """Bytes that are no record of this format: another version wrote them, or the store is damaged."""


class Header(NamedTuple):
    """A job's state: counters only.

    ``iteration`` counts from 1, valid or not; ``version`` counts aggregated models, 0 before the first. ``clock`` is
    the latest time that any server brought: earlier times count as this one. ``opened_at`` (first request) and
    ``first_upload_at`` are None before they happen, ``phase_at`` is the phase's start. ``next_uploads`` counts for
    the buffer after the one being aggregated. ``flights`` counts clients in training by the slice of time in which
    they started, the newest (``flight_slice``) last. ``took_s`` is how long the last valid iteration took,
    ``attempt`` which attempt at its aggregation made the model of ``version``. ``releases`` counts iterations that
    entered aggregation, whatever became of them: what is taken from a budget of privacy.
    """

    phase: Phase
    iteration: int = 1
    version: int = 0
    clock: float = 0.0
    opened_at: float | None = None
    phase_at: float = 0.0
    first_upload_at: float | None = None
    starts: int = 0
    uploads: int = 0
    next_uploads: int = 0
    flights: tuple[int, ...] = (0,) * (FLIGHT_SLICES + 1)
    flight_slice: int = 0
    took_s: float = 0.0
    valid: int = 0
    invalid: int = 0
    stop_wanted: bool = False
    attempt: int = 0
    releases: int = 0

    @property
    def began(self) -> float:
        """When the iteration had its first request; the clock before it."""
        return self.clock if self.opened_at is None else self.opened_at

    @property
    def in_flight(self) -> int:
        """Clients in training that may still come back (buffered mode)."""
        return sum(self.flights)

    def to_bytes(self) -> bytes:
        """JSON, with the format's version first."""
        return json.dumps({"format": FORMAT, **self._asdict()}, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, body: bytes) -> Header:
        """Raises RecordRefused."""
        fields = _json(body, _HEADER_FIELDS)
        try:
            fields["phase"] = Phase(str(fields["phase"]))
            fields["flights"] = tuple(int(count) for count in fields["flights"])
        except (TypeError, ValueError) as error:
            raise RecordRefused(f"a header has an impossible phase or flights: {error}") from None
        return cls(**fields)


class Entry(NamedTuple):
    """One client's part in one iteration. ``slot`` is -1 until its upload is counted, then its number."""

    iteration: int
    version: int
    started_at: float
    slot: int = -1
    digest: bytes = bytes(DIGEST_BYTES)

    @property
    def counted(self) -> bool:
        """Whether the client's upload is counted."""
        return self.slot >= 0

    def to_bytes(self) -> bytes:
        """41 bytes."""
        return _ENTRY.pack(FORMAT, self.iteration, self.version, self.started_at, self.slot, self.digest)

    @classmethod
    def from_bytes(cls, body: bytes) -> Entry:
        """Raises RecordRefused."""
        if len(body) != _ENTRY.size or body[0] != FORMAT:
            raise RecordRefused(f"{len(body)} bytes are no entry of format {FORMAT}")
        return cls(*_ENTRY.unpack(body)[1:])


@dataclass(frozen=True, slots=True)
class Slot:
    """A counted upload: where its body is (client, digest) and what it weighs.

    ``iteration`` and ``index`` say in which sum it belongs, ``started`` in which iteration the client started
    and from which ``version``. ``staleness`` and ``weight`` are as expected when it was counted: ``Desk.slots`` gives
    those of the version that the sum is applied to.
    """

    iteration: int
    index: int
    client: str
    started: int
    digest: bytes
    examples: int
    steps: int
    loss: float
    staleness: int
    weight: float
    version: int = 0

    def to_bytes(self) -> bytes:
        """65 bytes and the client's id."""
        return (
            _SLOT.pack(
                FORMAT, self.iteration, self.index, self.started, self.digest, self.examples, self.steps,
                self.loss, self.staleness, self.weight, self.version,
            )
            + self.client.encode()
        )  # fmt: skip

    @classmethod
    def from_bytes(cls, body: bytes) -> Slot:
        """Raises RecordRefused."""
        if len(body) <= _SLOT.size or body[0] != FORMAT:
            raise RecordRefused(f"{len(body)} bytes are no slot of format {FORMAT}")
        _, iteration, index, started, digest, examples, steps, loss, staleness, weight, version = (
            _SLOT.unpack_from(body)
        )
        try:
            client = body[_SLOT.size :].decode()
        except UnicodeDecodeError:
            raise RecordRefused("a slot's client is not UTF-8") from None
        return cls(
            iteration, index, client, started, digest, examples, steps, loss, staleness, weight, version
        )


@dataclass(frozen=True, slots=True)
class Closed:
    """How an iteration ended: what the log of a job consists of. ``releases`` are those of the job so far."""

    iteration: int
    version: int
    valid: bool
    why: Event
    starts: int
    uploads: int
    opened_at: float
    closed_at: float
    releases: int = 0

    def to_bytes(self) -> bytes:
        """JSON, with the format's version first."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, body: bytes) -> Closed:
        """Raises RecordRefused."""
        fields = _json(body, tuple(field.name for field in dataclasses.fields(cls)))
        try:
            fields["why"] = Event(str(fields["why"]))
        except ValueError as error:
            raise RecordRefused(f"an iteration ended for no known reason: {error}") from None
        return cls(**fields)


_HEADER_FIELDS = Header._fields
_APPENDED = frozenset({"releases"})
_ENTRY = struct.Struct("<BIIdi16s4x")
_SLOT = struct.Struct("<BIII16sIIdIdI4x")


def _json(body: bytes, names: tuple[str, ...]) -> dict[str, Any]:
    """A record's fields. Those _APPENDED may be missing: an older version wrote it."""
    try:
        fields = json.loads(body)
    except ValueError:
        raise RecordRefused("a record is not JSON") from None
    if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
        raise RecordRefused(f"a record is not of format {FORMAT}")
    if not set(names) - _APPENDED <= set(fields) <= set(names):
        raise RecordRefused(f"a record has not the fields of format {FORMAT}")
    return fields
