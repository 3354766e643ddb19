"""Random requests, times, repeats, lost replies and deaths of servers, several servers interleaved on one store."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from support.rounds import digest, rounds

from federated.rounds import (
    Accepted,
    Admitted,
    Closed,
    Desk,
    Finished,
    MemoryStore,
    Phase,
    PollRequest,
    Reply,
    Request,
    Slot,
    StartRequest,
    Task,
    UploadRequest,
)
from federated.selection import Poisson

RATE = 0.5  # of those settings that draw clients
CLIENTS = [f"client-{i}" for i in range(12)]
client = st.sampled_from(CLIENTS)
server = st.integers(0, 2)
skew = st.sampled_from([0.0, 0.0, 0.0, -50.0, -1e6])
seconds = st.sampled_from([0.0, 0.5, 5.0, 40.0, 99.0, 100.0, 101.0, 500.0])

SETTINGS = [
    {"start_fl_job_threshold": 6, "update_model_ratio": "0.5"},
    {"start_fl_job_threshold": 4, "update_model_ratio": "0.75", "early_uploads": True},
    {"start_fl_job_threshold": 4, "mode": "over_selection", "over_selection": "1.5"},
    {
        "mode": "buffered",
        "buffer_size": 3,
        "max_concurrency": 5,
        "max_staleness": 1,
        "update_model_ratio": "0.4",
    },
    {"kind": "cross_silo", "members": tuple(CLIENTS[:5])},
    {"kind": "cross_silo", "members": tuple(CLIENTS[:5]), "absent": "proceed", "update_model_ratio": "0.5"},
    {"start_fl_job_threshold": 3, "update_model_ratio": "0.7", "most_releases": 2},
    {"mode": "buffered", "buffer_size": 3, "max_concurrency": 5, "most_releases": 3},
    {"start_fl_job_threshold": 2, "update_model_ratio": "0.5", "sampled": len(CLIENTS)},
    {"start_fl_job_threshold": 2, "update_model_ratio": "0.5", "sampled": len(CLIENTS), "most_releases": 2},
]
WINDOWS = {
    "start_fl_job_time_window_s": 100.0, "update_model_time_window_s": 100.0, "global_iteration_time_window_s": 300.0,
    "aggregation_time_window_s": 50.0, "aggregation_lease_s": 10.0, "aggregation_group": 2, "fl_iteration_num": 6,
}  # fmt: skip


class RoundsUnderFire(RuleBasedStateMachine):
    """The model beside the store: which tickets were given, which uploads accepted, which models made."""

    @initialize(which=st.sampled_from(SETTINGS))
    def begin(self, which: dict[str, Any]) -> None:
        self.rounds = rounds(Poisson(RATE) if "sampled" in which else None, **(WINDOWS | which))
        self.store = MemoryStore()
        self.desks = [Desk(self.store, self.rounds) for _ in range(3)]
        self.desks[0].create()
        self.now = 0.0
        self.tickets: dict[tuple[str, int], bytes] = {}
        self.accepted: dict[tuple[str, int], bytes] = {}
        self.held: list[Task] = []
        self.merged: list[int] = []
        self.clock = 0.0
        self.released = 0
        self.buffered = self.rounds.settings.mode == "buffered"

    def ask(self, number: int, requests: list[Request], late: float) -> list[Reply]:
        self.before = self.desks[0].header().iteration
        replies = self.desks[number].handle(requests, self.now + late, [0.5] * len(requests))
        for request, reply in zip(requests, replies, strict=True):
            self.note(request, reply)
        return replies

    def note(self, request: Request, reply: Reply) -> None:
        if isinstance(reply, Admitted):
            place = (request.client, reply.iteration)
            drawn = self.rounds.tickets.coin(*place) < RATE
            assert drawn or not self.rounds.settings.sampled, "started without being drawn"
            assert reply.repeated == (place in self.tickets) or self.buffered, "started twice, or forgotten"
            assert self.tickets.setdefault(place, reply.ticket) == reply.ticket
            assert reply.repeated or place not in self.accepted
        if isinstance(reply, Accepted):
            assert isinstance(request, UploadRequest)
            place = (request.client, request.iteration)
            assert place in self.tickets, "counted without being admitted"
            assert reply.repeated == (place in self.accepted), "counted twice, or forgotten"
            assert reply.repeated or self.buffered or request.iteration >= self.before, "counted when over"
            assert self.accepted.setdefault(place, request.digest) == request.digest
        if isinstance(reply, Finished):
            assert self.desks[0].header().phase is Phase.FINISHED

    def upload_of(self, who: str, iteration: int, body: str) -> UploadRequest:
        ticket = self.tickets.get((who, iteration), b"\0" * 16)
        return UploadRequest(who, iteration, ticket, digest(who + body), 20, 10, 0.5)

    @rule(number=server, who=st.lists(client, min_size=1, max_size=6), late=skew)
    def clients_start(self, number: int, who: list[str], late: float) -> None:
        self.ask(number, [StartRequest(name) for name in who], late)

    @rule(
        number=server,
        who=st.lists(client, min_size=1, max_size=6),
        late=skew,
        back=st.sampled_from([0, 0, 0, 1, 2]),
    )
    def clients_upload(self, number: int, who: list[str], late: float, back: int) -> None:
        iteration = self.desks[0].header().iteration - back
        self.ask(number, [self.upload_of(name, iteration, "") for name in who], late)

    @rule(number=server, who=client, body=st.sampled_from(["", "x"]))
    def one_repeats(self, number: int, who: str, body: str) -> None:
        for name, iteration in list(self.tickets):
            if name == who:
                self.ask(number, [self.upload_of(who, iteration, body)] * 2, 0.0)

    @rule(number=server, who=client, other=client)
    def one_uses_anothers_ticket(self, number: int, who: str, other: str) -> None:
        iteration = self.desks[0].header().iteration
        request = replace(self.upload_of(other, iteration, ""), client=who)
        if who != other:
            [reply] = self.desks[number].handle([request], self.now, [0.5])
            assert not isinstance(reply, Accepted)

    @rule(number=server, who=client, back=st.integers(0, 3))
    def one_polls(self, number: int, who: str, back: int) -> None:
        self.ask(number, [PollRequest(who, max(0, self.desks[0].header().iteration - back))], 0.0)

    @rule(passed=seconds)
    def time_passes(self, passed: float) -> None:
        self.now += passed

    @rule(number=server, late=skew)
    def a_server_ticks(self, number: int, late: float) -> None:
        self.desks[number].tick(self.now + late)

    @rule(number=server)
    def a_server_claims(self, number: int) -> None:
        task = self.desks[number].claim(f"server-{number}", self.now)
        if task is not None:
            assert task.iteration == self.desks[0].header().iteration
            if task.kind == "group":
                assert len(self.desks[number].slots(task)) == task.last - task.first
            self.held.append(task)

    @rule(number=server, which=st.integers(0, 5), twice=st.booleans())
    def a_server_delivers(self, number: int, which: int, twice: bool) -> None:
        if which >= len(self.held):
            return
        task = self.held[which]
        for _ in range(1 + twice):
            before = self.desks[0].header()
            if self.desks[number].deliver(task, self.now) and task.kind == "merge":
                self.merged.append(task.iteration)
                assert self.desks[0].header().version == before.version + 1

    @rule(which=st.integers(0, 5))
    def a_server_dies(self, which: int) -> None:
        if which < len(self.held):
            self.held.pop(which)

    @rule(number=server, who=st.permutations(CLIENTS))
    def a_whole_iteration(self, number: int, who: list[str]) -> None:
        iteration = self.desks[0].header().iteration
        self.ask(number, [StartRequest(name) for name in who], 0.0)
        self.ask((number + 1) % 3, [self.upload_of(name, iteration, "") for name in who], 0.0)
        while (task := self.desks[number].claim("server", self.now)) is not None:
            if self.desks[number].deliver(task, self.now) and task.kind == "merge":
                self.merged.append(task.iteration)

    def slots(self, iteration: int) -> list[Slot]:
        prefix = self.rounds.tickets.job + f"/iteration/{iteration:08d}/slot/"
        return [Slot.from_bytes(body) for key, body in self.store._records.items() if key.startswith(prefix)]

    @invariant()
    def counters_are_the_records(self) -> None:
        header = self.desks[0].header()
        thresholds = self.rounds.settings.thresholds
        slots = self.slots(header.iteration)
        if header.phase not in (Phase.FINISHED, Phase.STOPPED):
            assert sorted(slot.index for slot in slots) == list(range(header.uploads))
        assert len({(slot.client, slot.started) for slot in slots}) == len(slots)
        assert header.uploads <= thresholds.uploads_close
        if header.phase is not Phase.BUFFERING and self.rounds.settings.mode != "buffered":
            assert header.uploads <= header.starts <= thresholds.starts_close
        assert header.in_flight <= self.rounds.settings.max_concurrency
        assert header.version == header.valid == len(self.merged)
        assert len(set(self.merged)) == len(self.merged), "a model was made twice of one iteration"

    @invariant()
    def time_never_runs_backwards(self) -> None:
        assert self.clock <= self.desks[0].header().clock
        self.clock = self.desks[0].header().clock

    @invariant()
    def iterations_end_within_their_windows(self) -> None:
        header = self.desks[0].header()
        closed: list[Closed] = list(self.desks[0].log())
        longest = (
            self.rounds.settings.global_iteration_time_window_s
            + self.rounds.settings.aggregation_time_window_s
        )
        assert [ended.iteration for ended in closed] == list(range(1, len(closed) + 1))
        for ended in closed:
            assert 0 <= ended.closed_at - ended.opened_at <= longest
            if ended.valid:
                assert ended.uploads >= self.rounds.settings.thresholds.uploads_floor
        done, most = header.phase is Phase.FINISHED, self.rounds.settings.most_releases
        spent = bool(closed) and 0 < most <= closed[-1].releases
        assert done == (len(closed) == self.rounds.settings.fl_iteration_num or spent)
        if not done:
            assert header.iteration == len(closed) + 1

    @invariant()
    def releases_never_pass_the_budget(self) -> None:
        header, closed = self.desks[0].header(), list(self.desks[0].log())
        most = self.rounds.settings.most_releases
        assert header.releases >= self.released, "a release was forgotten"
        self.released = header.releases
        running = header.phase is Phase.AGGREGATING
        assert header.version <= header.releases - running
        assert [ended.releases for ended in closed] == sorted(ended.releases for ended in closed)
        assert header.releases == (closed[-1].releases if closed else 0) + running
        if most:
            assert header.releases <= most
        why = "budget" if 0 < most <= header.releases else "last"
        assert self.rounds.over(header) == (why if header.phase is Phase.FINISHED else "")

    @invariant()
    def whatever_happens_time_alone_ends_the_iteration(self) -> None:
        header = self.desks[0].header()
        far = header.clock + 1e9
        decision = self.rounds.tick(header, far)
        after = header if decision is None else decision.header
        assert self.rounds.life.deadline(after) is None
        assert after.opened_at is None or after.phase in (Phase.STOPPED, Phase.FINISHED)
        most = self.rounds.settings.most_releases
        assert not most or after.releases <= most


def test_rounds_under_fire() -> None:
    run_state_machine_as_test(
        RoundsUnderFire,
        settings=settings(
            max_examples=120,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
