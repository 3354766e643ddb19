"""Builds the backends that the settings name. Each backend's own ``open`` lives in its package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from services.settings.model import Settings
from services.topics import EVENTS, REJECTED, SAMPLES, ensure_topics

if TYPE_CHECKING:
    from featurestore.online import OnlineStore
    from services.coordination.contract import Coordination
    from services.messagelog.contract import MessageLog
    from services.rpc.security import Security

__all__ = ["EVENTS", "REJECTED", "SAMPLES", "open_coordination", "open_log", "open_security", "open_store"]


def open_log(settings: Settings) -> MessageLog:
    """The message log, with the pipeline's topics made. Raises LogUnavailable."""
    from services.messagelog.open import open_message_log

    log = open_message_log(
        settings.log.backend,
        folder=_shared(settings) / "log",
        servers=settings.log.servers,
        replication=settings.log.replication,
    )
    ensure_topics(log, settings.log)
    return log


def open_coordination(settings: Settings) -> Coordination:
    """Membership, shard map and leases. Raises Unavailable."""
    from services.coordination.open import open_coordination_store

    chosen = settings.coordination
    settings.data.dir.mkdir(parents=True, exist_ok=True)
    return open_coordination_store(chosen.backend, settings.data.dir / "coordination.db", chosen.url)


def open_store(settings: Settings) -> OnlineStore:
    """The online feature store. Raises StoreUnavailable."""
    from featurestore.open import open_store as open_backend

    chosen, folder = settings.features, _shared(settings)
    folder.mkdir(parents=True, exist_ok=True)
    where = chosen.url.get_secret_value() if chosen.backend == "redis" else folder / "features.db"
    return open_backend(chosen.backend, where, chosen.max_claims)


def _shared(settings: Settings) -> Path:
    """The folder of what regions of one machine share."""
    return settings.data.shared or settings.data.dir


def open_security(settings: Settings) -> Security | None:
    """The keys of calls between our processes; None where they travel in the clear. Raises KeysError."""
    if settings.rpc.keys is None:
        return None
    from services.rpc.keys import ensure_security, load_security

    return (ensure_security if settings.rpc.create_keys else load_security)(settings.rpc.keys)
