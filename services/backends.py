"""Builds the backends that the settings name. Each backend's own ``open`` lives in its package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.settings.model import Settings

if TYPE_CHECKING:
    from featurestore.online import OnlineStore
    from services.coordination.contract import Coordination
    from services.messagelog.contract import MessageLog, TopicSpec

EVENTS = "events"
SAMPLES = "samples"
REJECTED = "rejected"


def topics(settings: Settings) -> tuple[TopicSpec, ...]:
    """The topics of the pipeline. ``samples`` has as many partitions as ``events``: one feeds the other."""
    from services.messagelog.contract import TopicSpec

    log = settings.log
    return (
        TopicSpec(EVENTS, log.partitions, log.retention),
        TopicSpec(SAMPLES, log.partitions, log.retention),
        TopicSpec(REJECTED, 1, log.retention),
    )


def open_log(settings: Settings) -> MessageLog:
    """The message log, with the pipeline's topics made. Raises LogUnavailable."""
    from services.messagelog.open import open_log as open_backend

    log = open_backend(
        settings.log.backend,
        directory=settings.data.dir / "log",
        servers=settings.log.servers,
        replication=settings.log.replication,
    )
    for topic in topics(settings):
        log.ensure_topic(topic)
    return log


def open_coordination(settings: Settings) -> Coordination:
    """Membership, shard map and leases. Raises Unavailable."""
    from services.coordination.open import open_coordination as open_backend

    chosen = settings.coordination
    return open_backend(chosen.backend, path=settings.data.dir / "coordination.db", url=chosen.url)


def open_store(settings: Settings) -> OnlineStore:
    """The online feature store. Raises StoreUnavailable."""
    from featurestore.open import open_store as open_backend

    chosen = settings.features
    where = chosen.url.get_secret_value() if chosen.backend == "redis" else settings.data.dir / "features.db"
    return open_backend(chosen.backend, where, chosen.max_claims)
