"""What a job learns, on its way into a stack: each valid version's change is pushed once, by whichever server.

What is to be pushed, its number and the very gradients, is decided in the store before it is sent, and recorded there
as done afterwards. A server that dies anywhere in between leaves the push to the next one, which repeats it with the
same number: a shard that has it already does not take it again. Rounds never wait for this. While the stack is away
nothing piles up: the next push is the change since the last one, over however many versions.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from federated.packing import BodyMalformed, pack, unpack
from federated.rounds import Desk, JobUnknown, Keys, Phase, Store, StoreUnavailable
from federated.weights import Array
from services.federation.hosted import HostedJob
from services.federation.teaching import NotTaught
from services.federation.versions import VersionGone, first_state, load_state
from services.parameter_server.types import Keys as RowKeys
from services.parameter_server.types import Rows

_MAGIC: Final = b"HWo1"
_LEASE_S: Final = 15.0
"""How long a server may be at one push before another takes it over. Above the deadline of a call to the stack."""
_IDLE_S: Final = 0.1
_BACK_OFF_S: Final = (0.5, 30.0)
_PAGE: Final = 256

log = logging.getLogger(__name__)


class StackAway(ConnectionError):
    """The stack cannot be reached, or does not have what the job is about; later it may."""


class Stack(Protocol):
    """Where pushes go. Raises StackAway throughout."""

    def open(self) -> None:
        """Connect and load what pushes need, so that the first does not wait for it."""
        ...

    def prepare(self, change: Array) -> tuple[RowKeys, Rows]:
        """The keys [N] and gradients [N, d] by which the stack learns ``change`` [D]."""
        ...

    def push(self, number: int, at_ns: int, keys: RowKeys, gradients: Rows) -> float:
        """Push them under ``number``, unless they are there already; gives the time applied (Unix ms). Raises
        NotTaught for what is refused."""
        ...

    def close(self) -> None:
        """End all connections."""
        ...


@dataclass(frozen=True, slots=True)
class Pushed:
    """One push, for people to look at: the change from version ``since`` to ``version``. Times are Unix ms;
    ``refused`` says why it was, else ''."""

    version: int
    since: int
    number: int
    sent_at_ms: float
    applied_at_ms: float
    refused: str = ""


@dataclass(frozen=True, slots=True)
class _Record:
    """Where a job's pushes stand. ``pushed``: the version that the stack has, whose weights are the blob ``base`` ("":
    those that the job began with). ``next_*``: what is to be sent now, decided (next_version 0: nothing). ``owner``
    works on it until ``until``."""

    pushed: int = 0
    base: str = ""
    number: int = 0
    next_version: int = 0
    next_blob: str = ""
    next_number: int = 0
    next_at_ns: int = 0
    owner: str = ""
    until: float = 0.0

    @staticmethod
    def of(body: bytes | None) -> _Record:
        return _Record() if body is None else _Record(**json.loads(body))

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()


class Outbox:
    """Pushes for one job, in a thread of its own. ``name`` is the server's; ``told`` hears what became of each push
    (applied, refused, away, failed), ``waiting`` how many versions the stack does not have yet."""

    def __init__(
        self,
        store: Store,
        job: HostedJob,
        desk: Desk,
        stack: Stack,
        name: str,
        *,
        told: Callable[[str], None] = lambda outcome: None,
        waiting: Callable[[int], None] = lambda versions: None,
        clock: Callable[[], float] = time.time,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._store = store
        self._job = job
        self._desk = desk
        self._stack = stack
        # A server that is started again under its name is another: its lease of before is no longer its.
        self._owner = f"{name}/{secrets.token_hex(4)}"
        self._told = told
        self._waiting = waiting
        self._clock = clock
        self._now_ns = now_ns
        self._record = record_key(job.keys)

    def run(self, stop: threading.Event) -> None:
        """Push what there is until ``stop`` is set, or the job is dropped."""
        back_off_s = _BACK_OFF_S[0]
        pause_s = 0.0
        self._open()
        while not stop.wait(pause_s):
            try:
                pause_s = 0.0 if self.step() else _IDLE_S
                back_off_s = _BACK_OFF_S[0]
                continue
            except JobUnknown:
                break
            except StackAway as error:
                self._told("away")
                log.warning("job %s: the stack is away: %s", self._job.name, error)
            except (StoreUnavailable, VersionGone) as error:
                log.warning("job %s: %s", self._job.name, error)
            except Exception:
                # It must not end the thread: the next version, or another server, may do better.
                self._told("failed")
                log.exception("job %s: what it learned could not be pushed", self._job.name)
            pause_s = back_off_s
            back_off_s = min(2.0 * back_off_s, _BACK_OFF_S[1])
        self._stack.close()

    def _open(self) -> None:
        """Open the stack of a job that goes on; where that fails, the first push tries again."""
        try:
            if self._desk.header().phase is not Phase.FINISHED:
                self._stack.open()
        except (StackAway, StoreUnavailable, JobUnknown) as error:
            log.warning("job %s: nothing can be pushed yet: %s", self._job.name, error)
        except Exception:
            log.exception("job %s: its stack cannot be opened", self._job.name)

    def step(self) -> bool:
        """Send one push, if there is one and nobody else is at it. Raises StackAway, StoreUnavailable, JobUnknown, and
        VersionGone where a version was followed by others meanwhile."""
        header = self._desk.header()
        record = self._claim(header.version)
        if record is None:
            return False
        try:
            if not record.next_version:
                planned = self._plan(record, header.version, header.attempt)
                if planned is None:
                    return False
                record = planned
            self._send(record)
        except BaseException:
            self._write(record, lambda now: replace(now, owner="", until=0.0))
            raise
        return True

    def _claim(self, version: int) -> _Record | None:
        """The record as this server's to work on, if there is work and nobody else is at it."""
        now = self._clock()

        def step(values: Mapping[str, bytes | None]) -> tuple[Mapping[str, bytes], tuple[_Record, bool]]:
            record = _Record.of(values[self._record])
            if version <= record.pushed and not record.next_version:
                return {}, (record, False)
            if record.owner != self._owner and record.until > now:
                return {}, (record, False)
            taken = replace(record, owner=self._owner, until=now + _LEASE_S)
            return {self._record: taken.to_bytes()}, (taken, True)

        record, mine = self._store.transact([self._record], step)
        self._waiting(max(0, version - record.pushed))
        return record if mine else None

    def _plan(self, record: _Record, version: int, attempt: int) -> _Record | None:
        """Decide the next push: from then on it is the same for every server. None where another did meanwhile."""
        job = self._job
        state = load_state(self._store, job, version, attempt)
        before = self._weights(record.base) if record.base else first_state(self._store, job).weights
        keys, gradients = self._stack.prepare(state.weights - before)
        blob = f"{blob_prefix(job.keys)}{version:08d}/{secrets.token_hex(4)}"
        vectors: dict[str, npt.NDArray[Any]] = {
            "keys": keys.view(np.int64),
            "gradients": gradients.reshape(-1),
            "weights": state.weights,
        }
        self._store.put_blob(blob, pack(_MAGIC, {"rows": len(keys)}, vectors))
        at_ns = self._now_ns()
        # The clock's microseconds: a job that is dropped and begun anew under its name does not repeat a number.
        number = max(at_ns // 1_000, record.number + 1)
        return self._write(
            record,
            lambda now: replace(
                now, next_version=version, next_blob=blob, next_number=number, next_at_ns=at_ns
            ),
        )

    def _send(self, record: _Record) -> None:
        values, vectors = self._read(record.next_blob)
        gradients = vectors["gradients"].reshape(values["rows"], -1)
        refused, applied_at_ms = "", 0.0
        try:
            applied_at_ms = self._stack.push(
                record.next_number, record.next_at_ns, vectors["keys"].view(np.uint64), gradients
            )
        except NotTaught as error:
            # Sent again it would be refused again: the job goes on without.
            refused = str(error)
            log.error("job %s: version %d: %s", self._job.name, record.next_version, error)
        done = Pushed(
            record.next_version, record.pushed, record.next_number, record.next_at_ns / 1e6, applied_at_ms,
            refused,
        )  # fmt: skip
        after = _Record(record.next_version, record.next_blob, record.next_number)
        logged = {_pushed_key(self._job.keys, done.version): json.dumps(asdict(done)).encode()}
        if self._write(record, lambda now: after, logged) is not None:
            self._told("refused" if refused else "applied")
            self._waiting(max(0, self._desk.header().version - after.pushed))
            self._sweep(after)

    def _write(
        self,
        record: _Record,
        change: Callable[[_Record], _Record],
        more: Mapping[str, bytes] | None = None,
    ) -> _Record | None:
        """Write what ``change`` makes of the record, and ``more``; None where it is no longer ``record``."""

        def step(values: Mapping[str, bytes | None]) -> tuple[Mapping[str, bytes], _Record | None]:
            if _Record.of(values[self._record]) != record:
                return {}, None
            changed = change(record)
            return {self._record: changed.to_bytes(), **(more or {})}, changed

        return self._store.transact([self._record], step)

    def _sweep(self, record: _Record) -> None:
        """Drop bodies of pushes up to this one, but for the weights that the next one starts from."""
        prefix = blob_prefix(self._job.keys)
        for key in list(self._store.blobs(prefix)):
            if key != record.base and int(key.removeprefix(prefix)[:8]) <= record.pushed:
                self._store.delete(key)

    def _weights(self, blob: str) -> Array:
        weights: Array = self._read(blob)[1]["weights"]
        return weights

    def _read(self, blob: str) -> tuple[dict[str, Any], dict[str, Any]]:
        body = self._store.get_blob(blob)
        if body is None:
            raise BodyMalformed(f"{blob} is not in the store")
        return unpack(_MAGIC, body)


def read_pushes(store: Store, keys: Keys, versions: Sequence[int]) -> Mapping[int, Pushed]:
    """By version, the push that has it in it; a version that was not pushed yet is missing."""
    found: dict[int, Pushed] = {}
    for start in range(0, len(versions), _PAGE):
        page = {_pushed_key(keys, version): version for version in versions[start : start + _PAGE]}
        bodies = store.transact(list(page), lambda values: ({}, dict(values)))
        found |= {page[key]: Pushed(**json.loads(body)) for key, body in bodies.items() if body is not None}
    covering: Pushed | None = None
    for version in sorted(versions, reverse=True):
        covering = found.get(version, covering)
        if covering is not None and covering.since < version:
            found[version] = covering
    return found


def record_key(keys: Keys) -> str:
    """Record: where a job's pushes stand."""
    return f"{keys.all}into"


def blob_prefix(keys: Keys) -> str:
    """Prefix of the bodies of pushes."""
    return f"{keys.all}into/"


def _pushed_key(keys: Keys, version: int) -> str:
    return f"{keys.all}pushed/{version:08d}"
