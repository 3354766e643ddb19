"""An iteration of secure aggregation as the servers share it: a small header, an entry per client, pure transitions.

Any of the servers runs any transition on the records that all of them share, as in ``federated.rounds``. A stage closes
when everybody who answered the one before has answered it, or when its window ends with at least ``plan.least``; else
the iteration has failed. Earlier times than the header's ``clock`` count as the clock.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from federated.secagg.messages import bitmap, everybody, is_member, positions_of, size_of
from federated.secagg.settings import Plan
from federated.secagg.stages import Stage

FORMAT: Final = 1
DIGEST_BYTES: Final = 16
ANSWERED: Final = 6  # stages that clients answer
GRACE: Final = 1 / 30
"""Of a stage's window: how long UNMASK still waits once every secret has the shares it needs."""
_NONE: Final = bytes(DIGEST_BYTES)

Code = Literal[
    "late", "full", "not_in_roster", "dropped", "different_body", "bad_message", "duplicate_key", "failed"
]


class RecordRefused(ValueError):
    """Bytes that are no record of this format: another version wrote them, or the store is damaged."""


class Header(NamedTuple):
    """Where an iteration stands. ``stage_at``: when its stage began; ``expected``: how many clients were admitted, 0
    while that is not known; ``clients`` advertised. The bitmaps say who answered a stage. ``reason``: of a failure.
    ``enough_at``: when UNMASK had the shares it needs; None before."""

    stage: Stage = Stage.ADVERTISE
    clock: float = 0.0
    stage_at: float = 0.0
    expected: int = 0
    clients: int = 0
    chosen: bytes = b""
    shared: bytes = b""
    masked: bytes = b""
    signed: bytes = b""
    unmasked: bytes = b""
    reason: str = ""
    enough_at: float | None = None

    def answered(self, stage: Stage) -> bytes:
        """The bitmap of those who answered ``stage``."""
        if stage is Stage.ADVERTISE:
            return everybody(self.clients)
        bits: bytes = getattr(self, _BITMAPS[stage])
        return bits or bytes(-(-self.clients // 8))

    def members(self, stage: Stage) -> tuple[int, ...]:
        """The positions of those who answered ``stage``, ascending."""
        return positions_of(self.answered(stage), self.clients)

    def to_bytes(self) -> bytes:
        """JSON, with the format's version first."""
        fields = {
            name: value.hex() if isinstance(value, bytes) else value for name, value in self._asdict().items()
        }
        return json.dumps({"format": FORMAT, **fields}, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, body: bytes) -> Header:
        """Raises RecordRefused."""
        try:
            fields = json.loads(body)
            if fields.pop("format") != FORMAT or {"enough_at": None, **fields}.keys() != set(cls._fields):
                raise RecordRefused(f"a header of secure aggregation is not of format {FORMAT}")
            fields["stage"] = Stage(fields["stage"])
            fields |= {name: bytes.fromhex(fields[name]) for name in _BITMAPS.values()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RecordRefused(f"no header of secure aggregation: {error}") from None
        return cls(**fields)


class Entry(NamedTuple):
    """One client's part: its position in the roster, and the digest of what it answered to each stage."""

    position: int
    digests: tuple[bytes, ...] = (_NONE,) * ANSWERED

    def to_bytes(self) -> bytes:
        """99 bytes."""
        return _ENTRY.pack(FORMAT, self.position) + b"".join(self.digests)

    @classmethod
    def from_bytes(cls, body: bytes) -> Entry:
        """Raises RecordRefused."""
        if len(body) != _ENTRY.size + ANSWERED * DIGEST_BYTES or body[0] != FORMAT:
            raise RecordRefused(f"{len(body)} bytes are no entry of secure aggregation of format {FORMAT}")
        digests = (body[at : at + DIGEST_BYTES] for at in range(_ENTRY.size, len(body), DIGEST_BYTES))
        return cls(_ENTRY.unpack_from(body)[1], tuple(digests))


@dataclass(frozen=True, slots=True)
class Taken:
    """The message counts."""

    repeated: bool = False


@dataclass(frozen=True, slots=True)
class Waiting:
    """The stage before is still open: ask again, at the latest in ``come_back_s``."""

    stage: Stage
    come_back_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """Refused for good, in this iteration."""

    code: Code
    reason: str


Reply = Taken | Waiting | Refused


@dataclass(frozen=True, slots=True)
class Decision:
    """What a transition made. ``counted``: the message counts now, so it must be kept."""

    header: Header
    entry: Entry | None = None
    reply: Reply | None = None
    counted: bool = False


_BITMAPS: Final = {
    Stage.CHOOSE: "chosen",
    Stage.SHARE: "shared",
    Stage.MASKED: "masked",
    Stage.CONSISTENT: "signed",
    Stage.UNMASK: "unmasked",
}
_ENTRY: Final = struct.Struct("<BH")


@dataclass(frozen=True, slots=True)
class Session:
    """The rules. ``own_uploads``: masked vectors are counted here; else somebody else counts them (the rounds), and
    ``close_masked`` says whose are in the sum."""

    plan: Plan
    own_uploads: bool = False

    def init(self, now: float, expected: int = 0) -> Header:
        """The iteration before its first message."""
        return Header(clock=now, stage_at=now, expected=expected)

    def expect(self, header: Header, expected: int, now: float) -> Header:
        """``expected`` clients were admitted, and no more will be: the window of ADVERTISE opens. Said again, it
        changes nothing."""
        header = self._at(header, now)
        if header.stage is Stage.ADVERTISE and not header.expected:
            header = header._replace(expected=expected, stage_at=header.clock)
        return self._settle(header)

    def tick(self, header: Header, now: float) -> Header:
        """Apply the window, if it has run out by ``now``."""
        return self._settle(self._at(header, now))

    def receive(
        self,
        header: Header,
        entry: Entry | None,
        stage: Stage,
        digest: bytes,
        now: float,
        known_key: bool = False,
    ) -> Decision:
        """A client's sound message for ``stage``, with the ``digest`` (16 bytes) of its bytes. ``entry``: the client's
        part so far; ``known_key``: another client has advertised one of these keys. Gives Taken, Waiting or Refused."""
        if stage not in self.plan.stages or (stage is Stage.MASKED and not self.own_uploads):
            raise ValueError(f"{stage.name} is not answered here")
        header = self._settle(self._at(header, now))
        if entry is not None and entry.digests[stage] != _NONE:
            same = entry.digests[stage] == digest
            reply = (
                Taken(repeated=True)
                if same
                else Refused("different_body", f"answered {stage.name} differently")
            )
            return Decision(header, entry, reply)
        refusal = self._not_now(header, entry, stage)
        if refusal is None and known_key:
            refusal = Refused("duplicate_key", "another client has advertised one of these keys")
        if refusal is not None:
            return Decision(header, entry, refusal)
        if stage is Stage.ADVERTISE:
            entry = Entry(header.clients)
            header = header._replace(clients=header.clients + 1)
        else:
            assert entry is not None
            header = _with(header, stage, _added(header.answered(stage), entry.position))
        digests = (*entry.digests[:stage], digest, *entry.digests[stage + 1 :])
        return Decision(self._settle(header), entry._replace(digests=digests), Taken(), counted=True)

    def may_read(self, header: Header, entry: Entry | None, stage: Stage) -> Waiting | Refused | None:
        """Whether a client may have what it needs in order to answer ``stage``: None if so. ``header`` is settled."""
        return self._not_now(header, entry, stage)

    def close_masked(self, header: Header, survivors: Iterable[int], now: float) -> Header:
        """The masked vectors of ``survivors`` (positions) are in the sum, and no others. Closing again changes nothing.
        Raises ValueError for one who never shared: its vector is not masked as it must be."""
        header = self._at(header, now)
        if header.stage is not Stage.MASKED:
            return header
        members = sorted(set(survivors))
        strangers = set(members) - set(header.members(Stage.SHARE))
        if strangers:
            raise ValueError(f"positions {sorted(strangers)[:10]} have shared no secrets")
        bits = bitmap(members, header.clients)
        return self._settle(self._close(_with(header, Stage.MASKED, bits)))

    def enough(self, header: Header) -> Header:
        """Every secret has the shares it needs: who has not answered UNMASK by now may have vanished after its upload,
        and is not waited for as long. Said again, it changes nothing."""
        if header.stage is not Stage.UNMASK or header.enough_at is not None:
            return header
        return header._replace(enough_at=header.clock)

    def finish(self, header: Header, now: float) -> Header:
        """The sum is revealed."""
        return self._at(header, now)._replace(stage=Stage.DONE) if header.stage is Stage.REVEAL else header

    def fail(self, header: Header, reason: str, now: float) -> Header:
        """The sum cannot be revealed, or the iteration ended otherwise."""
        if header.stage.over:
            return header
        return self._at(header, now)._replace(stage=Stage.FAILED, reason=reason[:400])

    def deadline(self, header: Header) -> float | None:
        """When the stage's window ends; None where there is none: before it is known who was admitted, and where
        others count the uploads."""
        timed = self._closes_here(header.stage) and not (
            header.stage is Stage.ADVERTISE and not header.expected
        )
        if not timed:
            return None
        ends = header.stage_at + self.plan.stage_window_s
        if header.enough_at is None:
            return ends
        return min(ends, header.enough_at + GRACE * self.plan.stage_window_s)

    # How stages close.

    def _at(self, header: Header, now: float) -> Header:
        return header._replace(clock=max(header.clock, now))

    def _settle(self, header: Header) -> Header:
        while self._closes_here(header.stage):
            ends = self.deadline(header)
            if self._count(header) < self._due(header) and (ends is None or header.clock <= ends):
                break
            header = self._close(header)
        return header

    def _closes_here(self, stage: Stage) -> bool:
        return stage in self.plan.stages and (self.own_uploads or stage is not Stage.MASKED)

    def _count(self, header: Header) -> int:
        return header.clients if header.stage is Stage.ADVERTISE else size_of(header.answered(header.stage))

    def _due(self, header: Header) -> int:
        if header.stage is Stage.ADVERTISE:
            return min(header.expected or self.plan.most, self.plan.most)
        return size_of(header.answered(self._before(header.stage)))

    def _before(self, stage: Stage) -> Stage:
        return self.plan.stages[self.plan.stages.index(stage) - 1]

    def _close(self, header: Header) -> Header:
        answered, stages = self._count(header), self.plan.stages
        needed = self.plan.least if header.stage <= Stage.MASKED else self.plan.opening
        if answered < needed:
            reason = f"{answered} clients answered {header.stage.name}, {needed} are needed"
            return header._replace(stage=Stage.FAILED, reason=reason)
        place = stages.index(header.stage) + 1
        following = stages[place] if place < len(stages) else Stage.REVEAL
        return header._replace(stage=following, stage_at=header.clock)

    def _not_now(self, header: Header, entry: Entry | None, stage: Stage) -> Waiting | Refused | None:
        if header.stage is Stage.FAILED:
            return Refused("failed", header.reason)
        if header.stage > stage:
            return Refused("late", f"{stage.name} is over")
        if stage is Stage.ADVERTISE:
            return Refused("full", "the roster is full") if header.clients >= self.plan.most else None
        if header.stage > Stage.ADVERTISE and entry is None:
            return Refused("not_in_roster", "this client has not advertised its keys")
        if entry is not None:
            for before in self.plan.stages[1 : self.plan.stages.index(stage)]:
                # Whoever missed a stage that is over has dropped out; one that is open may still be answered.
                if before < header.stage and not is_member(header.answered(before), entry.position):
                    return Refused("dropped", f"{before.name} ended without this client")
        if header.stage < stage:
            ends = self.deadline(header)
            return Waiting(
                header.stage, self.plan.stage_window_s if ends is None else max(ends - header.clock, 0.0)
            )
        return None


def _with(header: Header, stage: Stage, bits: bytes) -> Header:
    fields = {_BITMAPS[stage]: bits}
    return Header(**{**header._asdict(), **fields})


def _added(bits: bytes, position: int) -> bytes:
    changed = bytearray(bits)
    changed[position >> 3] |= 1 << (position & 7)
    return bytes(changed)
