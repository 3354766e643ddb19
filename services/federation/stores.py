"""The store that the settings name."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from federated.rounds import Store
from services.settings.model import Settings

FOLDER = "federation"


class OpenStore(Store, Protocol):
    """A store that holds files or connections."""

    def close(self) -> None: ...


def open_round_store(settings: Settings) -> OpenStore:
    """The shared state of this deployment's rounds; an edge's own. Raises StoreUnavailable."""
    federation = settings.federation
    named = federation.store.get_secret_value()
    if named.startswith(("redis://", "rediss://")):
        from services.federation.store_redis import RedisStore

        return RedisStore(named)
    from services.federation.store_sqlite import SqliteStore

    default = settings.data.dir / (FOLDER if federation.role != "edge" else "federation-edge")
    return SqliteStore(Path(named.removeprefix("sqlite:")) if named else default)
