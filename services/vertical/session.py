"""How parties begin together, and begin again when one was lost: a state machine without I/O.

Each party has an *incarnation* (a random boot, a count) with the labels of the checkpoints it could go on from. A
*view* is everybody's incarnation with labels; an *attempt* begins at a party when all parties say that they hold its
view. Messages carry the attempt, and those of another one are not taken. When a peer shows a new incarnation, an
attempt is over at once: this party takes a new incarnation, too, and all meet again.

    gathering ──everybody holds our view──► running ──our role ended──► done ──all are done──► (leave)
        ▲                                      │                          │
        └──────── a peer's new incarnation ────┴──────────────────────────┘      any ──a fault──► failed

A party that is done and comes back says so, with the view of its result; it joins another attempt only while somebody
is not done, or is done with another attempt.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from federated.vertical.parties import MOST_REASON, Draw, PeerAborted, PeerFault
from services.vertical.channel import MOST_UNITS, Channel, ChannelLimits, Unit

PROTOCOL: Final = 1
MOST_JOB: Final = 16_384
MOST_LABELS: Final = 16
BOOT_BYTES: Final = 8
VIEW_BYTES: Final = 16
Phase = Literal["gathering", "running", "done", "failed"]


class Status(msgspec.Struct, array_like=True, frozen=True):
    """What a party says of itself with every frame. New fields go to the end, with defaults.

    ``view``: that it holds; when it is done, of its result. ``durable``: the label of the last checkpoint on its disk,
    -1 for none. ``job``: the text that all have to agree on, while gathering. ``version``: rises with every change,
    since words may overtake each other on the way.
    """

    protocol: int
    boot: bytes
    version: int
    count: int
    labels: tuple[int, ...]
    view: bytes
    phase: Phase
    durable: int
    fingerprint: bytes
    job: bytes = b""
    reason: str = ""


class Frame(msgspec.Struct, array_like=True, frozen=True):
    """A call's body, or its answer's. ``units``: (number, kind, last), their data in the call's arrays.

    ``received``: the sender has all our units of its attempt up to this. ``wait_ms``: a caller that waits so long for
    units and news; 0 for an answer at once. ``heard_boot``, ``heard_version``: the last word heard of the receiver.
    """

    status: Status
    attempt: bytes
    received: int
    units: tuple[tuple[int, str, bool], ...] = ()
    wait_ms: int = 0
    heard_boot: bytes = b""
    heard_version: int = 0


@dataclass(frozen=True, slots=True)
class Attempt:
    """What all agreed on: go on from ``label`` (-1: from nothing)."""

    view: bytes
    label: int


@dataclass(slots=True)
class _Peer:
    channel: Channel
    status: Status | None = None
    heard_s: float = float("-inf")
    told: int = 0
    knows_done: bool = False


class Session:
    """One party's side. Used under one lock; times are monotonic seconds."""

    def __init__(
        self,
        peers: Sequence[str],
        job: Mapping[str, object],
        *,
        labels: Sequence[int] = (),
        done: bytes = b"",
        limits: ChannelLimits | None = None,
        draw: Draw = os.urandom,
        me: str = "",
    ) -> None:
        """``job``: what all parties have to agree on (JSON). ``done``: the view of the attempt whose result is on this
        party's disk already; empty for none."""
        self.me = me
        self._job = job_text(job)
        self._fingerprint = hashlib.sha256(self._job).digest()
        self._peers = {name: _Peer(Channel(name, limits or ChannelLimits())) for name in peers}
        self._boot, self._count = draw(BOOT_BYTES), 0
        self._labels: tuple[int, ...] = ()
        self._attempt: Attempt | None = None
        self.durable = -1
        self.phase: Phase = "gathering"
        self.reason = ""
        self.interrupted = False
        self.fault: PeerFault | None = None
        self.version = 0
        """Rises whenever peers should hear of us."""
        self.begin(labels)
        if done:
            self.phase, self._result = "done", done

    def begin(self, labels: Sequence[int]) -> None:
        """Take a new incarnation that could go on from ``labels``, and gather."""
        self._count += 1
        self._labels = tuple(sorted(labels))[-MOST_LABELS:]
        self.durable = max(self._labels, default=-1)
        self._attempt, self.phase, self.interrupted = None, "gathering", False
        self._result = b""
        for peer in self._peers.values():
            peer.channel.reset()
            peer.knows_done = False
        self.version += 1

    def _view(self) -> bytes:
        """The view that we hold; empty where somebody was not heard yet."""
        hashed = hashlib.sha256(self._fingerprint)
        own = (self.me, self._boot, self._count, self._labels)
        members = [own]
        for name, peer in self._peers.items():
            if peer.status is None:
                return b""
            members.append((name, peer.status.boot, peer.status.count, peer.status.labels))
        for name, boot, count, labels in sorted(members):
            hashed.update(repr((name, boot.hex(), count, labels)).encode())
        return hashed.digest()[:VIEW_BYTES]

    def status(self) -> Status:
        """What peers hear of us."""
        view = self._attempt.view if self._attempt is not None else self._view()
        if self.phase == "done":
            view = self._result
        return Status(
            PROTOCOL,
            self._boot,
            self.version,
            self._count,
            self._labels,
            view,
            self.phase,
            self.durable,
            self._fingerprint,
            self._job if self._attempt is None else b"",
            self.reason,
        )

    def agreed(self) -> Attempt | None:
        """The attempt that may begin, once everybody holds our view; the session is running then."""
        if self.phase != "gathering" or not (view := self._view()):
            return None
        statuses = [peer.status for peer in self._peers.values() if peer.status is not None]
        if any(status.view != view for status in statuses):
            return None
        common = set(self._labels).intersection(*(status.labels for status in statuses))
        self._attempt = Attempt(view, max(common, default=-1))
        self.phase = "running"
        self.durable = self._attempt.label
        self.version += 1
        return self._attempt

    def finished(self) -> None:
        """Our role ended and its result is on disk."""
        assert self._attempt is not None
        self.phase, self._result = "done", self._attempt.view
        self.version += 1

    def leaves(self) -> None:
        """All parties are done: one last word, which says that we heard so."""
        self.version += 1

    def failed(self, reason: str) -> None:
        """Our part is over without a result; peers are told ``reason``."""
        self.phase, self.reason = "failed", reason[:MOST_REASON]
        self.version += 1

    def kept(self, label: int) -> None:
        """The checkpoint ``label`` is on our disk."""
        self.durable = label
        self.version += 1

    def behind(self, label: int) -> str | None:
        """A peer whose checkpoint ``label`` is not on its disk yet; None when all have it."""
        for name, peer in self._peers.items():
            if peer.status is None or (peer.status.durable < label and peer.status.phase != "done"):
                return name
        return None

    def all_done(self) -> bool:
        """Whether every party has its result, and knows that we have ours."""
        return self.phase == "done" and all(
            peer.knows_done and peer.status is not None and peer.status.phase == "done"
            for peer in self._peers.values()
        )

    def peers_done(self) -> bool:
        """Whether every peer has its result."""
        return all(peer.status is not None and peer.status.phase == "done" for peer in self._peers.values())

    def all_told(self) -> bool:
        """Whether every peer heard our newest status."""
        return all(peer.told >= self.version for peer in self._peers.values())

    def has_room(self, to: str) -> bool:
        """Whether ``put`` may take one more message for ``to``."""
        return self._peers[to].channel.has_room

    def put(self, to: str, kind: str, body: bytes) -> None:
        """Send a message in the attempt that runs."""
        self._peers[to].channel.put(kind, body)

    def channel(self, peer: str) -> Channel:
        """The messages from and to ``peer``."""
        return self._peers[peer].channel

    def silent_s(self, peer: str, now_s: float) -> float:
        """How long ``peer`` was not heard."""
        return now_s - self._peers[peer].heard_s

    def frame(self, peer: str, *, units: bool, wait_ms: int = 0) -> tuple[Frame, list[bytes], int]:
        """What to send to ``peer``: the frame, its units' data, and the version of our status in it."""
        channel = self._peers[peer].channel
        out = channel.outgoing() if units and self._attempt is not None else []
        attempt = b"" if self._attempt is None else self._attempt.view
        described = tuple((unit.number, unit.kind, unit.last) for unit in out)
        heard = self._peers[peer].status
        boot, version = (b"", 0) if heard is None else (heard.boot, heard.version)
        frame = Frame(self.status(), attempt, channel.received, described, wait_ms, boot, version)
        return frame, [unit.data for unit in out], self.version

    def has_news(self, peer: str) -> bool:
        """Whether ``peer`` should hear of us: units that wait, or a status it has not heard."""
        found = self._peers[peer]
        return found.told < self.version or (self._attempt is not None and found.channel.pending)

    def was_told(self, peer: str, version: int) -> None:
        """``peer`` has our status of that version."""
        found = self._peers[peer]
        found.told = max(found.told, version)
        if self.phase == "done" and version >= self.version:
            found.knows_done = True

    def hear(self, peer: str, frame: Frame, data: Sequence[bytes], now_s: float) -> None:
        """A frame of ``peer``, whom the transport proved. A fault is kept in ``fault``: this session cannot go on."""
        found = self._peers[peer]
        found.heard_s = now_s
        try:
            self._hear_status(peer, found, frame.status)
            if frame.heard_boot == self._boot:
                self.was_told(peer, min(frame.heard_version, self.version))
            if self._attempt is not None and frame.attempt == self._attempt.view and not self.interrupted:
                found.channel.confirmed(frame.received)
                if len(data) != len(frame.units) or len(data) > MOST_UNITS:
                    raise PeerFault(
                        peer, "malformed", f"{len(frame.units)} parts described, {len(data)} sent"
                    )
                units = [Unit(*told, one) for told, one in zip(frame.units, data, strict=True)]
                found.channel.take_in(units)
        except PeerFault as fault:
            self.fault = self.fault or fault

    def _hear_status(self, peer: str, found: _Peer, status: Status) -> None:
        if status.protocol != PROTOCOL:
            raise PeerFault(
                peer, "protocol", f"speaks version {status.protocol}, this side speaks {PROTOCOL}"
            )
        if status.fingerprint != self._fingerprint:
            raise PeerFault(peer, "job", difference(self._job, status.job))
        if len(status.labels) > MOST_LABELS or len(status.boot) != BOOT_BYTES:
            raise PeerFault(peer, "malformed", "an impossible status")
        before = found.status
        if before is not None and before.boot == status.boot and before.version > status.version:
            return
        found.status = status
        if status.phase == "failed":
            raise PeerAborted(peer, "gave up", status.reason[:MOST_REASON])
        changed = before is None or (before.boot, before.count) != (status.boot, status.count)
        if changed:
            found.knows_done = False
            # Whoever was told before is not who listens now.
            found.told = 0 if before is None or before.boot != status.boot else found.told
        if self.phase == "gathering" and changed:
            self.version += 1  # Our view is another one now.
        if self.phase == "running" and changed:
            self.interrupted = True
        if self.phase == "done" and status.phase == "gathering" and (changed or self._attempt is None):
            self.interrupted = True
        if self.phase == "done" and status.phase == "done" and status.view != self._result:
            # Whoever came back had finished an older attempt: parts of different runs do not fit together.
            self.interrupted = True


def job_text(job: Mapping[str, object]) -> bytes:
    """The text of ``job`` that all parties compare. Raises ValueError where it is too long."""
    text = json.dumps(job, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    if len(text) > MOST_JOB:
        raise ValueError(f"a job of {len(text)} bytes; at most {MOST_JOB}")
    return text


def difference(ours: bytes, theirs: bytes) -> str:
    """What two jobs differ in, for people."""
    try:
        here, there = _flat(json.loads(ours)), _flat(json.loads(theirs[:MOST_JOB]))
    except (ValueError, RecursionError):
        return "another job"
    names = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    told = [
        f"{name} is {here.get(name, 'absent')} here, {there.get(name, 'absent')} there" for name in names[:5]
    ]
    return ("another job: " + "; ".join(told))[:MOST_REASON]


def _flat(value: object, at: str = "") -> dict[str, str]:
    if not isinstance(value, dict):
        return {at: json.dumps(value)[:80]}
    found: dict[str, str] = {}
    for name, inner in value.items():
        found |= _flat(inner, f"{at}.{name}" if at else str(name))
    return found
