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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from federated.vertical.parties import MOST_REASON, Draw, PeerAborted, PeerFault
from services.vertical.channel import MOST_UNITS, Channel, ChannelLimits, Unit

PROTOCOL: Final = 3
MOST_JOB: Final = 16_384
MOST_LABELS: Final = 16
MOST_RUN: Final = 64
BOOT_BYTES: Final = 8
VIEW_BYTES: Final = 16
MOST_WAITS: Final = 64
MOST_TURNS_BACK: Final = 3
"""How often a process may be heard again that another one of its party replaced: words on their way come once."""
MOST_BEGINNINGS: Final = 200
"""How often a peer's process may be started again without a new checkpoint."""
MOST_BOOTS: Final = 16
UNHEARD_S: Final = 30.0
"""Who was not heard for so long could not be seen to move."""
Phase = Literal["gathering", "running", "done", "failed"]


class Status(msgspec.Struct, array_like=True, frozen=True):
    """What a party says of itself with every frame. New fields go to the end, with defaults.

    ``view``: that it holds; when it is done, of its result. ``durable``: the label of the last checkpoint on its disk,
    -1 for none. ``job``: the text that all have to agree on, while gathering. ``version``: rises with every change,
    since words may overtake each other on the way. ``work``: rises with all that its role gets done, or that it is
    sent or has confirmed; ``waits``: the parties that its role waits for, none while it computes. ``runs``: in which
    each of ``labels`` was made.
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
    work: int = 0
    waits: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()


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
    moved_s: float = float("-inf")
    replaced: dict[bytes, int] = field(
        default_factory=dict
    )  # boots that another took the place of: how often again
    beginnings: int = 0


@dataclass(frozen=True, slots=True)
class Blocked:
    """Nobody that this party waits for moves. ``peer``: whose turn it is, ``detail``: for people."""

    peer: str
    detail: str


class Session:
    """One party's side. Used under one lock; times are monotonic seconds."""

    def __init__(
        self,
        peers: Sequence[str],
        job: Mapping[str, object],
        *,
        labels: Sequence[int] = (),
        runs: Mapping[int, str] | None = None,
        done: bytes = b"",
        limits: ChannelLimits | None = None,
        draw: Draw = os.urandom,
        me: str = "",
        work: Callable[[], int] = lambda: 0,
    ) -> None:
        """``job``: what all parties have to agree on (JSON). ``done``: the view of the attempt whose result is on this
        party's disk already; empty for none. ``work``: how much our role got done, rising."""
        self.me = me
        self.waits: tuple[str, ...] = ()
        """Whom our role waits for."""
        self._work = work
        self._job = job_text(job)
        self._fingerprint = hashlib.sha256(self._job).digest()
        self._peers = {name: _Peer(Channel(name, limits or ChannelLimits())) for name in peers}
        self._boot, self._count = draw(BOOT_BYTES), 0
        self._labels: tuple[int, ...] = ()
        self._runs: tuple[str, ...] = ()
        self._attempt: Attempt | None = None
        self.durable = -1
        self.phase: Phase = "gathering"
        self.reason = ""
        self.interrupted = False
        self.fault: PeerFault | None = None
        self.version = 0
        """Rises whenever peers should hear of us."""
        self.begin(labels, runs)
        if done:
            self.phase, self._result = "done", done

    def begin(self, labels: Sequence[int], runs: Mapping[int, str] | None = None) -> None:
        """Take a new incarnation that could go on from ``labels``, and gather. ``runs``: in which each was made;
        checkpoints of different runs do not fit together, whatever their labels."""
        self._count += 1
        self._labels = tuple(sorted(labels))[-MOST_LABELS:]
        self._runs = tuple((runs or {}).get(label, "") for label in self._labels)
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
        own = (self.me, self._boot, self._count, self._labels, self._runs)
        members = [own]
        for name, peer in self._peers.items():
            if peer.status is None:
                return b""
            told = peer.status
            members.append((name, told.boot, told.count, told.labels, told.runs))
        for name, boot, count, labels, runs in sorted(members):
            hashed.update(repr((name, boot.hex(), count, labels, runs)).encode())
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
            self._moves(),
            self.waits,
            self._runs,
        )

    def _moves(self) -> int:
        counts = [peer.channel.counts for peer in self._peers.values()]
        return self._work() + sum(one.received_total + one.confirmed_total for one in counts)

    def agreed(self) -> Attempt | None:
        """The attempt that may begin, once everybody holds our view; the session is running then."""
        if self.phase != "gathering" or not (view := self._view()):
            return None
        statuses = [peer.status for peer in self._peers.values() if peer.status is not None]
        if any(status.view != view for status in statuses):
            return None
        held = [zip(status.labels, status.runs, strict=True) for status in statuses]
        common = set(zip(self._labels, self._runs, strict=True)).intersection(*held)
        self._attempt = Attempt(view, max((label for label, _ in common), default=-1))
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

    def behind(self, label: int) -> tuple[str, ...]:
        """The peers whose checkpoint ``label`` is not on their disk yet."""
        return tuple(
            name
            for name, peer in self._peers.items()
            if peer.status is None or (peer.status.durable < label and peer.status.phase != "done")
        )

    @property
    def result(self) -> bytes:
        """The view of the attempt whose result is on our disk; empty for none."""
        return self._result

    def all_done(self) -> bool:
        """Whether every party has its result, and knows that we have ours."""
        return self.phase == "done" and all(
            peer.knows_done and peer.status is not None and peer.status.phase == "done"
            for peer in self._peers.values()
        )

    def not_done(self) -> tuple[str, ...]:
        """The peers that have no result yet."""
        return tuple(
            name for name, peer in self._peers.items() if peer.status is None or peer.status.phase != "done"
        )

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

    def blocked(self, since_s: float, now_s: float, stuck_s: float, locked_s: float) -> Blocked | None:
        """Whoever ends our wait for ``waits``, begun at ``since_s``, and has not moved for ``stuck_s``; None while
        somebody moves, or is not heard (that is silence, see ``silent_s``).

        A peer that waits itself is not to blame, but whom it waits for. Where all wait for each other nobody can go
        on: ``locked_s`` is enough to be sure of that. All of it is the peers' own word.
        """
        reached: dict[str, tuple[str, ...]] = {}
        ahead = list(self.waits)
        while ahead:
            name = ahead.pop(0)
            status = self._peers[name].status if name in self._peers else None
            if name not in reached and status is not None:
                reached[name] = status.waits
                ahead += status.waits
        if not reached or any(self.silent_s(name, now_s) >= UNHEARD_S for name in reached):
            return None
        still_s = now_s - max([since_s, *(self._peers[name].moved_s for name in reached)])
        idle = [name for name, waits in reached.items() if not waits]
        if still_s < (stuck_s if idle else min(stuck_s, locked_s)):
            return None
        told = "; ".join(
            f"{name} waits for {' and '.join(waits)}" for name, waits in reached.items() if waits
        )
        if idle:
            aside = f" ({told})" if told else ""
            return Blocked(idle[0], f"is there, but has done nothing for {still_s:.0f} s{aside}")
        return Blocked(next(iter(reached)), f"everybody has waited for {still_s:.0f} s: {told}")

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
        if now_s - found.heard_s > UNHEARD_S:
            found.moved_s = now_s
        found.heard_s = now_s
        try:
            self._hear_status(peer, found, frame.status, now_s)
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

    def _hear_status(self, peer: str, found: _Peer, status: Status, now_s: float) -> None:
        if status.protocol != PROTOCOL:
            raise PeerFault(
                peer, "protocol", f"speaks version {status.protocol}, this side speaks {PROTOCOL}"
            )
        if status.fingerprint != self._fingerprint:
            raise PeerFault(peer, "job", difference(self._job, status.job))
        too_many = len(status.labels) > MOST_LABELS or len(status.waits) > MOST_WAITS
        unmade = len(status.runs) != len(status.labels) or any(len(run) > MOST_RUN for run in status.runs)
        if too_many or unmade or len(status.boot) != BOOT_BYTES or len(status.job) > MOST_JOB:
            raise PeerFault(peer, "malformed", "an impossible status")
        before = found.status
        if before is not None and before.boot == status.boot and before.version > status.version:
            return
        found.status = status
        if status.phase == "failed":
            raise PeerAborted(peer, "gave up", status.reason[:MOST_REASON])
        changed = before is None or (before.boot, before.count) != (status.boot, status.count)
        if before is not None and status.durable > before.durable:
            found.beginnings = 0
        if changed or (before is not None and status.work > before.work):
            found.moved_s = now_s
        if changed:
            self._began_anew(peer, found, before, status)
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

    def _began_anew(self, peer: str, found: _Peer, before: Status | None, status: Status) -> None:
        """Note a peer's new incarnation. Raises PeerFault for one that would never let all go on."""
        if before is None or before.boot == status.boot:
            return  # It began anew because another party did.
        found.beginnings += 1
        if found.beginnings > MOST_BEGINNINGS:
            raise PeerFault(
                peer, "restarts", f"was started {found.beginnings} times without a new checkpoint"
            )
        found.replaced.setdefault(before.boot, 0)
        if status.boot in found.replaced:
            found.replaced[status.boot] += 1
            if found.replaced[status.boot] >= MOST_TURNS_BACK:
                raise PeerFault(
                    peer, "twice", "two processes with its key take part at once: stop one of them"
                )
        while len(found.replaced) > MOST_BOOTS:
            del found.replaced[next(iter(found.replaced))]


def job_text(job: Mapping[str, object]) -> bytes:
    """The text of ``job`` that all parties compare. Raises ValueError where it is too long."""
    text = json.dumps(job, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    if len(text) > MOST_JOB:
        raise ValueError(f"a job of {len(text)} bytes; at most {MOST_JOB}")
    return text


def job_fingerprint(job: Mapping[str, object]) -> str:
    """A short name of ``job``, which a party's folders have. Raises ValueError where it is too long."""
    return hashlib.sha256(job_text(job)).hexdigest()[:16]


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
