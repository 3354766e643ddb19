"""Opening the online store that settings ask for; only the chosen backend's libraries are imported."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from featurestore.online import OnlineStore

Backend = Literal["sqlite", "redis"]
DEFAULT_MAX_CLAIMS = 20_000_000


def open_store(backend: Backend, where: str | Path, max_claims: int = DEFAULT_MAX_CLAIMS) -> OnlineStore:
    """Open the store in the SQLite file, or at the Redis URL, ``where``.

    ``redis+cluster://`` URLs name any node of a Redis Cluster. Raises StoreUnavailable if it cannot be
    reached and StoreError if its format is not one that this version reads.
    """
    if backend == "sqlite":
        from featurestore.sqlite import SqliteStore

        return SqliteStore(Path(where), max_claims=max_claims)
    from featurestore.redis import RedisStore

    return RedisStore(str(where), max_claims=max_claims)
