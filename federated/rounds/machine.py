"""The round: what a request, the passing of time or a finished aggregation does to a job's records. Pure.

Time: ``now`` comes from whichever server runs the transition. A time before the header's ``clock`` counts as that
clock, so a server whose clock is behind, or was set back, neither opens nor closes anything; one whose clock is ahead
shortens windows by what it is ahead, no more.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from federated.rounds.lifecycle import Lifecycle
from federated.rounds.messages import (
    Accepted,
    Admitted,
    Finished,
    NotYet,
    PollRequest,
    RefusalCode,
    Refused,
    Reply,
    Standing,
    StartRequest,
    UploadRequest,
    WaitReason,
)
from federated.rounds.phases import Event, Phase
from federated.rounds.records import DIGEST_BYTES, Closed, Entry, Header, Slot
from federated.rounds.settings import RoundSettings
from federated.rounds.tickets import Tickets
from federated.selection import Everyone, Poisson, Selection

_FIRST: Final = {"sync": Phase.STARTING, "over_selection": Phase.STARTING, "buffered": Phase.BUFFERING}
MOST_EXAMPLES: Final = 2**32 - 1
MOST_ID_BYTES: Final = 256
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
EVERYONE: Final = Everyone()


@dataclass(frozen=True, slots=True)
class Decision:
    """What a transition made: the new records and the reply. ``slot`` is an upload that was counted now, ``closed``
    are the iterations that ended."""

    header: Header
    entry: Entry | None = None
    reply: Reply | None = None
    slot: Slot | None = None
    closed: tuple[Closed, ...] = ()


@dataclass(frozen=True, slots=True)
class Together:
    """What became of an edge's sum: the new header, the members' entries and slots in order, or whose part is
    ``wrong``; ``closed`` are the iterations that ended."""

    header: Header
    entries: tuple[Entry, ...]
    slots: tuple[Slot, ...]
    wrong: Mapping[str, Reply]
    closed: tuple[Closed, ...]


@dataclass(frozen=True, slots=True)
class Rounds:
    """The rules of one job: settings, tickets and selection."""

    settings: RoundSettings
    tickets: Tickets
    selection: Selection = EVERYONE
    life: Lifecycle = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.selection, Poisson) != bool(self.settings.sampled):
            raise ValueError(
                "selection poisson needs settings.sampled, the population, and nothing else has it"
            )
        object.__setattr__(self, "life", Lifecycle(self.settings))

    def init(self) -> Header:
        """The job before its first request."""
        return Header(_FIRST[self.settings.mode])

    @property
    def kept_iterations(self) -> int:
        """How many iterations back a client's records are needed; two more are kept, for those under way."""
        return max(self.settings.kept_iterations, self.selection.window)

    # Requests of clients.

    def start(
        self,
        header: Header,
        entry: Entry | None,
        request: StartRequest,
        now: float,
        draw: float,
        recent: int = 0,
    ) -> Decision:
        """A client wants to take part. ``entry`` is its part in ``header.iteration``, if any; ``draw`` in [0, 1)
        decides random selection and spreads come-back times; ``recent`` counts its parts in the last
        ``selection.window`` iterations. Gives Admitted, NotYet, Finished or Refused; a repeat gets the same ticket.
        """
        header, closed = self.life.settle(header, now)
        entry = entry if entry is not None and entry.iteration == header.iteration else None
        after, entry, reply = self._start(header, entry, request, draw, recent)
        return Decision(after, entry, reply, None, closed)

    def _start(
        self, header: Header, entry: Entry | None, request: StartRequest, draw: float, recent: int
    ) -> tuple[Header, Entry | None, Reply]:
        settings, phase = self.settings, header.phase
        wrong = self._wrong_client(request.client)
        if wrong is not None:
            return header, entry, wrong
        if phase is Phase.FINISHED:
            return header, entry, Finished(header.iteration, header.version)
        if phase is Phase.STOPPED:
            return header, entry, self._not_yet(header, draw, "stopped")
        buffered = settings.mode == "buffered"
        if entry is not None:
            if entry.counted:
                return header, entry, self._not_yet(header, draw, "counted")
            if buffered and header.clock > entry.started_at + settings.update_model_time_window_s:
                entry = None  # its time is over: it may begin anew
            elif phase is not Phase.AGGREGATING or buffered:
                return header, entry, self._admitted(header, entry, request.client, repeated=True)
        if phase is Phase.AGGREGATING and not buffered:
            return header, entry, self._not_yet(header, draw, "aggregating")
        if phase is Phase.UPDATING:
            return header, entry, self._not_yet(header, draw, "full")
        if buffered and header.in_flight >= settings.max_concurrency:
            return header, entry, self._not_yet(header, draw, "busy")
        drawn = self.tickets.coin(request.client, header.iteration) if settings.sampled else draw
        why_not = self.selection.judge(request.facts, drawn, recent)
        if why_not:
            if settings.sampled and header.opened_at is None:
                # The window must not wait for somebody who was drawn: it may be that nobody was.
                header = header._replace(opened_at=header.clock)
            return header, entry, self._not_yet(header, draw, "not_selected", why_not)
        return self._admit(header, request.client)

    def _admit(self, header: Header, client: str) -> tuple[Header, Entry, Reply]:
        now = header.clock
        entry = Entry(header.iteration, header.version, now)
        flights = header.flights
        if self.settings.mode == "buffered":
            flights = (*flights[:-1], flights[-1] + 1)
        header = header._replace(
            starts=header.starts + 1,
            opened_at=now if header.opened_at is None else header.opened_at,
            flights=flights,
        )
        if header.phase is Phase.STARTING and header.starts == self.life.thresholds.starts_close:
            header = self.life.begin_updates(header, Event.STARTS_FULL, now)
        return header, entry, self._admitted(header, entry, client, repeated=False)

    def upload(
        self, header: Header, entry: Entry | None, request: UploadRequest, now: float, draw: float
    ) -> Decision:
        """A client's body is stored and asks to be counted. ``entry`` is its part in ``request.iteration``, if it
        is still kept. Gives Accepted (with the slot, when it counts now), NotYet or Refused.

        The body itself (shape, finiteness, magnitude) is for the caller to check before.
        """
        header, closed = self.life.settle(header, now)
        refusal = self._unsound(header, entry, request, draw)
        if refusal is not None or entry is None:
            return Decision(header, entry, refusal, None, closed)
        if entry.counted:
            return Decision(header, entry, self._repeat(header, entry, request, draw), None, closed)
        if self.settings.mode == "buffered":
            reply = self._too_late_for_buffer(header, entry, draw)
        else:
            reply = self._too_late(header, entry, draw)
        if reply is not None:
            return Decision(header, entry, reply, None, closed)
        after, entry, slot = self._count(header, entry, request)
        after, more = self.life.close_full(after)
        accepted = Accepted(request.iteration, self._come_back(after, draw))
        return Decision(after, entry, accepted, slot, closed + more)

    def upload_together(
        self,
        header: Header,
        entries: Sequence[Entry | None],
        requests: Sequence[UploadRequest],
        now: float,
        draw: float,
    ) -> Together:
        """An edge's sum of several uploads asks to be counted: all of them count, or none does and ``wrong`` says whose
        cannot, with the reply that each alone would get. The sum may pass the iteration's threshold, since it cannot be
        cut. Synchronous modes only: staleness differs between members. Raises ValueError in buffered mode."""
        if self.settings.mode == "buffered":
            raise ValueError("sums of edges are for synchronous modes")
        header, closed = self.life.settle(header, now)
        wrong: dict[str, Reply] = {}
        named = Counter(request.client for request in requests)
        for entry, request in zip(entries, requests, strict=True):
            reply: Reply | None = self._unsound(header, entry, request, draw)
            if reply is None and named[request.client] > 1:
                reply = Refused("different_body", "named twice in one sum")
            elif reply is None and entry is not None:
                counted = entry.counted
                reply = (
                    self._repeat(header, entry, request, draw)
                    if counted
                    else self._too_late(header, entry, draw)
                )
            if reply is not None:
                wrong[request.client] = reply
        if wrong:
            return Together(header, (), (), wrong, closed)
        changed, slots = list[Entry](), list[Slot]()
        for entry, request in zip(entries, requests, strict=True):
            assert entry is not None
            header, entry, slot = self._count(header, entry, request)
            changed.append(entry)
            slots.append(slot)
        header, more = self.life.close_full(header)
        return Together(header, tuple(changed), tuple(slots), {}, closed + more)

    def _unsound(
        self, header: Header, entry: Entry | None, request: UploadRequest, draw: float
    ) -> Refused | None:
        if len(request.digest) != DIGEST_BYTES:
            raise ValueError(f"a digest has {DIGEST_BYTES} bytes, not {len(request.digest)}")
        wrong = self._wrong_client(request.client)
        if wrong is not None:
            return wrong
        if not self.tickets.valid(request.ticket, request.client, request.iteration):
            return Refused("foreign_ticket", "the ticket is not this job's for that client and iteration")
        if request.iteration > header.iteration:
            return Refused("future_iteration", f"iteration {request.iteration} has not begun")
        oldest = header.iteration - self.kept_iterations
        if entry is None or entry.iteration != request.iteration or request.iteration < oldest:
            return self._refuse(header, draw, "late", f"iteration {request.iteration} is long over")
        if not 1 <= request.examples <= MOST_EXAMPLES or not 0 <= request.steps <= MOST_EXAMPLES:
            return Refused("bad_examples", f"{request.examples} examples in {request.steps} steps")
        if not math.isfinite(request.loss):
            return Refused("bad_loss", f"the loss is {request.loss}")
        return None

    def _repeat(self, header: Header, entry: Entry, request: UploadRequest, draw: float) -> Reply:
        if request.digest != entry.digest:
            return self._refuse(header, draw, "different_body", "another body was counted for this client")
        return Accepted(entry.iteration, self._come_back(header, draw), repeated=True)

    def _too_late(self, header: Header, entry: Entry, draw: float) -> Reply | None:
        if entry.iteration != header.iteration or header.phase in (
            Phase.AGGREGATING,
            Phase.STOPPED,
            Phase.FINISHED,
        ):
            return self._refuse(header, draw, "late", f"iteration {entry.iteration} is over or full")
        if header.phase is Phase.STARTING and not self.settings.takes_early_uploads:
            return self._not_yet(header, draw, "starting")
        return None

    def _too_late_for_buffer(self, header: Header, entry: Entry, draw: float) -> Reply | None:
        if header.phase in (Phase.STOPPED, Phase.FINISHED):
            return self._refuse(header, draw, "late", f"the job is {header.phase}")
        if header.clock > entry.started_at + self.settings.update_model_time_window_s:
            return self._refuse(
                header, draw, "expired", "training and upload took longer than the update window"
            )
        staleness = self._staleness(header, entry)
        if staleness > self.settings.max_staleness:
            return self._refuse(header, draw, "too_stale", f"{staleness} versions old")
        if header.phase is Phase.AGGREGATING and (
            header.next_uploads >= self.settings.buffer_size or self.life.is_last(header)
        ):
            return self._not_yet(header, draw, "aggregating")
        return None

    def _staleness(self, header: Header, entry: Entry) -> int:
        # While a buffer is aggregated, what comes in is applied to the version after it.
        return header.version + (header.phase is Phase.AGGREGATING) - entry.version

    def _count(self, header: Header, entry: Entry, request: UploadRequest) -> tuple[Header, Entry, Slot]:
        now, buffered = header.clock, self.settings.mode == "buffered"
        ahead = header.phase is Phase.AGGREGATING
        iteration = header.iteration + ahead
        index = header.next_uploads if ahead else header.uploads
        staleness = self._staleness(header, entry) if buffered else 0
        slot = Slot(
            iteration, index, request.client, entry.iteration, request.digest, request.examples, request.steps,
            request.loss, staleness, self.settings.weight(request.examples, staleness), entry.version,
        )  # fmt: skip
        entry = entry._replace(slot=index, digest=request.digest)
        if ahead:
            header = header._replace(next_uploads=index + 1)
        else:
            opens_window = header.phase is not Phase.STARTING
            header = header._replace(
                uploads=index + 1,
                opened_at=now if header.opened_at is None else header.opened_at,
                first_upload_at=now
                if opens_window and header.first_upload_at is None
                else header.first_upload_at,
            )
        if buffered:
            header = self.life.land(header, entry)
        return header, entry, slot

    def poll(
        self, header: Header, entry: Entry | None, request: PollRequest, now: float, draw: float
    ) -> Decision:
        """A client asks where things stand; ``entry`` is its part in ``request.iteration``. Gives Standing, or
        Finished to a client that waits for nothing more."""
        header, closed = self.life.settle(header, now)
        entry = entry if entry is not None and entry.iteration == request.iteration else None
        if header.phase is Phase.FINISHED:
            return Decision(header, entry, Finished(header.iteration, header.version), None, closed)
        counted = entry is not None and entry.counted
        standing = Standing(
            header.iteration, header.version, header.phase.value, counted, self._come_back(header, draw)
        )
        return Decision(header, entry, standing, None, closed)

    # Time, aggregation and commands.

    def tick(self, header: Header, now: float) -> Decision | None:
        """Apply the windows that have run out by ``now``; None when none has."""
        settled, closed = self.life.settle(header, now)
        return Decision(settled, closed=closed) if closed or settled.phase is not header.phase else None

    def aggregated(self, header: Header, iteration: int, now: float, attempt: int = 0) -> Decision:
        """The new model of ``iteration`` is stored: the version rises and the next iteration begins. Anything but
        the iteration that is being aggregated changes nothing (no ``closed``): it was done before, or given up."""
        header, closed = self.life.settle(header, now)
        if header.phase is not Phase.AGGREGATING or header.iteration != iteration:
            return Decision(header, closed=closed)
        took_s = max(header.clock - header.began, 1e-9)
        header = header._replace(version=header.version + 1, attempt=attempt, took_s=took_s)
        header, more = self.life.end(header, Event.AGGREGATED, header.clock)
        return Decision(header, closed=closed + more)

    def aggregation_failed(self, header: Header, iteration: int, now: float) -> Decision:
        """Summing ``iteration`` was tried as often as allowed: it is invalid, and the next begins."""
        header, closed = self.life.settle(header, now)
        if header.phase is not Phase.AGGREGATING or header.iteration != iteration:
            return Decision(header, closed=closed)
        header, more = self.life.end(header, Event.AGGREGATION_FAILED, header.clock)
        return Decision(header, closed=closed + more)

    def void(self, header: Header, iteration: int, now: float) -> Decision:
        """The masks on what ``iteration``'s clients sent, or would send, cannot be taken off any more: it is invalid,
        and the next begins. Anything but the iteration under way changes nothing."""
        header, closed = self.life.settle(header, now)
        if header.iteration != iteration or header.phase in (Phase.STOPPED, Phase.FINISHED):
            return Decision(header, closed=closed)
        header, more = self.life.end(header, Event.SECURE_AGGREGATION, header.clock)
        return Decision(header, closed=closed + more)

    def stop(self, header: Header, now: float) -> Decision:
        """Stop the job: an iteration that clients are in is invalid, one that is being aggregated is finished
        first. A stopped or finished job stays as it is."""
        header, closed = self.life.settle(header, now)
        if header.phase in (Phase.STOPPED, Phase.FINISHED):
            return Decision(header, closed=closed)
        header = header._replace(stop_wanted=True)
        if header.phase is Phase.AGGREGATING:
            return Decision(header, closed=closed)
        header, more = self.life.end(header, Event.STOP, header.clock)
        return Decision(header, closed=closed + more)

    def resume(self, header: Header, now: float) -> Decision:
        """Let a stopped job go on with its next iteration; withdraws a stop that has not happened yet."""
        header, closed = self.life.settle(header, now)
        header = header._replace(stop_wanted=False)
        if header.phase is Phase.STOPPED:
            header = self.life.enter(header, self.life.next_event(), header.phase, header.clock)
        return Decision(header, closed=closed)

    def over(self, header: Header) -> str:
        """Why the job is finished, "last" (iteration) or "budget"; empty while it is not."""
        if header.phase is not Phase.FINISHED:
            return ""
        return (Event.BUDGET if 0 < self.settings.most_releases <= header.releases else Event.LAST).value

    # Replies.

    def _wrong_client(self, client: str) -> Refused | None:
        if not valid_id(client):
            return Refused(
                "bad_id", f"a client's id has 1 to {MOST_ID_BYTES} UTF-8 bytes, no control characters"
            )
        if self.settings.kind == "cross_silo" and client not in self.settings.members:
            return Refused("not_a_member", "only named members take part")
        return None

    def _admitted(self, header: Header, entry: Entry, client: str, *, repeated: bool) -> Admitted:
        if self.settings.mode == "buffered":
            until = entry.started_at + self.settings.update_model_time_window_s
        else:
            until = header.began + self.settings.global_iteration_time_window_s
        return Admitted(
            entry.iteration, entry.version, self.tickets.issue(client, entry.iteration), until, repeated
        )

    def _not_yet(self, header: Header, draw: float, reason: WaitReason, detail: str = "") -> NotYet:
        return NotYet(self._come_back(header, draw), reason, detail)

    def _refuse(self, header: Header, draw: float, code: RefusalCode, reason: str) -> Refused:
        over = header.phase is Phase.FINISHED
        return Refused(code, reason, None if over else self._come_back(header, draw))

    def _come_back(self, header: Header, draw: float) -> float:
        """When asking again is likely of use: the end of the iteration as far as the last one tells, within the
        bounds set, spread by a quarter of the wait so that not all come at once."""
        settings, now, ends = self.settings, header.clock, self.life.deadline(header)
        if settings.sampled and header.phase is Phase.STARTING and ends is not None:
            wait_s = ends - now  # nothing but its window ends it
        elif header.phase is Phase.STARTING and header.starts:
            missing = self.life.thresholds.starts_close - header.starts
            wait_s = (now - header.began) * missing / header.starts
        elif header.phase is Phase.AGGREGATING or header.opened_at is None:
            wait_s = settings.come_back_min_s
        else:
            # Longer than the last one took, or the first of all: half as long again as it has lasted.
            expected_s, lasted_s = header.took_s, now - header.opened_at
            wait_s = expected_s - lasted_s if expected_s > lasted_s else lasted_s / 2
        if ends is not None:
            wait_s = min(wait_s, ends - now)
        wait_s = min(max(wait_s, settings.come_back_min_s), settings.come_back_max_s)
        return now + wait_s * (1.0 + draw / 4.0)


def valid_id(client: str) -> bool:
    """Whether ``client`` is an id: 1 to 256 UTF-8 bytes, no control characters."""
    try:
        size = len(client.encode())
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return 1 <= size <= MOST_ID_BYTES and _CONTROL.search(client) is None
