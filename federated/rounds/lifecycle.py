"""The life of an iteration: windows, phases, and what ends it. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from federated.rounds.phases import Event, Phase, follow
from federated.rounds.records import FLIGHT_SLICES, Closed, Entry, Header
from federated.rounds.settings import RoundSettings, Thresholds


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """Which phase a job is in, by its counters and the clock."""

    settings: RoundSettings
    thresholds: Thresholds = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "thresholds", self.settings.thresholds)

    def deadline(self, header: Header) -> float | None:
        """When the phase ends if nothing more happens, or None when no window is open."""
        settings = self.settings
        if header.phase is Phase.AGGREGATING:
            return header.phase_at + settings.aggregation_time_window_s
        if header.opened_at is None or header.phase in (Phase.STOPPED, Phase.FINISHED):
            return None
        ends = header.opened_at + settings.global_iteration_time_window_s
        if header.phase is Phase.STARTING:
            ends = min(ends, header.opened_at + settings.start_fl_job_time_window_s)
        elif header.phase is Phase.UPDATING and header.first_upload_at is not None:
            ends = min(ends, header.first_upload_at + settings.update_model_time_window_s)
        return ends

    def settle(self, header: Header, now: float) -> tuple[Header, tuple[Closed, ...]]:
        """The header at ``now``: the clock moved on, windows that ran out applied at the time they did."""
        if not math.isfinite(now):
            raise ValueError(f"no time: {now}")
        closed: tuple[Closed, ...] = ()
        while (ends := self.deadline(header)) is not None and ends <= now:
            header, more = self._window_ended(header, ends)
            closed += more
        if now > header.clock:
            header = header._replace(clock=now)
        if self.settings.mode == "buffered":
            header = self._age_flights(header)
        return header, closed

    def _window_ended(self, header: Header, ends: float) -> tuple[Header, tuple[Closed, ...]]:
        thresholds, settings = self.thresholds, self.settings
        header = header._replace(clock=max(header.clock, ends))
        if header.phase is Phase.AGGREGATING:
            return self.end(header, Event.AGGREGATION_WINDOW, ends)
        if header.phase is Phase.BUFFERING and header.uploads >= thresholds.uploads_floor:
            return self._aggregate(header, Event.UPLOADS_ENOUGH, ends), ()
        if header.phase is Phase.UPDATING and header.uploads >= thresholds.uploads_floor:
            return self._aggregate(header, Event.UPLOADS_ENOUGH, ends), ()
        if ends >= header.began + settings.global_iteration_time_window_s:
            return self.end(header, Event.GLOBAL_WINDOW, ends)
        if header.phase is Phase.UPDATING:
            return self.end(header, Event.TOO_FEW_UPLOADS, ends)
        if header.starts < thresholds.starts_floor:
            return self.end(header, Event.TOO_FEW_STARTS, ends)
        return self.close_full(self.begin_updates(header, Event.STARTS_ENOUGH, ends))

    def begin_updates(self, header: Header, event: Event, at: float) -> Header:
        phase = follow(header.phase, event)
        assert phase is not None
        # Early uploads have opened the update window as soon as there is one.
        return header._replace(phase=phase, phase_at=at, first_upload_at=at if header.uploads else None)

    def close_full(self, header: Header) -> tuple[Header, tuple[Closed, ...]]:
        if header.phase is Phase.AGGREGATING:
            return header, ()
        needed = self.thresholds.uploads_close
        whole = self.settings.kind == "cross_silo" or self.settings.sampled
        if whole and header.phase is Phase.UPDATING:
            needed = header.starts  # who is absent by rule, or was not drawn, is not waited for
        if header.uploads >= needed:
            return self._aggregate(header, Event.UPLOADS_FULL, header.clock), ()
        return header, ()

    def _aggregate(self, header: Header, event: Event, at: float) -> Header:
        phase = follow(header.phase, event)
        assert phase is not None
        return header._replace(phase=phase, phase_at=at, releases=header.releases + 1)

    def is_last(self, header: Header) -> bool:
        """Whether no iteration may follow this one: it is the last, or its release takes the rest of the budget."""
        most = self.settings.most_releases
        return header.iteration >= self.settings.fl_iteration_num or 0 < most <= header.releases

    def end(self, header: Header, event: Event, at: float) -> tuple[Header, tuple[Closed, ...]]:
        """The iteration is over. One that nobody took part in leaves no trace and is not counted."""
        assert follow(header.phase, event) is None
        valid = event is Event.AGGREGATED
        if event is Event.STOP and header.opened_at is None:
            return self.enter(header, Event.STOP, None, at), ()
        closed = Closed(
            header.iteration,
            header.version,
            valid,
            event,
            header.starts,
            header.uploads,
            header.began,
            at,
            header.releases,
        )
        header = header._replace(
            iteration=header.iteration + 1,
            valid=header.valid + valid,
            invalid=header.invalid + (not valid),
        )
        if header.iteration > self.settings.fl_iteration_num:
            header = header._replace(iteration=self.settings.fl_iteration_num)
            return self.enter(header, Event.LAST, None, at), (closed,)
        if 0 < self.settings.most_releases <= header.releases:
            header = header._replace(iteration=closed.iteration)
            return self.enter(header, Event.BUDGET, None, at), (closed,)
        if header.stop_wanted:
            return self.enter(header, Event.STOP, None, at), (closed,)
        return self.enter(header, self.next_event(), None, at), (closed,)

    def enter(self, header: Header, event: Event, source: Phase | None, at: float) -> Header:
        phase = follow(source, event)
        assert phase is not None
        carried = header.next_uploads if phase is Phase.BUFFERING else 0
        opened = at if carried else None
        header = header._replace(phase=phase, phase_at=at, opened_at=opened, first_upload_at=opened,
            starts=0, uploads=carried, next_uploads=header.next_uploads - carried,
            stop_wanted=header.stop_wanted and phase is not Phase.STOPPED,
        )  # fmt: skip
        if phase is Phase.BUFFERING and carried >= self.settings.buffer_size:
            return self._aggregate(header, Event.UPLOADS_FULL, at)
        return header

    def next_event(self) -> Event:
        return Event.NEXT_BUFFERED if self.settings.mode == "buffered" else Event.NEXT_SYNCHRONOUS

    # Clients in training, in buffered mode: counted by slice of time, so that those who never return are forgotten.

    def _slice_of(self, time: float) -> int:
        return math.floor(time / (self.settings.update_model_time_window_s / FLIGHT_SLICES))

    def _age_flights(self, header: Header) -> Header:
        newest = self._slice_of(header.clock)
        passed = newest - header.flight_slice
        if passed <= 0:
            return header
        kept = header.flights[passed:] if passed < len(header.flights) else ()
        flights = kept + (0,) * (len(header.flights) - len(kept))
        return header._replace(flights=flights, flight_slice=newest)

    def land(self, header: Header, entry: Entry) -> Header:
        place = self._slice_of(entry.started_at) - header.flight_slice - 1
        if not -len(header.flights) <= place < 0 or header.flights[place] == 0:
            return header
        flights = list(header.flights)
        flights[place] -= 1
        return header._replace(flights=tuple(flights))
