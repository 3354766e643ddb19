"""Parties of a joint computation as coroutines without I/O, and all of them in one process.

A *role* is a generator: it yields effects, is sent what it asked for, and returns its result::

    def host(table: Table) -> Role[PartResult]:
        hello = yield from receive("guest", "hello")
        yield Send("guest", "sum", pack({"sum": table.features.sum(axis=0)}))
        yield Checkpoint(1, b"state")

It holds no socket, clock, thread or file. What drives it (``run_local`` here, ``services.vertical`` over a network)
delivers messages once and in order for each pair of parties.

Checkpoints: a label is a point from which all parties can go on together. All parties yield the same labels, rising,
and no message may cross one: what a party sent before its label L is received before the receiver's label L
(``run_local`` checks that). On a restart everybody is made anew from its state at the largest label that all have,
or from nothing; a role is therefore made by a function of ``bytes | None``.

Exceptions::

    PeerFault           a peer broke the protocol, or told that it failed; says which peer and which rule
    └── PeerAborted     the peer ended its part and says why
    CheckpointCrossed   (ValueError) our own roles: a message was sent before a checkpoint and asked for after it
    Stalled             (ValueError) our own roles: everybody waits for somebody
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

MOST_KIND: Final = 64
"""Characters of a message's kind."""
MOST_BODY: Final = 2**31
"""Bytes of one message."""
MOST_REASON: Final = 500
"""Characters of what is told to the others when a party fails."""
ABORT: Final = "abort"
"""The kind of the last message of a party that fails; no role uses it."""


class PeerFault(Exception):
    """``peer`` broke ``rule``."""

    def __init__(self, peer: str, rule: str, detail: str) -> None:
        self.peer, self.rule, self.detail = peer, rule, detail
        super().__init__(f"{peer}: {rule}: {detail}")

    def __reduce__(self) -> tuple[type[PeerFault], tuple[str, str, str]]:
        # A worker's process raises it too, and an exception is otherwise rebuilt from its message alone.
        return type(self), (self.peer, self.rule, self.detail)


class PeerAborted(PeerFault):
    """``peer`` ended its part; ``detail`` is its reason."""


class CheckpointCrossed(ValueError):
    """A message crossed a checkpoint: a restart would lose it."""


class Stalled(ValueError):
    """All parties wait for messages that nobody will send."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``body`` to a party. Answered with None at once."""

    to: str
    kind: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for the next message of ``sender``, which must be of ``kind``. Answered with Incoming."""

    sender: str
    kind: str


@dataclass(frozen=True, slots=True)
class ReceiveAny:
    """Wait for the next message of any of ``senders``, which must be of ``kind``. Answered with Incoming."""

    senders: tuple[str, ...]
    kind: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """From here ``state`` is enough to go on; ``label`` is larger than the one before. Answered with None."""

    label: int
    state: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Progress:
    """``done`` of ``total`` (0: unknown). Answered with None."""

    done: int
    total: int
    what: str


@dataclass(frozen=True, slots=True)
class Log:
    """A line for the party's own log: nothing that the party itself may not see. Answered with None."""

    text: str


@dataclass(frozen=True, slots=True)
class Incoming:
    """A message as it arrived."""

    sender: str
    kind: str
    body: bytes


Effect = Send | Receive | ReceiveAny | Checkpoint | Progress | Log
Result = TypeVar("Result")
Role = Generator[Effect, Incoming | None, Result]
Make = Callable[[bytes | None], Role[Any]]
Draw = Callable[[int], bytes]
"""So many random bytes; ``os.urandom`` where nothing else is said."""


@dataclass(frozen=True, slots=True)
class PartResult:
    """What a party has in the end. All of it stays with this party.

    ``figures``: small facts to show. ``model``: this party's part of the model, for ``Kind.load``. ``rows``: positions
    of this party's rows in the joint order (int64 [n]). ``test``: positions in ``rows`` that were held out (int64 [m]).
    ``scores``: the label party's scores of the held-out rows, of all where none were: [m] or [m, C]. ``curves``: what
    changed from epoch to epoch, by name, such as ``loss``; all finite.
    """

    figures: Mapping[str, float | int | str] = field(default_factory=dict)
    model: bytes | None = None
    rows: npt.NDArray[np.int64] | None = None
    scores: npt.NDArray[np.float64] | None = None
    test: npt.NDArray[np.int64] | None = None
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)


