"""When clients can be reached, as pure functions of (client, time): nothing is kept per client."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from federated.simulator.draws import Purpose, uniform

Flags = npt.NDArray[np.bool_]
Times = npt.NDArray[np.float64]
Clients = npt.NDArray[np.int64]

DAY_S = 86_400.0


class AvailabilityRefused(ValueError):
    """A trace or its settings that make no sense; the message says which line or option."""


class Availability(Protocol):
    """A rule of availability."""

    def available(self, clients: Clients, at_s: Times) -> Flags:
        """Whether each of ``clients`` [K] can be reached at its time ``at_s`` [K], in seconds of virtual time."""


@dataclass(frozen=True, slots=True)
class Always:
    """Everyone, all the time."""

    def available(self, clients: Clients, at_s: Times) -> Flags:
        """True."""
        return np.ones(len(clients), np.bool_)


@dataclass(frozen=True, slots=True)
class Bernoulli:
    """In each slot of ``slot_s`` seconds each client is there with probability ``share``."""

    seed: int
    share: float = 0.5
    slot_s: float = 600.0

    def __post_init__(self) -> None:
        _require_share(self.share)
        _require_positive("slot_s", self.slot_s)

    def available(self, clients: Clients, at_s: Times) -> Flags:
        """Drawn by (client, slot)."""
        slots = np.floor(at_s / self.slot_s).astype(np.int64)
        return np.asarray(uniform(self.seed, Purpose.AVAILABLE, clients, slots) < self.share, np.bool_)


@dataclass(frozen=True, slots=True)
class Diurnal:
    """Devices that are mostly there at night: the probability follows a cosine over ``day_s`` with mean ``share``,
    and each client's night comes at its own hour, spread over ``spread`` of the day (time zones and habits)."""

    seed: int
    share: float = 0.3
    spread: float = 0.25
    slot_s: float = 600.0
    day_s: float = DAY_S

    def __post_init__(self) -> None:
        _require_share(self.share)
        _require_positive("slot_s", self.slot_s)
        _require_positive("day_s", self.day_s)
        if not 0.0 <= self.spread <= 1.0:
            raise AvailabilityRefused(f"diurnal: spread must be in [0, 1], not {self.spread}")

    def available(self, clients: Clients, at_s: Times) -> Flags:
        """Drawn by (client, slot)."""
        slots = np.floor(at_s / self.slot_s).astype(np.int64)
        phase = self.spread * uniform(self.seed, Purpose.PHASE, clients)
        swing = min(self.share, 1.0 - self.share)
        chance = self.share + swing * np.cos(2.0 * math.pi * (slots * self.slot_s / self.day_s - phase))
        return np.asarray(uniform(self.seed, Purpose.AVAILABLE, clients, slots) < chance, np.bool_)


@dataclass(frozen=True)
class Trace:
    """Recorded times: client c is there from ``starts[i]`` until before ``ends[i]`` for i in
    ``offsets[c]:offsets[c + 1]``; the trace repeats after ``period_s``. Clients beyond it repeat its clients."""

    offsets: npt.NDArray[np.int64]
    starts: Times
    ends: Times
    period_s: float

    @staticmethod
    def of(rows: Iterable[tuple[int, float, float]]) -> Trace:
        """From rows (client, from_s, until_s). Raises AvailabilityRefused, naming the row, for negative numbers, empty
        or overlapping spans, and when there is none."""
        listed = sorted(rows)
        if not listed:
            raise AvailabilityRefused("the trace has no row, so no client could ever be reached")
        for place, (client, start, end) in enumerate(listed):
            if client < 0 or not 0.0 <= start < end < math.inf:
                raise AvailabilityRefused(f"client {client} from {start} until {end} is no span of time")
            before = listed[place - 1] if place else None
            if before is not None and before[0] == client and before[2] > start:
                raise AvailabilityRefused(f"client {client}: the spans from {before[1]} and {start} overlap")
        clients = np.array([row[0] for row in listed], np.int64)
        offsets = np.searchsorted(clients, np.arange(int(clients[-1]) + 2)).astype(np.int64)
        starts, ends = (np.array([row[column] for row in listed], np.float64) for column in (1, 2))
        return Trace(offsets, starts, ends, float(ends.max()))

    @staticmethod
    def parse(text: str) -> Trace:
        """From CSV with a header ``client,from_s,until_s``. Raises AvailabilityRefused, naming the line."""
        lines = text.splitlines()
        if not lines or [name.strip() for name in lines[0].split(",")] != ["client", "from_s", "until_s"]:
            raise AvailabilityRefused("a trace begins with the line client,from_s,until_s")
        rows: list[tuple[int, float, float]] = []
        for number, line in enumerate(lines[1:], 2):
            if not line.strip():
                continue
            try:
                client, start, end = line.split(",")
                rows.append((int(client), float(start), float(end)))
            except ValueError:
                raise AvailabilityRefused(
                    f"line {number}: {line[:80]!r} is not a client's number and two times"
                ) from None
        return Trace.of(rows)

    def available(self, clients: Clients, at_s: Times) -> Flags:
        """Looked up by bisection, for all at once."""
        known = len(self.offsets) - 1
        rows = clients % known
        at = at_s % self.period_s
        # Spans of all clients in one ascending row: client number times a stride beyond any time, plus the time.
        stride = 2.0 * self.period_s
        owners = np.repeat(np.arange(known), np.diff(self.offsets))
        place = np.searchsorted(owners * stride + self.starts, rows * stride + at, side="right") - 1
        found = place >= self.offsets[rows]
        return np.asarray(found & (at < self.ends[np.maximum(place, 0)]), np.bool_)


def make_availability(name: str, seed: int, *, share: float = 0.5, trace: str | None = None) -> Availability:
    """always, bernoulli, diurnal, or trace with its text. Raises AvailabilityRefused."""
    if name == "always":
        return Always()
    if name == "bernoulli":
        return Bernoulli(seed, share)
    if name == "diurnal":
        return Diurnal(seed, share)
    if name == "trace":
        if trace is None:
            raise AvailabilityRefused("availability trace needs a file of client,from_s,until_s")
        return Trace.parse(trace)
    raise AvailabilityRefused(f"availability {name!r} is none of always, bernoulli, diurnal, trace")


def _require_share(share: float) -> None:
    if not 0.0 < share <= 1.0:
        raise AvailabilityRefused(f"share must be in (0, 1], not {share}: nobody could ever be reached")


def _require_positive(name: str, value: float) -> None:
    if not 0.0 < value < math.inf:
        raise AvailabilityRefused(f"{name} must be a positive number of seconds, not {value}")
