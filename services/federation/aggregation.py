"""The worker that sums what was counted: takes tasks under leases, as every server does.

A group's uploads become one integer sum; the last task merges the sums and lets the strategy make the next version.
Results are stored under the attempt's own name before they are delivered, so a server that dies, or was only slow,
neither loses nor overwrites anything.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from federated.compression import BodyRefused
from federated.privacy.randomness import SYSTEM
from federated.privacy.server import apply_sum
from federated.rounds import Desk, JobUnknown, RecordRefused, Slot, Store, StoreUnavailable, Task
from federated.secagg.ring import RingRefused
from federated.strategies import StateRefused
from federated.sums import Contribution, ContributionRefused, Sum, SumMismatch, add_all
from services.federation.batches import load_batch
from services.federation.figures import Figures, keep_figures
from services.federation.hosted import HostedJob
from services.federation.masked_sums import MaskedSums
from services.federation.secure import MasksStay, SecureRounds
from services.federation.versions import VersionGone, load_state, publish

CHUNK_BYTES: Final = 64 * 2**20
"""Decoded vectors held at once while a group is summed."""
_COUNT_BYTES: Final = 8  # before a partial sum: the bytes of the bodies in it
_IDLE_S: Final = (0.01, 0.25)

log = logging.getLogger(__name__)


class LeaseLost(RuntimeError):
    """Another server has taken or done the task; going on is of no use."""


@dataclass
class Done:
    """What this server's worker did, for the metrics."""

    groups: int = 0
    merges: int = 0
    failures: int = 0
    seconds: float = 0.0