class Workers(Protocol):
    """Spreads long work over cores: ``function`` must be importable, arguments and results plain."""

    def map(self, function: Callable[[Any], Any], chunks: Iterable[Any]) -> Sequence[Any]:
        """The results in the chunks' order."""
        ...


class Alone:
    """Workers that are this thread."""

    def map(self, function: Callable[[Any], Any], chunks: Iterable[Any]) -> Sequence[Any]:
        """The results in the chunks' order."""
        return [function(chunk) for chunk in chunks]


def receive(sender: str, kind: str) -> Generator[Effect, Incoming | None, bytes]:
    """The body of the next message of ``sender``. Used with ``yield from``."""
    got = yield Receive(sender, kind)
    assert got is not None
    return got.body


def gather(senders: Iterable[str], kind: str) -> Generator[Effect, Incoming | None, dict[str, bytes]]:
    """One message of each of ``senders``, in whatever order they come; by sender in the given order."""
    order = tuple(senders)
    found: dict[str, bytes] = {}
    while missing := tuple(name for name in order if name not in found):
        got = yield ReceiveAny(missing, kind)
        assert got is not None
        found[got.sender] = got.body
    return {name: found[name] for name in order}


def broadcast(to: Iterable[str], kind: str, body: bytes) -> Generator[Effect, Incoming | None, None]:
    """The same message to each of ``to``."""
    for name in to:
        yield Send(name, kind, body)


def check_send(effect: Send, me: str, parties: Iterable[str]) -> None:
    """Raise ValueError for a message that no runtime carries: our own fault."""
    if effect.to == me or effect.to not in parties:
        raise ValueError(f"{me} sends to {effect.to!r}, which is no other party")
    if not 0 < len(effect.kind) <= MOST_KIND or effect.kind == ABORT:
        raise ValueError(f"{effect.kind!r} is no kind of message")
    if len(effect.body) > MOST_BODY:
        raise ValueError(f"a {effect.kind} of {len(effect.body)} bytes; at most {MOST_BODY}")


def check_incoming(message: Incoming, kind: str) -> Incoming:
    """``message`` if it is of ``kind``. Raises PeerFault, PeerAborted."""
    if message.kind == ABORT:
        reason = message.body[: 4 * MOST_REASON].decode(errors="replace")[:MOST_REASON]
        raise PeerAborted(message.sender, "gave up", reason)
    if message.kind != kind:
        raise PeerFault(message.sender, "kind", f"sent {message.kind[:MOST_KIND]!r}, expected {kind!r}")
    return message


def reason_of(error: BaseException) -> str:
    """What the other parties are told about a failure here: never values, since an error's text may hold some."""
    if isinstance(error, PeerAborted):
        return f"{error.peer} gave up"
    if isinstance(error, PeerFault):
        return f"{error.peer} broke the rule {error.rule!r}"[:MOST_REASON]
    return f"it failed with {type(error).__name__}"[:MOST_REASON]


@dataclass(frozen=True, slots=True)
class Sent:
    """One message of a transcript; ``body`` only where bodies were asked for."""

    sender: str
    receiver: str
    kind: str
    size: int
    body: bytes | None = None


@dataclass(slots=True)
class Transcript:
    """Every message in the order of sending."""

    messages: list[Sent] = field(default_factory=list)

    def of(
        self, *, sender: str | None = None, receiver: str | None = None, kind: str | None = None
    ) -> list[Sent]:
        """Those that match all that is given."""
        return [
            one
            for one in self.messages
            if sender in (None, one.sender) and receiver in (None, one.receiver) and kind in (None, one.kind)
        ]

    def counts(self) -> dict[tuple[str, str, str], tuple[int, int]]:
        """(messages, bytes) by (sender, receiver, kind)."""
        messages: Counter[tuple[str, str, str]] = Counter()
        sizes: Counter[tuple[str, str, str]] = Counter()
        for one in self.messages:
            messages[one.sender, one.receiver, one.kind] += 1
            sizes[one.sender, one.receiver, one.kind] += one.size
        return {key: (count, sizes[key]) for key, count in messages.items()}


Twist = Callable[[Sent], Iterable[tuple[str, bytes]]]
"""What becomes of a message (its body is there): the kinds and bodies that arrive in its place."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[Result]):
    """The parties' results, what was sent, and every checkpoint by party and label."""

    results: Mapping[str, Result]
    transcript: Transcript
    checkpoints: Mapping[str, Mapping[int, bytes]]
    effects: Mapping[str, Sequence[Progress | Log]]


