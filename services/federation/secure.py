"""Secure aggregation beside a job's rounds: which stage an iteration's clients are in, and when its masks come off.

The rounds say who takes part and whose upload counts; the protocol says who has shared its secrets. They meet at three
places: once the start phase has closed, the roster waits for as many as started; an upload is counted only while masked
vectors are awaited, from a client that has shared; and when the rounds have counted enough, those are the survivors.
All of it stands in the shared store, so any server serves any stage, and one that dies leaves nothing undone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from federated.rounds import Desk, Header, Phase, Store
from federated.secagg.desk import SecAggDesk, SessionUnknown
from federated.secagg.masks import add_masks
from federated.secagg.ring import Words
from federated.secagg.roster import Context
from federated.secagg.server import SumLost
from federated.secagg.session import Header as SecureHeader
from federated.secagg.session import Refused, Session, Waiting
from federated.secagg.stages import Stage
from federated.secagg.updates import MaskedUpdates
from services.api.problems import Problem
from services.federation.figures import Figures, keep_figures
from services.federation.hosted import HostedJob
from services.federation.metrics import FederationMetrics
from services.federation.signing import registrar_of


class MasksStay(RuntimeError):
    """The masks of an iteration's sum do not come off, or what is under them is no sum; the message says why."""


_LATE: Final = frozenset({"late", "full", "not_in_roster", "dropped", "failed"})
_MASKS: Final = 256  # added between two looks at the clock
_HELD_S: Final = 1.0  # between two looks at the lease
_KEPT: Final = 2  # iterations whose desks are kept open

log = logging.getLogger(__name__)