class Aggregator:
    """Works for one job. ``name`` is the server's. ``step`` does one task; ``run`` does them until told to stop."""

    def __init__(
        self,
        store: Store,
        job: HostedJob,
        desk: Desk,
        name: str,
        clock: Callable[[], float] = time.time,
        chunk_bytes: int = CHUNK_BYTES,
        secure: SecureRounds | None = None,
    ) -> None:
        self._store = store
        self._job = job
        self._desk = desk
        self._name = name
        self._clock = clock
        self._chunk = max(1, chunk_bytes // (4 * max(1, job.layout.size) * len(job.vectors)))
        self._secure = secure
        self._masked = None if secure is None else MaskedSums(store, job, desk, secure)
        self.done = Done()
        self.wake = threading.Event()

    def run(self, stop: threading.Event) -> None:
        """Take and do tasks until ``stop`` is set. ``wake`` makes it look at once."""
        idle_s = _IDLE_S[0]
        while not stop.is_set():
            try:
                worked = self.step()
            except StoreUnavailable as error:
                log.warning("job %s: %s", self._job.name, error)
                worked = False
            except JobUnknown:
                return
            idle_s = _IDLE_S[0] if worked else min(2 * idle_s, _IDLE_S[1])
            if not worked and self.wake.wait(idle_s):
                self.wake.clear()
                idle_s = _IDLE_S[0]

    def step(self) -> bool:
        """Do one task, if there is one. Raises StoreUnavailable and JobUnknown."""
        merge = self._secure is None or self._secure.ready()
        task = self._desk.claim(self._name, self._clock(), merge=merge)
        if task is None:
            return False
        began = time.perf_counter()
        try:
            if task.kind == "group":
                self._sum(task)
            else:
                self._merge(task)
        except MasksStay as error:
            log.error("job %s: %s: %s", self._job.name, task, error)
            assert self._secure is not None
            self._secure.failed(task.iteration, str(error))
        except LeaseLost as error:
            log.info("job %s: %s", self._job.name, error)
        except (
            BodyRefused,
            ContributionRefused,
            RecordRefused,
            RingRefused,
            StateRefused,
            SumMismatch,
            VersionGone,
        ) as error:
            log.error("job %s: %s: %s", self._job.name, task, error)
            self._give_up(task)
        except (JobUnknown, StoreUnavailable):
            raise
        except Exception:
            # Whatever it is, the round must not wait for it: others may try, and then the iteration is invalid.
            log.exception("job %s: %s", self._job.name, task)
            self._give_up(task)
        self.done.seconds += time.perf_counter() - began
        return True

    def _give_up(self, task: Task) -> None:
        self.done.failures += 1
        failures = self._desk.give_up(task, self._clock())
        log.error("job %s: %s %d has failed %d times", self._job.name, task.kind, task.number, failures)

    def _sum(self, task: Task) -> None:
        keys = self._job.keys
        body = (
            self._plain(task) if self._masked is None else self._masked.group(task, partial(self._hold, task))
        )
        self._store.put_blob(keys.partial(task.iteration, task.number, task.attempt), body)
        self.done.groups += self._desk.deliver(task, self._clock())

    def _plain(self, task: Task) -> bytes:
        total, received = self._job.empty_sum(), 0
        if self._job.strategy.needs == "sum":
            for chunk in self._chunks(self._desk.slots(task)):
                received += self._add(total, chunk)
                self._hold(task)
        return received.to_bytes(_COUNT_BYTES, "little") + total.to_bytes()

    def _hold(self, task: Task) -> None:
        if not self._desk.renew(task, self._clock()):
            raise LeaseLost(f"{task.kind} {task.number} of iteration {task.iteration} went to another server")

    def _add(self, total: Sum, slots: Sequence[Slot]) -> int:
        """Add what ``slots`` name; gives the bytes of their bodies."""
        contributions: list[Contribution] = []
        received = 0
        for slot in slots:
            body = self._store.get_blob(self._job.keys.body(slot.started, slot.client, slot.digest))
            if body is not None:
                contributions.append(self._job.contribution_of(slot, body))
                received += len(body)
                continue
            batch = load_batch(self._store, self._job, slot.started, slot.digest)
            if batch is None:
                raise RecordRefused(f"the body of slot {slot.index} in iteration {slot.iteration} is missing")
            # Its members stand in consecutive slots, perhaps of two groups: that of the first one adds it.
            if batch.clients[0] == slot.client:
                total.merge(batch.total)
                received += 8 * self._job.layout.size * len(self._job.vectors)
        add_all(total, contributions)
        return received

    def _merge(self, task: Task) -> None:
        job, keys = self._job, self._job.keys
        header = self._desk.header()
        if header.iteration != task.iteration:
            raise LeaseLost(f"iteration {task.iteration} is over")
        state = load_state(self._store, job, header.version, header.attempt)
        if job.strategy.needs == "updates":
            slots = self._desk.slots(replace(task, first=0, last=header.uploads))
            contributions, received = self._sorted(slots)
            state = job.strategy.apply_updates(state, contributions)
            loss = sum(c.loss * c.weight for c in contributions) / sum(c.weight for c in contributions)
        else:
            hold = partial(self._hold, task)
            total, received = self._total(task) if self._masked is None else self._masked.total(task, hold)
            # A merge that is tried again draws fresh noise; one attempt alone is ever published.
            state, released = apply_sum(job.strategy, job.protection, state, total, SYSTEM)
            loss = released.mean_scalar("loss")
        publish(self._store, job, header.version + 1, task.attempt, state, header.attempt)
        private = job.protection.section.mechanism != "none"  # then nobody says how well it learns
        keep_figures(self._store, keys, task.iteration, Figures(received, None if private else loss))
        self.done.merges += self._desk.deliver(task, self._clock())
        if job.protection.most_reports == task.iteration:
            log.warning(
                "job %s: devices that took part in all of its %d iterations have spent their privacy budgets: it goes "
                "on with others alone, and waits for them until it is stopped",
                job.name,
                task.iteration,
            )
        if self._secure is not None:
            self._secure.done(task.iteration)

    def _total(self, task: Task) -> tuple[Sum, int]:
        job, total, received = self._job, self._job.empty_sum(), 0
        for number, attempt in task.partials:
            body = self._store.get_blob(job.keys.partial(task.iteration, number, attempt))
            if body is None:
                raise RecordRefused(f"partial sum {number} of iteration {task.iteration} is missing")
            received += int.from_bytes(body[:_COUNT_BYTES], "little")
            total.merge(Sum.from_bytes(body[_COUNT_BYTES:], job.layout.size, job.bounds, job.vectors))
        return total, received

    def _sorted(self, slots: Sequence[Slot]) -> tuple[list[Contribution], int]:
        found, received = [], 0
        for slot in sorted(slots, key=lambda slot: slot.client):
            body = self._store.get_blob(self._job.keys.body(slot.started, slot.client, slot.digest))
            if body is None:
                raise RecordRefused(f"the body of slot {slot.index} in iteration {slot.iteration} is missing")
            found.append(self._job.contribution_of(slot, body))
            received += len(body)
        return found, received

    def _chunks(self, slots: Sequence[Slot]) -> Iterator[Sequence[Slot]]:
        for start in range(0, len(slots), self._chunk):
            yield slots[start : start + self._chunk]