@dataclass(slots=True)
class _Party:
    name: str
    role: Role[Any]
    label: int
    inbox: dict[str, deque[tuple[int, int, Incoming]]]  # by sender: arrival, the sender's label, message
    wants: Receive | ReceiveAny | None = None
    done: bool = False
    checkpoints: dict[int, bytes] = field(default_factory=dict)
    said: list[Progress | Log] = field(default_factory=list)


def run_local(
    roles: Mapping[str, Role[Any]],
    *,
    twist: Twist | None = None,
    bodies: bool = False,
    label: int = -1,
    most_steps: int = 100_000_000,
) -> Outcome[Any]:
    """Run all ``roles`` (by party) in this thread, in turn and deterministically, until each has its result.

    ``twist`` may drop, repeat or change messages. ``bodies``: keep them in the transcript. ``label``: where the roles
    were made from, -1 for the beginning. Raises the first role's failure, after which the others are closed; Stalled
    where all wait; CheckpointCrossed.
    """
    parties = {
        name: _Party(name, role, label, {other: deque() for other in roles if other != name})
        for name, role in roles.items()
    }
    results: dict[str, Any] = {}
    transcript = Transcript()
    steps = 0
    try:
        while len(results) < len(parties):
            moved = False
            for party in parties.values():
                while not party.done and (ready := _next_for(party)) is not _WAITS:
                    moved = True
                    steps += 1
                    if steps > most_steps:
                        raise Stalled(f"{most_steps} steps and no end")
                    try:
                        effect = party.role.send(ready)
                    except StopIteration as end:
                        party.done, results[party.name] = True, end.value
                        break
                    _perform(effect, party, parties, transcript, twist, bodies)
            if not moved:
                waiting = ", ".join(
                    f"{one.name} for {_awaited(one)}" for one in parties.values() if not one.done
                )
                raise Stalled(f"nobody can go on: {waiting}")
    finally:
        for party in parties.values():
            party.role.close()
    return Outcome(
        results,
        transcript,
        {name: party.checkpoints for name, party in parties.items()},
        {name: party.said for name, party in parties.items()},
    )


_WAITS: Final[Any] = object()


def _next_for(party: _Party) -> Any:
    """What the party's role is sent next; ``_WAITS`` where that has not come."""
    wants = party.wants
    if wants is None:
        return None
    senders = (wants.sender,) if isinstance(wants, Receive) else wants.senders
    found = [party.inbox[sender][0] for sender in senders if party.inbox[sender]]
    if not found:
        return _WAITS
    _, label, message = min(found, key=lambda one: one[0])
    party.inbox[message.sender].popleft()
    party.wants = None
    check_incoming(message, wants.kind)
    if label != party.label:
        raise CheckpointCrossed(
            f"{message.sender} sent {message.kind!r} at label {label}, {party.name} received it at {party.label}"
        )
    return message


def _perform(
    effect: Effect,
    party: _Party,
    parties: Mapping[str, _Party],
    transcript: Transcript,
    twist: Twist | None,
    bodies: bool,
) -> None:
    if isinstance(effect, Send):
        check_send(effect, party.name, parties)
        size = len(effect.body)
        sent = Sent(party.name, effect.to, effect.kind, size, effect.body if bodies else None)
        transcript.messages.append(sent)
        arriving = [(effect.kind, effect.body)]
        if twist is not None:
            arriving = list(twist(Sent(party.name, effect.to, effect.kind, size, effect.body)))
        for kind, body in arriving:
            inbox = parties[effect.to].inbox[party.name]
            inbox.append((len(transcript.messages), party.label, Incoming(party.name, kind, bytes(body))))
    elif isinstance(effect, Checkpoint):
        if effect.label <= party.label:
            raise ValueError(f"{party.name}: checkpoint {effect.label} after {party.label}")
        party.label = effect.label
        party.checkpoints[effect.label] = effect.state
    elif isinstance(effect, Progress | Log):
        party.said.append(effect)
    else:
        senders = (effect.sender,) if isinstance(effect, Receive) else effect.senders
        if not senders or any(sender not in party.inbox for sender in senders):
            raise ValueError(f"{party.name} waits for {senders}, which are not all other parties")
        party.wants = effect


def _awaited(party: _Party) -> str:
    wants = party.wants
    if wants is None:
        return "nothing"
    return f"{wants.kind!r} of {wants.sender if isinstance(wants, Receive) else ' or '.join(wants.senders)}"
