"""How far behind the log the consumer groups are, and who is registered where no supervisor runs."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from services.backends import open_coordination, open_log
from services.processes import SERVICES
from services.settings.model import Settings
from services.supervisor.folder import ChildState, ProcessId
from services.topics import EVENTS, PROCESSOR_GROUP, SAMPLES, TRAINER_GROUP


@dataclass(frozen=True, slots=True)
class GroupLag:
    """One group's lag on one partition: in messages, and in seconds since the oldest unread was accepted."""

    group: str
    topic: str
    partition: int
    messages: int
    seconds: float


def standing(settings: Settings) -> list[GroupLag]:
    """The lag of processors and trainers. Raises LogError."""
    with closing(open_log(settings)) as log:
        return [
            GroupLag(group, topic, lag.partition, lag.messages, lag.seconds)
            for group, topic in ((PROCESSOR_GROUP, EVENTS), (TRAINER_GROUP, SAMPLES))
            for lag in log.lag(group, topic)
        ]


def registered(settings: Settings) -> list[ChildState]:
    """Every process that coordination knows, whoever started it. Raises CoordinationError."""
    from services.coordination.membership import members

    if settings.coordination.backend == "sqlite" and not settings.data.dir.is_dir():
        return []
    with closing(open_coordination(settings)) as coordination:
        return [
            ChildState(
                member.name,
                service,
                "ready" if member.ready else "starting",
                member.started_at_ms,
                address=member.address,
                process=ProcessId(member.pid, 0.0),
                region=settings.region.name,
            )
            for service in SERVICES
            for member in members(coordination, service)
        ]
