"""Who sums what: an iteration's uploads in groups, claimed by servers under leases, then merged. Pure.

Any server may do any task. One that dies lets its lease run out, and another takes the task; one that was only slow may
still deliver, and the first delivery counts. Each attempt has a number of its own and keeps its result under it, so
nobody overwrites what another delivered.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Literal

from federated.rounds.records import FORMAT, RecordRefused


class UnknownTask(ValueError):
    """Our own fault: a task that this work never gave out."""


@dataclass(frozen=True, slots=True)
class Lease:
    """One task's state: ``attempt`` is the newest given out, ``done`` the one that delivered; 0 for none."""

    owner: str = ""
    until: float = 0.0
    attempt: int = 0
    failures: int = 0
    done: int = 0


@dataclass(frozen=True, slots=True)
class Task:
    """What a server is to do for ``iteration`` before ``until``.

    group: sum the uploads of slots ``first`` up to and without ``last``, keep the sum as partial (number, attempt).
    merge: merge the ``partials``, given as (number, attempt), let the strategy make the next model, keep it.
    """

    kind: Literal["group", "merge"]
    iteration: int
    number: int
    attempt: int
    until: float
    first: int = 0
    last: int = 0
    partials: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Work:
    """The aggregation of one iteration: a lease for each group that was given out so far, and one for the merge."""

    iteration: int
    groups: tuple[Lease, ...] = ()
    merge: Lease = Lease()

    def to_bytes(self) -> bytes:
        """JSON, with the format's version first."""
        leases = [[x.owner, x.until, x.attempt, x.failures, x.done] for x in (*self.groups, self.merge)]
        return json.dumps(
            {"format": FORMAT, "iteration": self.iteration, "leases": leases}, separators=(",", ":")
        ).encode()

    @classmethod
    def from_bytes(cls, body: bytes) -> Work:
        """Raises RecordRefused."""
        try:
            fields = json.loads(body)
            leases = tuple(Lease(*lease) for lease in fields["leases"])
            if fields["format"] != FORMAT or not leases:
                raise RecordRefused(f"work is not of format {FORMAT}")
            return cls(int(fields["iteration"]), leases[:-1], leases[-1])
        except (ValueError, TypeError, KeyError) as error:
            raise RecordRefused(f"no record of an aggregation: {error}") from None


def claim(
    work: Work,
    uploads: int,
    size: int,
    closed: bool,
    server: str,
    now: float,
    lease_s: float,
    *,
    merge: bool = True,
) -> tuple[Work, Task | None]:
    """Give ``server`` a task, if one is free: never begun, or with its lease run out.

    ``uploads`` are counted so far. While clients still upload (not ``closed``) only full groups of ``size`` are
    given out; then the last one too, and the merge once all groups are done. ``merge`` False holds the merge back:
    masks have to come off first.
    """
    count = -(-uploads // size) if closed else uploads // size
    groups = work.groups + (Lease(),) * (count - len(work.groups))
    for number, lease in enumerate(groups):
        if not lease.done and lease.until <= now:
            taken = _take(lease, server, now + lease_s)
            task = Task(
                "group", work.iteration, number, taken.attempt, taken.until,
                number * size, min((number + 1) * size, uploads),
            )  # fmt: skip
            return replace(work, groups=(*groups[:number], taken, *groups[number + 1 :])), task
    if (
        closed
        and merge
        and groups
        and all(lease.done for lease in groups)
        and not work.merge.done
        and work.merge.until <= now
    ):
        taken = _take(work.merge, server, now + lease_s)
        partials = tuple((number, lease.done) for number, lease in enumerate(groups))
        task = Task("merge", work.iteration, len(groups), taken.attempt, taken.until, partials=partials)
        return replace(work, merge=taken), task
    return work, None


def renew(work: Work, task: Task, now: float, lease_s: float) -> tuple[Work, bool]:
    """Hold a long task longer; False when another has taken or done it, and going on is of no use."""
    lease = _lease(work, task)
    if lease.done or lease.attempt != task.attempt:
        return work, False
    return _with(work, task, replace(lease, until=max(lease.until, now + lease_s))), True


def deliver(work: Work, task: Task) -> tuple[Work, bool]:
    """``task`` is done and its result kept. True for the first delivery, which counts; a later one is dropped."""
    lease = _lease(work, task)
    if lease.done:
        return work, False
    return _with(work, task, replace(lease, done=task.attempt)), True


def give_up(work: Work, task: Task) -> tuple[Work, int]:
    """``task`` failed: it is free at once, unless another holds or did it. Gives how often it has failed."""
    lease = _lease(work, task)
    if lease.done or lease.attempt != task.attempt:
        return work, lease.failures
    lease = replace(lease, until=0.0, owner="", failures=lease.failures + 1)
    return _with(work, task, lease), lease.failures


def _take(lease: Lease, server: str, until: float) -> Lease:
    return replace(lease, owner=server, until=until, attempt=lease.attempt + 1)


def _lease(work: Work, task: Task) -> Lease:
    if task.iteration != work.iteration or not 0 <= task.number < len(work.groups) + (task.kind == "merge"):
        raise UnknownTask(f"{task.kind} {task.number} of iteration {task.iteration}")
    lease = work.merge if task.kind == "merge" else work.groups[task.number]
    if not 1 <= task.attempt <= lease.attempt:
        raise UnknownTask(
            f"attempt {task.attempt} at {task.kind} {task.number} of iteration {task.iteration}"
        )
    return lease


def _with(work: Work, task: Task, lease: Lease) -> Work:
    if task.kind == "merge":
        return replace(work, merge=lease)
    return replace(work, groups=(*work.groups[: task.number], lease, *work.groups[task.number + 1 :]))
