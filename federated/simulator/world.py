"""Virtual time: the servers' own rounds (``rounds.Desk``), driven by simulated clients that come, go and are slow.

Three things happen, in order of time: an idle client knocks (``arrivals``), a body arrives, a window runs out. What
falls within ``grain_s`` shares one transaction, as requests that wait at a server do. Nobody trains here: a client
that is admitted is known to upload at a certain time, or never, and only uploads that were counted are trained later.

Two things are not simulated one by one, since every answer would be "come back": knocks in the update phase of
synchronous rounds, where time moves on to the next upload; and bodies that are ready before the start phase has
closed, which are handed in when it does.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from federated.device import LocalTraining
from federated.rounds import (
    Accepted,
    Admitted,
    Desk,
    Finished,
    Header,
    NotYet,
    Phase,
    Refused,
    StartRequest,
    UploadRequest,
)
from federated.selection import DeviceFacts
from federated.simulator.arrivals import Arrivals, NobodyComes, Position
from federated.simulator.availability import Availability
from federated.simulator.draws import Purpose, uniform
from federated.simulator.population import Population

SERVER = "simulator"
MOST_TOGETHER = 256
NEVER_S = float("inf")

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, order=True)
class Flight:
    """A client in training: its body arrives ``at_s``; ``order`` settles ties."""

    at_s: float
    order: int
    client: int
    iteration: int
    version: int
    ticket: bytes
    examples: int
    steps: int


@dataclass(slots=True)
class Tally:
    """What happened so far, in counts; ``bytes_down`` of models sent to clients, also to those who dropped out."""

    admitted: int = 0
    dropped: int = 0
    straggling: int = 0
    late: int = 0
    bytes_down: int = 0


@dataclass(frozen=True, slots=True)
class Counted:
    """A counted upload: by whom, of the iteration in which it ``started``, and how many versions old."""

    client: int
    started: int
    staleness: int


@dataclass(frozen=True, slots=True)
class Ready:
    """An iteration whose uploads are to be trained, summed and applied: then ``World.applied`` or ``World.failed``."""

    header: Header
    uploads: list[Counted]
    now_s: float


@dataclass(frozen=True, slots=True)
class Voided:
    """Iterations that ended without a new version."""

    now_s: float


class World:
    """One job's clients and rounds in virtual time.

    ``training`` gives the local training of a version, ``down_bytes`` (client, held version or −1, version) and
    ``up_bytes`` () the sizes of bodies. ``names`` are the clients' ids on the wire, their
    numbers when absent. ``needs_facts`` says whether the selection looks at the device's state. A client that has sent
    ``most_reports`` takes no further part: its privacy budget is spent. What arrives late was sent, too. Without
    ``tells_examples``, as under a mechanism of privacy, clients do not say how many they have.
    """

    def __init__(
        self,
        desk: Desk,
        population: Population,
        counts: Counts,
        availability: Availability,
        *,
        training: Callable[[int], LocalTraining],
        down_bytes: Callable[[int, int], int],
        up_bytes: Callable[[], int],
        names: Sequence[str] = (),
        needs_facts: bool = False,
        grain_s: float = 0.5,
        patience_s: float = 86_400.0,
        most_reports: int | None = None,
        tells_examples: bool = True,
    ) -> None:
        if len(counts) != population.size:
            raise ValueError(f"{population.size} clients, but data of {len(counts)}")
        if not counts.any():
            raise ValueError("no client has an example to train on")
        self.desk, self._population, self._counts = desk, population, counts
        self._availability, self._patience_s = availability, patience_s
        self._training, self._down_bytes, self._up_bytes = training, down_bytes, up_bytes
        if names and len(names) != population.size:
            raise ValueError(f"{len(names)} members for the {population.size} clients that have data")
        self._names = dict(enumerate(names))
        self._numbers = {name: number for number, name in self._names.items()}
        self._needs_facts, self._grain_s = needs_facts, grain_s
        self.now_s, self.tally = 0.0, Tally()
        self._admitted_s = 0.0  # when a client could start last
        self._order, self._requests = 0, 0
        self._flights: list[Flight] = []
        self._early: list[Flight] = []  # ready before the start phase closed
        self._counted: dict[
            tuple[int, int], int
        ] = {}  # (client, iteration) to version: uploads not yet learned
        # A client is busy until then: in training (for ever, until its body arrives) or told to come back.
        self._free_at = np.where(counts > 0, 0.0, NEVER_S)
        self.held = np.full(population.size, -1, np.int32)
        self.reports = np.zeros(population.size, np.int32)
        self._most_reports, self._tells_examples = most_reports, tells_examples
        self._arrivals = self._arrivals_from(Position())
        desk.create()

    def _arrivals_from(self, position: Position) -> Arrivals:
        population = self._population
        return Arrivals(
            population.size,
            population.habits.check_in_s,
            population.seed,
            self._availability,
            self._patience_s,
            position,
        )

    def advance(self) -> Ready | Voided | None:
        """Let time pass until an iteration is to be aggregated (Ready) or ended invalid (Voided); None when the job is
        finished or stopped. Raises NobodyComes."""
        while True:
            header = self.desk.header()
            if header.phase in (Phase.FINISHED, Phase.STOPPED) or self._spent(header):
                return None
            if header.phase is Phase.AGGREGATING:
                return Ready(header, self._uploaded(), self.now_s)
            self._release(header)
            deadline_s = self.desk.rounds.life.deadline(header)
            body_s = self._flights[0].at_s if self._flights else NEVER_S
            horizon_s = min(NEVER_S if deadline_s is None else deadline_s, body_s)
            if header.phase is not Phase.UPDATING and self._knocks(horizon_s):
                continue
            if header.phase is Phase.UPDATING:
                self._arrivals.skip_to(horizon_s)
            if deadline_s is not None and deadline_s <= body_s:
                self.now_s = max(self.now_s, deadline_s)
                if self.desk.tick(self.now_s):
                    self._forget_lost()
                    return Voided(self.now_s)
            else:
                until_s = max(body_s, self.now_s) + self._grain_s
                self._bodies(header, until_s if deadline_s is None else min(deadline_s, until_s))

    def applied(self) -> None:
        """The new version of the iteration that was Ready is made."""
        task = self.desk.claim(SERVER, self.now_s)
        assert task is not None, "the simulator alone claims tasks"
        self.desk.deliver(task, self.now_s)

    def failed(self) -> None:
        """No new version could be made of it: the iteration is invalid."""
        for _ in range(self.desk.rounds.settings.aggregation_attempts):
            task = self.desk.claim(SERVER, self.now_s)
            assert task is not None, "the simulator alone claims tasks"
            self.desk.give_up(task, self.now_s)

    @property
    def finished(self) -> bool:
        """Whether the job's last iteration has ended."""
        return self.desk.header().phase is Phase.FINISHED

    @property
    def spent(self) -> bool:
        """Whether too few clients have any privacy budget left for another iteration."""
        return self._spent(self.desk.header())

    def _spent(self, header: Header) -> bool:
        settings = self.desk.rounds.settings
        buffered = settings.mode == "buffered"
        begun = bool(header.starts) and not buffered  # its windows will end it
        if self._most_reports is None or self._flights or self._early or begun:
            return False
        wanted = settings.buffer_size if buffered else settings.thresholds.starts_floor
        left = (self._counts > 0) & (self.reports < self._most_reports)
        return int(np.count_nonzero(left)) < wanted - header.uploads

    @property
    def oldest_in_flight(self) -> int | None:
        """The oldest version that a client started from who trains, or whose upload waits for the next buffer."""
        training = (flight.version for flight in (*self._flights, *self._early))
        return min((*training, *self._counted.values()), default=None)

    # What clients do.

    def _knocks(self, horizon_s: float) -> bool:
        """Clients that knock before ``horizon_s``, as far as they share a transaction. False when none does."""
        knocking: list[int] = []
        until_s, busy = horizon_s, NEVER_S
        while len(knocking) < MOST_TOGETHER:
            arrival = self._arrivals.next(self._free, until_s)
            if arrival is None:
                break
            client, at_s = arrival
            if not knocking:
                until_s = min(horizon_s, at_s + self._grain_s)
            knocking.append(client)
            self._free_at[client] = busy
            self.now_s = max(self.now_s, at_s)
        if not knocking:
            return False
        if self.now_s - self._admitted_s > self._patience_s:
            raise NobodyComes(
                f"clients come, but none could start for {self._patience_s:.0f} s of virtual time: see the selection"
            )
        replies = self.desk.handle(
            [
                StartRequest(self._name(client), self._facts(client), max(int(self.held[client]), 0))
                for client in knocking
            ],
            self.now_s,
            self._draws(knocking),
        )
        for client, reply in zip(knocking, replies, strict=True):
            if isinstance(reply, Admitted):
                self._fly(client, reply)
            elif isinstance(reply, NotYet):
                self._free_at[client] = reply.come_back_at
            else:
                self._free_at[client] = NEVER_S if isinstance(reply, Finished) else self.now_s
        return True

    def _fly(self, client: int, admitted: Admitted) -> None:
        training, count = self._training(admitted.version), int(self._counts[client])
        steps = training.steps_for(count)
        work = training.epochs * count if training.epochs is not None else steps * training.batch_for(count)
        down = self._down_bytes(int(self.held[client]), admitted.version)
        self.held[client] = admitted.version
        self.tally.admitted += 1
        self._admitted_s = self.now_s
        self.tally.bytes_down += down
        took_s = self._population.round_trip_s(
            client, admitted.iteration, down_bytes=down, examples=work, up_bytes=self._up_bytes()
        )
        self.tally.straggling += self._population.straggles(client, admitted.iteration)
        if self._population.drops_out(client, admitted.iteration):
            self.tally.dropped += 1
            self._free_at[client] = self.now_s + took_s
            return
        flight = Flight(
            self.now_s + took_s,
            self._order,
            client,
            admitted.iteration,
            admitted.version,
            admitted.ticket,
            count,
            steps,
        )
        self._order += 1
        heapq.heappush(self._flights, flight)

    def _release(self, header: Header) -> None:
        """Let those who wait for the start phase's end hand in, once it has ended either way."""
        if self._early and (
            header.phase is not Phase.STARTING or header.iteration != self._early[0].iteration
        ):
            for flight in self._early:
                heapq.heappush(self._flights, flight)
            self._early = []

    def _bodies(self, header: Header, until_s: float) -> None:
        """Bodies that arrive before or at ``until_s``, at least one."""
        landed: list[Flight] = []
        while (
            self._flights and len(landed) < MOST_TOGETHER and (not landed or self._flights[0].at_s <= until_s)
        ):
            landed.append(heapq.heappop(self._flights))
        self.now_s = max(self.now_s, landed[-1].at_s)
        if header.phase is Phase.STARTING and not self.desk.rounds.settings.takes_early_uploads:
            self._early += [flight for flight in landed if flight.iteration == header.iteration]
            landed = [flight for flight in landed if flight.iteration != header.iteration]
            if not landed:
                return
        requests = [
            UploadRequest(
                self._name(flight.client),
                flight.iteration,
                flight.ticket,
                flight.iteration.to_bytes(16, "little"),
                flight.examples,
                flight.steps,
                0.0,  # known only to who trains; nothing in a round depends on it
            )
            for flight in landed
        ]
        replies = self.desk.handle(requests, self.now_s, self._draws([f.client for f in landed]))
        for flight, reply in zip(landed, replies, strict=True):
            if isinstance(reply, NotYet):  # the body is there; it is counted later
                again = replace(flight, at_s=max(reply.come_back_at, self.now_s), order=self._order)
                self._order += 1
                heapq.heappush(self._flights, again)
            elif isinstance(reply, Accepted):
                self._counted[flight.client, flight.iteration] = flight.version
                self._free_at[flight.client] = self._reported(flight.client, reply.come_back_at)
            else:
                assert isinstance(reply, Refused)
                self.tally.late += 1
                back_s = NEVER_S if reply.come_back_at is None else reply.come_back_at
                self._free_at[flight.client] = self._reported(flight.client, back_s)

    def _reported(self, client: int, back_s: float) -> float:
        """When a client comes back that has sent one more report, and could at ``back_s``."""
        self.reports[client] += 1
        if self._most_reports is not None and self.reports[client] >= self._most_reports:
            return NEVER_S
        return back_s

    def _free(self, clients: npt.NDArray[np.int64], times: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        return np.asarray(self._free_at[clients] <= times, np.bool_)

    def _facts(self, client: int) -> DeviceFacts:
        if not self._needs_facts:
            return DeviceFacts()
        examples = int(self._counts[client]) if self._tells_examples else 0
        return self._population.facts(client, self.now_s, examples)

    def _draws(self, clients: list[int]) -> list[float]:
        self._requests += 1
        drawn = uniform(self._population.seed, Purpose.REPLY, np.array(clients), self._requests)
        return [float(number) for number in drawn]

    def _uploaded(self) -> list[Counted]:
        """The uploads of all groups; what remains is the merge."""
        found: list[Counted] = []
        while len(found) < self.desk.header().uploads:
            task = self.desk.claim(SERVER, self.now_s)
            assert task is not None, "the simulator alone claims tasks"
            for slot in self.desk.slots(task):
                client = self._numbers[slot.client] if self._numbers else int(slot.client)
                del self._counted[client, slot.started]
                found.append(Counted(client, slot.started, slot.staleness))
            self.desk.deliver(task, self.now_s)
        self._forget_lost()
        return found

    def _forget_lost(self) -> None:
        """Forget counted uploads that no iteration will learn: those of iterations that ended invalid. The last ones
        wait for the next buffer."""
        lost = len(self._counted) - self.desk.header().next_uploads
        for place in list(self._counted)[:lost]:
            del self._counted[place]

    def _name(self, client: int) -> str:
        return self._names.get(client) or str(client)

    # Checkpoints.

    def save(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """Numbers and columns from which ``restore`` goes on; the store's records are saved beside."""
        values = {
            "now_s": self.now_s,
            "admitted_s": self._admitted_s,
            "order": self._order,
            "requests": self._requests,
            "tally": asdict(self.tally),
            "arrivals": asdict(self._arrivals.position),
        }
        flights = sorted([*self._flights, *self._early])
        counted = [[*place, version] for place, version in self._counted.items()]
        columns: dict[str, npt.NDArray[Any]] = {
            "free_at": self._free_at,
            "held": self.held,
            "reports": self.reports,
            "counted": np.array(counted, np.int64).reshape(-1, 3),
            "flight_times": np.array([f.at_s for f in flights], np.float64),
            "flights": np.array(
                [
                    [f.order, f.client, f.iteration, f.version, f.examples, f.steps,
                     *np.frombuffer(f.ticket, "<i8").tolist()]
                    for f in flights
                ],
                np.int64,
            ).reshape(-1),
        }  # fmt: skip
        return values, columns

    def restore(self, values: dict[str, Any], columns: dict[str, npt.NDArray[Any]]) -> None:
        """Go on where ``save`` was."""
        self.now_s, self._order = float(values["now_s"]), int(values["order"])
        self._requests, self._admitted_s = int(values["requests"]), float(values["admitted_s"])
        self.tally = Tally(**values["tally"])
        self._arrivals = self._arrivals_from(Position(**values["arrivals"]))
        self._free_at = columns["free_at"].copy()
        self.held = columns["held"].copy()
        self.reports = columns["reports"].copy()
        self._counted = {
            (client, iteration): version for client, iteration, version in columns["counted"].tolist()
        }
        rows = columns["flights"].reshape(-1, 8)
        self._flights = []
        for at_s, row in zip(columns["flight_times"].tolist(), rows, strict=True):
            order, client, iteration, version, examples, steps = row[:6].tolist()
            ticket = row[6:].astype("<i8").tobytes()
            self._flights.append(Flight(at_s, order, client, iteration, version, ticket, examples, steps))
