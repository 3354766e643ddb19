"""The measuring client: sends marked events and updates at a rate, and watches every region for them.

One long poll per region, kind and stage waits for the oldest probe that was not seen there yet; the answer's
watermark covers whatever else came meanwhile. So the load of measuring follows the batches of the pipeline,
not the number of probes.

Exceptions::

    MeasurementFailed    the home region cannot be asked, or took none of the probes
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlencode

import msgspec
import uvloop

from services.freshness.book import Book, Sent
from services.freshness.http import Server, Unreachable
from services.freshness.stages import OF_KIND, REGIONAL, Kind, Stage
from services.freshness.updates import LOG, Update
from services.parameter_server.types import ParameterError
from services.tokens import Token, decode_token, encode_token, log_fingerprint

POLL_MS: Final = 2_000
RETRY_S: Final = 0.2
OUTSTANDING: Final = 256
"""Events on their way at most; beyond it they wait, and that counts."""
WARM_UP_S: Final = 15.0
"""How long every region may take to show a first marked update, before the others count."""
STAMPS_S: Final = 3.0
"""How long to wait for the stamps of processor and trainers once all else is seen."""
STAMPS_EVERY: Final = 15_000
"""Events after which stamps are read during the measurement, too: an API forgets old probes (``PROBES_KEPT``)."""
MAX_PROBES: Final = 200_000


class MeasurementFailed(Exception):
    """There is nothing to measure; the text says why and where."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to send and whom to watch. ``regions``: base URL by name, beside the home region at ``home``, which the
    events go to; of home itself it is where that is watched. ``patience_s``: how long to wait for the last probes."""

    home: str
    regions: Mapping[str, str] = field(default_factory=dict)
    key: str | None = None
    rate: float = 200.0
    seconds: float = 30.0
    patience_s: float = 10.0
    kinds: tuple[Kind, ...] = ("event", "update")

    @property
    def count(self) -> int:
        """Probes of each kind."""
        return max(1, round(self.rate * self.seconds))


@dataclass(frozen=True, slots=True)
class Measured:
    """What was seen. ``started_at_ms``: Unix ms; ``problems``: what went wrong on the way, each once."""

    plan: Plan
    home: str
    book: Book
    started_at_ms: int
    took_s: float
    problems: tuple[str, ...]


_OK: Final = 200
_ACCEPTED: Final = 202
_PAGE: Final = 500
_PROBLEMS: Final = 20


class _Place(msgspec.Struct):
    token: str | None
    reached: bool | None


class _Standing(msgspec.Struct):
    region: str
    stages: dict[Stage, _Place]


class _Receipt(msgspec.Struct):
    token: str


class _Stamped(msgspec.Struct):
    id: str
    accepted_at_ms: float
    after_ms: dict[Stage, float]


class _Page(msgspec.Struct):
    probes: list[_Stamped]
    cursor: str | None


Push = Callable[[], Update]
"""Sends one marked update and returns once every leader has it; raises ParameterError."""
Progress = Callable[[int], None]


def measure(plan: Plan, pushes: Sequence[Push], progress: Progress) -> Measured:
    """Measure as planned. ``pushes`` send marked updates in turn, each on a thread of its own, so that one that waits
    holds up no other (empty: none are sent); ``progress`` is told of probes that were sent. Raises
    MeasurementFailed."""
    if plan.count > MAX_PROBES:
        raise MeasurementFailed(f"{plan.count:,} probes of each kind are more than {MAX_PROBES:,}")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Client(plan, pushes, progress).run())


@dataclass(frozen=True, slots=True)
class _Start:
    """When the first probe is due, on the monotonic and on the wall clock."""

    monotonic_s: float
    wall_ms: float


class _Client:
    """One measurement. Belongs to one event loop."""

    def __init__(self, plan: Plan, pushes: Sequence[Push], progress: Progress) -> None:
        self._plan, self._pushes, self._progress = plan, pushes, progress
        self._run_id = secrets.token_hex(4)
        self._home = Server(plan.home, plan.key)
        self._problems: dict[str, None] = {}
        self._news = asyncio.Event()
        self._book = Book((), 0)

    async def run(self) -> Measured:
        """Send, watch, wait for the last."""
        plan = self._plan
        updates = self._pushes if "update" in plan.kinds else ()
        name = await self._name(self._home)
        # That of home may be another API of that region than the one that takes the probes.
        servers = {name: self._home} | {region: Server(url, plan.key) for region, url in plan.regions.items()}
        self._book = Book(servers, 2 * plan.count + 1_024)
        started_s, started_at_ms = time.monotonic(), time.time_ns() // 1_000_000
        watching: list[asyncio.Task[None]] = []
        try:
            if servers[name] is not self._home:
                await self._require_region(servers[name], name)
            await asyncio.gather(*(self._warm_up(servers, push) for push in updates))
            watching += self._watchers(servers)
            start = _Start(time.monotonic(), time.time() * 1e3)
            sending = [self._send_updates(start, number) for number in range(len(updates))]
            sending += [self._send_events(start)] if "event" in plan.kinds else []
            await asyncio.gather(*sending)
            await self._settle()
            if "event" in plan.kinds:
                await self._gather_stamps()
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            for server in (self._home, *servers.values()):
                server.close()
        if not self._book.ids("event") and not self._book.ids("update"):
            raise MeasurementFailed(next(iter(self._problems), f"{plan.home} took no probe"))
        took_s = time.monotonic() - started_s
        return Measured(plan, name, self._book, started_at_ms, took_s, tuple(self._problems))

    def _watchers(self, servers: Mapping[str, Server]) -> list[asyncio.Task[None]]:
        return [
            asyncio.create_task(self._watch(region, server, kind, stage), name=f"watch-{region}-{stage}")
            for region, server in servers.items()
            for kind in self._plan.kinds
            for stage in OF_KIND[kind]
            if stage in REGIONAL
        ]

    async def _name(self, server: Server) -> str:
        """The name of the region that ``server`` belongs to."""
        try:
            status, body = await server.request("GET", "/v1/freshness")
            if status != _OK:
                raise MeasurementFailed(f"{server.url} answered {_told(status, body)}")
            return msgspec.json.decode(body, type=_Standing).region
        except (Unreachable, msgspec.DecodeError) as error:
            raise MeasurementFailed(f"{server.url}: {error}") from error

    async def _require_region(self, server: Server, name: str) -> None:
        found = await self._name(server)
        if found != name:
            raise MeasurementFailed(
                f"{name} is the region at {self._plan.home}, which takes the probes, and {server.url} is an API of "
                f"{found}: name that one, or send the probes elsewhere with --url"
            )

    async def _warm_up(self, servers: Mapping[str, Server], push: Push) -> None:
        """A region follows the marked updates once it is asked for one; this one does not count."""
        try:
            first = await asyncio.to_thread(push)
        except ParameterError as error:
            self._note(f"marked updates: {error}")
            return
        token = encode_token(_position(first))

        async def shown(region: str, server: Server) -> None:
            deadline_s = time.monotonic() + WARM_UP_S
            while time.monotonic() < deadline_s:
                found = await self._ask(region, server, "parameters", token)
                if found is not None and found.stages["parameters"].reached:
                    return
            self._note(f"{region}: a marked update was not visible within {WARM_UP_S:g} s")

        await asyncio.gather(*(shown(region, server) for region, server in servers.items()))

    async def _send_events(self, start: _Start) -> None:
        """Post marked events, each at its time, whatever becomes of those before."""
        room = asyncio.Semaphore(OUTSTANDING)
        under_way: set[asyncio.Task[None]] = set()
        for number in range(self._plan.count):
            sent = self._due("event", start, number)
            await asyncio.sleep(max(0.0, sent.due_s - time.monotonic()))
            await room.acquire()
            task = asyncio.create_task(self._post(sent))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
            task.add_done_callback(lambda _: room.release())
            if number and number % STAMPS_EVERY == 0:
                reading = asyncio.create_task(self._read_stamps())
                under_way.add(reading)
                reading.add_done_callback(under_way.discard)
        await asyncio.gather(*under_way)

    async def _post(self, sent: Sent) -> None:
        self._book.send(sent)
        try:
            status, body = await self._home.request(
                "POST", "/v1/events", msgspec.json.encode({"type": "probe", "event_id": sent.id})
            )
        except Unreachable as error:
            status, body = 0, str(error).encode()
        at_s = time.monotonic()
        if status == _ACCEPTED:
            token = decode_token(msgspec.json.decode(body, type=_Receipt).token)
            self._book.accept(sent.id, token, "accepted", at_s)
            self._tell()
        else:
            self._book.fail(sent.id)
            self._note(f"a marked event was not taken: {_told(status, body)}")
        self._progress(1)

    def _due(self, kind: Kind, start: _Start, number: int) -> Sent:
        after_s = number / self._plan.rate
        name = f"{kind}-{self._run_id}-{number}"
        return Sent(name, kind, start.monotonic_s + after_s, start.wall_ms + after_s * 1e3)

    async def _send_updates(self, start: _Start, turn: int) -> None:
        """Push the marked updates whose turn it is, each at its time or as soon as the one before is
        acknowledged."""
        loop = asyncio.get_running_loop()
        push = self._pushes[turn]

        def send() -> None:
            for number in range(turn, self._plan.count, len(self._pushes)):
                sent = self._due("update", start, number)
                time.sleep(max(0.0, sent.due_s - time.monotonic()))
                try:
                    update: Update | ParameterError = push()
                except ParameterError as error:
                    update = error
                loop.call_soon_threadsafe(self._pushed, sent, update, time.monotonic())

        await asyncio.to_thread(send)

    def _pushed(self, sent: Sent, update: Update | ParameterError, at_s: float) -> None:
        self._book.send(sent)
        if isinstance(update, ParameterError):
            self._book.fail(sent.id)
            self._note(f"a marked update was not taken: {update}")
        else:
            self._book.accept(sent.id, _position(update), "applied", at_s)
            self._tell()
        self._progress(1)

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _watch(self, region: str, server: Server, kind: Kind, stage: Stage) -> None:
        """Ask how far a stage is as long as there are probes that it was not seen to have."""
        while True:
            token = self._book.oldest(region, kind, stage)
            if token is None:
                await self._news.wait()
                continue
            found = await self._ask(region, server, stage, token)
            if found is not None:
                tokens = {s: decode_token(of.token) for s, of in found.stages.items() if of.token is not None}
                self._book.see(region, kind, tokens, time.monotonic())

    async def _ask(self, region: str, server: Server, stage: Stage, token: str) -> _Standing | None:
        """How far a region is, once its ``stage`` has ``token`` or the poll ends; None, after a pause, where it
        does not say."""
        query = urlencode({"token": token, "stage": stage, "wait_ms": POLL_MS})
        try:
            status, body = await server.request("GET", f"/v1/freshness?{query}")
            if status == _OK:
                return msgspec.json.decode(body, type=_Standing)
            self._note(f"{region} answered {_told(status, body)}")
        except (Unreachable, msgspec.DecodeError) as error:
            self._note(f"{region}: {error}")
        await asyncio.sleep(RETRY_S)
        return None

    async def _settle(self) -> None:
        """Wait until every probe was seen everywhere, or patience ends."""
        deadline_s = time.monotonic() + self._plan.patience_s
        while (unseen := self._book.unseen) and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
        if unseen:
            self._note(
                f"{unseen} times a probe was not visible in a region {self._plan.patience_s:g} s after the last "
                "was sent; the column missing says where, `headwater status` and `headwater sync status` who is behind"
            )

    async def _gather_stamps(self) -> None:
        """Read when processor and trainers had the events; stamps are written behind, so the last come late."""
        deadline_s = time.monotonic() + STAMPS_S
        await self._read_stamps()
        while self._book.unstamped("event") and time.monotonic() < deadline_s:
            await asyncio.sleep(RETRY_S)
            await self._read_stamps()

    async def _read_stamps(self) -> None:
        """Read all that the home region knows of probes."""
        try:
            async for probe in self._listed():
                for stage, after_ms in probe.after_ms.items():
                    if stage not in REGIONAL:
                        self._book.stamp(probe.id, stage, probe.accepted_at_ms + after_ms)
        except (Unreachable, msgspec.DecodeError) as error:
            self._note(f"{self._plan.home}: {error}")

    async def _listed(self) -> AsyncIterator[_Stamped]:
        cursor: str | None = ""
        while cursor is not None:
            query = urlencode({"limit": _PAGE, **({"cursor": cursor} if cursor else {})})
            status, body = await self._home.request("GET", f"/v1/probes?{query}")
            if status != _OK:
                self._note(f"{self._plan.home} answered {_told(status, body)}")
                return
            page = msgspec.json.decode(body, type=_Page)
            for probe in page.probes:
                yield probe
            cursor = page.cursor

    def _note(self, problem: str) -> None:
        if len(self._problems) < _PROBLEMS:
            self._problems[problem] = None


def _position(update: Update) -> Token:
    return Token(log_fingerprint(LOG), ((update.slot, update.number),))


def _told(status: int, body: bytes) -> str:
    return f"{status or 'nothing'}: {body[:500].decode(errors='replace')}"
