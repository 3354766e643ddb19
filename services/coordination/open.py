"""Open the coordination backend that the settings name."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from services.coordination.contract import Coordination


def open_coordination_store(backend: Literal["sqlite", "etcd"], path: Path, url: str) -> Coordination:
    """The store in the file ``path`` (SQLite) or at ``url`` (etcd). Raises Unavailable where
    it cannot be opened; etcd is first reached by the first call."""
    # Only the chosen one is loaded: health checks start every few seconds.
    if backend == "sqlite":
        from services.coordination.sqlite import SqliteCoordination

        return SqliteCoordination(path)
    from services.coordination.etcd import EtcdCoordination

    return EtcdCoordination(url)