class SecureRounds:
    """Of one job, in one process. ``started`` gives the ``start_digest`` of a version; ``wake`` is called when masks
    can come off. Raises StoreUnavailable and JobUnknown throughout."""

    def __init__(
        self,
        store: Store,
        job: HostedJob,
        masked: MaskedUpdates,
        desk: Desk,
        metrics: FederationMetrics,
        clock: Callable[[], float],
        started: Callable[[int], bytes],
        wake: Callable[[], None],
    ) -> None:
        self.masked = masked
        self._store, self._job, self._rounds = store, job, desk
        self._metrics, self._clock, self._started, self._wake = metrics, clock, started, wake
        self._session = Session(masked.plan)
        # Keys that nobody certified are refused here: among clients they would stop everybody.
        told = job.secure.registrar
        registrar = bytes.fromhex(told) if told else registrar_of(job.key).public
        self._registrar = registrar if masked.plan.malicious else None
        self._desks: OrderedDict[int, SecAggDesk] = OrderedDict()
        self._opening = threading.Lock()
        self._seen: dict[int, tuple[Stage, float]] = {}

    # What clients ask.

    def take(self, client: str, iteration: int, stage: Stage, body: bytes) -> None:
        """A client's answer to ``stage``. Raises Problem stage_over for one that comes too late, message_refused for
        one that breaks the protocol, and stage_early."""
        header = self._under_way(iteration)
        if header.phase is Phase.STARTING:
            # Before it is known how many start, the roster's window must not run.
            raise Problem("stage_early")
        desk, now = self._desk(iteration), self._clock()
        desk.create(now, header.starts)
        try:
            reply = desk.receive(client, stage, body, now)
        except SessionUnknown as error:  # swept in the meantime
            raise Problem("stage_over", f"Iteration {iteration} is over.") from error
        if isinstance(reply, Waiting):
            raise Problem("stage_early")
        if isinstance(reply, Refused):
            raise self._refusal(reply)
        self._advance(header, desk, now)

    def message(self, client: str, iteration: int, stage: Stage) -> bytes | None:
        """What a client needs before it can answer ``stage``; None while the others are waited for. Raises Problem
        stage_over and message_refused."""
        header = self._under_way(iteration)
        if header.phase is Phase.STARTING:
            return None
        try:
            found = self._desk(iteration).download(client, stage, self._clock())
        except SessionUnknown as error:
            raise Problem("stage_over", "Nobody has advertised keys yet.") from error
        if isinstance(found, Waiting):
            return None
        if isinstance(found, Refused):
            raise self._refusal(found)
        return found

    def require_upload(self, client: str, iteration: int) -> None:
        """Raise Problem stage_over where a masked vector of ``client`` could not be unmasked: it has not shared its
        secrets. Whether it comes in time, or again, is for the rounds to say."""
        if self._rounds.header().iteration != iteration:
            return
        desk = self._desk(iteration)
        found = self._standing(iteration)
        if found is None or found.stage < Stage.MASKED:
            raise Problem("stage_early")
        if not desk.shared(client):
            raise Problem("stage_over", "This client has not shared its secrets in time.")

    # What the passing of time and of rounds does.

    def advance(self) -> None:
        """Go on as far as counters and windows allow: called often."""
        header = self._rounds.header()
        if header.phase in (Phase.UPDATING, Phase.AGGREGATING):
            desk, now = self._desk(header.iteration), self._clock()
            desk.create(now, header.starts)
            self._advance(header, desk, now)

    def _advance(self, header: Header, desk: SecAggDesk, now: float) -> None:
        found = desk.tick(now)
        if found.stage is Stage.MASKED and header.phase is Phase.AGGREGATING:
            try:
                found = desk.close_masked(self._counted(header), now)
            except ValueError as error:
                # Our own fault, since uploads of those who have not shared are not taken; no reason to end the server.
                log.exception("job %s: iteration %d", self._job.name, header.iteration)
                found = desk.fail(f"MASKED: {error}", now)
        moved = self._note(header.iteration, found.stage, now)
        if found.stage is Stage.FAILED:
            self._fail(header.iteration, found.reason, now)
        elif found.stage is Stage.REVEAL and moved:
            self._wake()

    def _counted(self, header: Header) -> list[str]:
        """The clients whose masked vectors the rounds have counted."""
        return [slot.client for slot in self._rounds.slots_of(header.iteration, header.uploads)]

    def _fail(self, iteration: int, reason: str, now: float) -> None:
        for closed in self._rounds.void(iteration, now):
            stage = next((stage.name.lower() for stage in Stage if stage.name in reason), "reveal")
            self._metrics.secure_failures.labels(self._job.name, stage).inc()
            keep_figures(self._store, self._job.keys, closed.iteration, Figures(0, None, reason))
            log.warning("job %s: iteration %d is void: %s", self._job.name, closed.iteration, reason)

    # What the merge asks.

    def ready(self) -> bool:
        """Whether the masks of the iteration under way can come off."""
        header = self._rounds.header()
        if header.phase is not Phase.AGGREGATING:
            return False
        self.advance()
        found = self._standing(header.iteration)
        return found is not None and found.stage is Stage.REVEAL

    def reveal(self, iteration: int, total: Words, hold: Callable[[], None]) -> None:
        """Take the masks off ``total`` [L], the sum of all counted vectors, in place. ``hold`` is called now and then:
        many dropouts cost many masks. Raises MasksStay and VersionGone."""
        began, hold = time.perf_counter(), _paced(hold)
        try:
            found = self._desk(iteration).masks(self._started(self._rounds.header().version), hold)
        except SumLost as error:
            raise MasksStay(f"too few shares: {error}") from error
        if found.liars:
            liars = ", ".join(found.liars[:10])
            log.warning("job %s: iteration %d: wrong shares of %s", self._job.name, iteration, liars)
        for start in range(0, len(found.seeds), _MASKS):
            add_masks(total, found.seeds[start : start + _MASKS], self.masked.plan.ring)
            hold()
        self._metrics.secure_seconds.labels(self._job.name, "reveal").observe(time.perf_counter() - began)

    def done(self, iteration: int) -> None:
        """The sum was taken."""
        self._desk(iteration).finish(self._clock())

    def failed(self, iteration: int, reason: str) -> None:
        """The masks of ``iteration`` do not come off: it is invalid."""
        now = self._clock()
        self._desk(iteration).fail(reason, now)
        self._fail(iteration, reason, now)

    def stage(self, header: Header) -> str:
        """Where an iteration's clients are, for people; empty while nobody has begun."""
        found = self._standing(header.iteration)
        return "" if found is None else found.stage.name.lower()

    def most_bytes(self, stage: Stage) -> int:
        """The longest answer to ``stage``."""
        return self._desk(self._rounds.header().iteration).most_bytes(stage)

    # How it is kept.

    def _standing(self, iteration: int) -> SecureHeader | None:
        try:
            return self._desk(iteration).header()
        except SessionUnknown:
            return None

    def _under_way(self, iteration: int) -> Header:
        header = self._rounds.header()
        if header.iteration != iteration or header.phase in (Phase.STOPPED, Phase.FINISHED):
            raise Problem("stage_over", f"Iteration {iteration} is over.")
        return header

    def _desk(self, iteration: int) -> SecAggDesk:
        with self._opening:
            found = self._desks.get(iteration)
            if found is None:
                context = Context(self._job.name, iteration)
                found = SecAggDesk(self._store, self._session, context, self._registrar)
                self._desks[iteration] = found
                if len(self._desks) > _KEPT:
                    self._desks.popitem(last=False)
            return found

    def _note(self, iteration: int, stage: Stage, now: float) -> bool:
        """Count how long stages last, as this server sees them. Whether this one is new to it."""
        before = self._seen.get(iteration)
        if before is not None and before[0] is stage:
            return False
        if before is not None:
            lasted = self._metrics.secure_seconds.labels(self._job.name, before[0].name.lower())
            lasted.observe(max(now - before[1], 0.0))
        self._seen = {iteration: (stage, now)}
        return True

    def _refusal(self, refused: Refused) -> Problem:
        self._metrics.refused.labels(self._job.name, f"secure_{refused.code}").inc()
        code = "stage_over" if refused.code in _LATE else "message_refused"
        return Problem(code, f"{refused.code}: {refused.reason}")


def _paced(hold: Callable[[], None]) -> Callable[[], None]:
    """``hold``, called as often as one likes, once a second."""
    last = time.monotonic()

    def paced() -> None:
        nonlocal last
        if time.monotonic() - last >= _HELD_S:
            hold()
            last = time.monotonic()

    return paced
