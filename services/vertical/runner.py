"""Drives one party's role over a session: effects to messages, checkpoints to disk, and again after a loss.

Exceptions::

    PeerFault, PeerAborted   (federated.vertical.parties) the peer's fault
    PeerGone                 a peer was not heard, or the run did not move, for longer than it is waited for
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from federated.vertical.parties import (
    MOST_KIND,
    Checkpoint,
    Incoming,
    Log,
    Make,
    PartResult,
    PeerFault,
    Progress,
    Receive,
    ReceiveAny,
    Role,
    Send,
    check_incoming,
    check_send,
    reason_of,
)
from services.vertical.network import Network
from services.vertical.pulse import Pulse
from services.vertical.session import Attempt
from services.vertical.store import KEEP, StateDamaged, StateFolder

RUN: Final = "run"
"""The figure that tells runs apart."""
LINGER_S: Final = 3.0
"""How long a party that ends stays so that the others hear of it."""
RETURN_S: Final = 10.0
"""How long a party that comes back stays, though all had their results before: one of them may begin anew."""
FAREWELL_S: Final = 0.5
"""How long the last word, that all are done, may take: whoever misses it stays ``LINGER_S``."""
_LOOK_S: Final = 0.5
_log = logging.getLogger(__name__)


class PeerGone(Exception):
    """``peer`` was waited for in vain."""

    def __init__(self, peer: str, detail: str, told: str = "is gone") -> None:
        """``told``: what the other parties hear of ``peer``."""
        self.peer, self.told = peer, f"{peer} {told}"
        super().__init__(f"{peer}: {detail}")


class _Interrupted(Exception):
    """A peer began anew: so do we."""


@dataclass(frozen=True, slots=True)
class Patience:
    """``dead_after_s``: a silent peer is named. ``wait_s``: it is given up. ``stuck_after_s``: a peer is given up that
    is heard, but gets nothing done while it is waited for."""

    dead_after_s: float = 10.0
    wait_s: float = 300.0
    stuck_after_s: float = 900.0


class Runner:
    """Runs the role that ``make`` makes, until it has a result that is on disk and all parties know it."""

    def __init__(
        self,
        network: Network,
        make: Make,
        store: StateFolder,
        peers: tuple[str, ...],
        *,
        me: str,
        patience: Patience | None = None,
        progress: Callable[[Progress], None] = lambda progress: None,
        pulse: Pulse | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``pulse``: of our role's work, which ``network``'s session tells the peers. ``monotonic``: the network's."""
        self.traffic = store.traffic()
        self._network, self._make, self._store, self._peers = network, make, store, peers
        self._me, self._patience = me, patience or Patience()
        self._progress, self._monotonic, self._pulse = progress, monotonic, pulse or Pulse()
        self._silent: set[str] = set()
        self._begun_s = self._made_s = monotonic()

    def run(self) -> PartResult:
        """The part's result. Raises PeerFault, PeerGone, StateDamaged, and whatever our own role raises; the other
        parties are told before."""
        session, changed = self._network.session, self._network.changed
        try:
            while True:
                try:
                    if session.phase != "done":
                        attempt = self._gather()
                        result = self._attempt(attempt)
                        # The same at all parties: parts of different runs do not fit together.
                        figures = {**result.figures, RUN: attempt.view.hex()}
                        result = replace(result, figures=figures)
                        with changed:
                            self._store.keep_traffic(self.traffic, self._monotonic() - self._made_s)
                            self._store.keep_result(result)
                            session.finished()
                            self._network.wake()
                    self._leave()
                    found = self._store.result()
                    assert found is not None
                    return found
                except _Interrupted:
                    _log.info("%s: a party began anew; all go on from the last common checkpoint", self._me)
                    with changed:
                        session.begin(self._store.labels(), self._store.runs())
                        self._network.wake()
        except Exception as error:
            # Not when this process is told to end: then it may come back, and the others wait for it.
            self._tell(error)
            raise

    def _gather(self) -> Attempt:
        session = self._network.session
        with self._network.changed:
            self._begun_s = self._monotonic()
            while (attempt := session.agreed()) is None:
                self._look_around()
            self._network.wake()
        self.traffic.attempts += 1
        _log.info(
            "%s: all parties are here; from %s",
            self._me,
            f"checkpoint {attempt.label}" if attempt.label >= 0 else "the beginning",
        )
        return attempt

    def _attempt(self, attempt: Attempt) -> PartResult:
        self._store.forget_after(attempt.label)
        state = self._store.state(attempt.label) if attempt.label >= 0 else None
        role: Role[Any] = self._make(state)
        labels = [label for label in self._store.labels() if label <= attempt.label]
        answer: Incoming | None = None
        try:
            while True:
                with self._network.changed:
                    self._look()
                try:
                    effect = role.send(answer)
                except PeerFault as fault:
                    if fault.peer in self._peers:
                        raise
                    # What roles read beside messages is the state that they go on from.
                    raise StateDamaged(
                        f"checkpoint {attempt.label} cannot be used: {fault}; it may be of another version of "
                        "Headwater, and --fresh begins the job anew"
                    ) from fault
                except StopIteration as end:
                    result: PartResult = end.value
                    return result
                self._pulse.beat()
                answer = None
                if isinstance(effect, Send):
                    self._send(effect)
                elif isinstance(effect, Receive):
                    answer = self._receive((effect.sender,), effect.kind)
                elif isinstance(effect, ReceiveAny):
                    answer = self._receive(effect.senders, effect.kind)
                elif isinstance(effect, Checkpoint):
                    self._keep(effect, labels, attempt.view.hex())
                elif isinstance(effect, Progress):
                    self._progress(effect)
                elif isinstance(effect, Log):
                    _log.info("%s: %s", self._me, effect.text)
        finally:
            role.close()

    def _send(self, effect: Send) -> None:
        check_send(effect, self._me, self._peers)
        with self._network.changed:
            self._wait_for_room(effect.to)
            self._network.session.put(effect.to, effect.kind, effect.body)
            self._network.wake()
        self.traffic.sent[effect.to, effect.kind] += 1
        self.traffic.sent_bytes[effect.to, effect.kind] += len(effect.body)

    def _wait_for_room(self, to: str) -> None:
        """With ``changed`` held."""
        session = self._network.session
        self._wait(
            lambda: session.has_room(to),
            lambda: (to,),
            lambda: f"it has taken nothing of {session.channel(to).out_bytes} bytes that wait for it",
        )

    def _receive(self, senders: tuple[str, ...], kind: str) -> Incoming:
        if not senders or any(sender not in self._peers for sender in senders):
            raise ValueError(f"{self._me} waits for {senders}, which are not all other parties")
        session = self._network.session
        with self._network.changed:
            self._wait(
                lambda: any(session.channel(sender).waiting for sender in senders),
                lambda: senders,
                lambda: f"{kind!r} is awaited of {' or '.join(senders)}",
            )
            came = (session.channel(sender).pop() for sender in senders)
            message = next(one for one in came if one is not None)
        self._pulse.beat()
        self.traffic.received[message.sender, message.kind[:MOST_KIND]] += 1
        self.traffic.received_bytes[message.sender, message.kind[:MOST_KIND]] += len(message.body)
        return check_incoming(message, kind)

    def _keep(self, effect: Checkpoint, labels: list[int], run: str) -> None:
        if labels and effect.label <= labels[-1]:
            raise ValueError(f"checkpoint {effect.label} after {labels[-1]}")
        session = self._network.session
        if len(labels) >= KEEP - 1:
            # Whoever ran further ahead would drop the checkpoint that is common to all.
            before = labels[1 - KEEP]
            with self._network.changed:
                self._wait(
                    lambda: not session.behind(before),
                    lambda: session.behind(before),
                    lambda: f"its checkpoint {before} is awaited",
                )
        self._store.keep_traffic(self.traffic, self._monotonic() - self._made_s)
        self._store.keep(effect.label, effect.state, run)
        labels.append(effect.label)
        with self._network.changed:
            session.kept(effect.label)
            self._network.wake()

    def _look(self) -> None:
        session = self._network.session
        if self._network.failure is not None:
            raise RuntimeError("a thread of the network failed") from self._network.failure
        if session.fault is not None:
            raise session.fault
        if session.interrupted:
            raise _Interrupted

    def _wait(
        self, ready: Callable[[], bool], awaited: Callable[[], tuple[str, ...]], what: Callable[[], str]
    ) -> None:
        """Wait until ``ready``, with ``changed`` held; ``awaited``: the peers whose turn it is, ``what``: for people.

        Raises what makes waiting pointless; PeerGone where nobody moves whose turn it is.
        """
        session, patience = self._network.session, self._patience
        since_s = self._monotonic()
        try:
            while not ready():
                session.waits = awaited()
                self._look_around()
                locked_s = patience.dead_after_s + patience.wait_s
                blocked = session.blocked(since_s, self._monotonic(), patience.stuck_after_s, locked_s)
                if blocked is not None and not ready():
                    raise PeerGone(blocked.peer, f"{blocked.detail}; {what()}", "is stuck")
        finally:
            session.waits = ()

    def _look_around(self) -> None:
        """Wait for a change, with ``changed`` held. Raises what makes waiting pointless."""
        self._look()
        self._network.changed.wait(_LOOK_S)
        self._look()
        session, now = self._network.session, self._monotonic()
        for name in self._peers:
            silent_s = min(session.silent_s(name, now), now - self._begun_s)
            if silent_s < self._patience.dead_after_s:
                if name in self._silent:
                    self._silent.discard(name)
                    _log.info("%s: %s is heard again", self._me, name)
                continue
            if name not in self._silent:
                self._silent.add(name)
                _log.warning(
                    "%s: %s has not been heard for %.0f s; waiting %.0f s for it",
                    self._me, name, silent_s, self._patience.wait_s,
                )  # fmt: skip
            if silent_s >= self._patience.dead_after_s + self._patience.wait_s:
                what = "is gone" if session.silent_s(name, now) < math.inf else "did not come"
                aside = "; the result of this party is kept" if session.phase == "done" else ""
                raise PeerGone(
                    name, f"{what}: not heard for {silent_s:.0f} s{self._network.why(name)}{aside}"
                )

    def _leave(self) -> None:
        """Stay until all parties have their results and know of ours."""
        session = self._network.session
        settled = self._store.settled(session.result.hex())
        return_s = min(RETURN_S, self._patience.wait_s)
        with self._network.changed:
            since_s = self._monotonic()

            def over() -> bool:
                now = self._monotonic()
                absent = session.not_done()
                if not absent:
                    # Whoever has its result and said so may have left before it heard of ours.
                    return session.all_done() or now - since_s > LINGER_S
                away = all(session.silent_s(name, now) == math.inf for name in absent)
                return settled and away and now - since_s > return_s

            self._wait(over, session.not_done, lambda: "its result is awaited")
            if absent := session.not_done():
                _log.info("%s: %s did not come back; all had their results", self._me, " and ".join(absent))
            session.leaves()
            self._network.wake()
            self._network.changed.wait_for(session.all_told, FAREWELL_S)

    def _tell(self, error: BaseException) -> None:
        session = self._network.session
        with self._network.changed:
            session.failed(error.told if isinstance(error, PeerGone) else reason_of(error))
            self._network.wake()
            self._network.changed.wait_for(session.all_told, LINGER_S)
