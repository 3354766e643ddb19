"""Clients of the parameter servers: a blocking one for trainers and tools, an asyncio one for the API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

from models.samples import Watermark
from services.coordination.contract import Coordination
from services.parameter_server.types import (
    Applied,
    DenseSnapshot,
    Keys,
    Pulled,
    PushReply,
    Rows,
    ServerDescription,
    ShardChanges,
)
from sync.pushes import Source
from sync.spec import TableSpec


class ParameterClient:
    """Blocking client of all parameter servers. Thread-safe (one call at a time).

    Every call retries until ``deadline_s`` and then raises ParametersUnavailable naming the servers.
    """

    def __init__(self, coordination: Coordination, *, deadline_s: float = 5.0) -> None: ...

    def declare(self, model: str, specs: Sequence[TableSpec], fingerprint: str) -> None:
        """Make ``model`` known to all servers. Idempotent; other tables or another schema fingerprint than
        the first time raise ModelMismatch naming both."""
        ...

    def pull(self, model: str, keys: Mapping[str, Keys]) -> Pulled:
        """The rows of ``keys [N]`` per table."""
        ...

    def push(
        self,
        model: str,
        source: Source,
        offset: int,
        predecessors: Mapping[int, int],
        accepted_at_ms: int,
        watermark: Watermark | None,
        parts: Mapping[str, tuple[Keys, Rows]],
        *,
        incarnations: Mapping[int, int] | None = None,
    ) -> dict[int, PushReply]:
        """Apply gradients (``keys [N]``, ``grads [N, d]`` per table), once, on all shards.

        The push goes to every shard, also where it touches nothing, so that offsets advance everywhere.
        ``predecessors[s]`` is the offset of the push before this one from ``source`` on shard s (-1: none).
        ``watermark`` is the events position that the gradients include. With ``incarnations`` (as replies
        gave them) a restarted server does nothing and the call raises IncarnationChanged.
        """
        ...

    def applied(self, model: str, source: Source) -> dict[int, Applied]:
        """How far each shard has applied ``source``. A restarted server may have gone back: a trainer asks
        also when idle, and rewinds to the least ``applied`` + 1."""
        ...

    def dense(self, model: str, published: bool = True, table: str = "dense") -> DenseSnapshot:
        """The dense weights: the newest published generation, or the live values."""
        ...

    def publish(self, model: str, table: str = "dense") -> int:
        """Publish the live dense weights as a new generation now, and return its number."""
        ...

    def describe(self) -> list[ServerDescription]: ...

    def checkpoint(self) -> None:
        """Return once everything applied so far is in a durable snapshot on every server."""
        ...

    @property
    def shards(self) -> int:
        """The number of shards (from the shard map)."""
        ...

    def close(self) -> None: ...


class AsyncParameterClient:
    """Asyncio client of all parameter servers, for one event loop."""

    def __init__(self, coordination: Coordination, *, deadline_s: float = 5.0) -> None: ...

    async def pull(self, model: str, keys: Mapping[str, Keys], *, deadline_s: float | None = None) -> Pulled:
        """The rows of ``keys [N]`` per table."""
        ...

    async def dense(self, model: str, published: bool = True, table: str = "dense") -> DenseSnapshot:
        """The dense weights: the newest published generation, or the live values."""
        ...

    async def describe(self) -> list[ServerDescription]: ...

    def follow(self, model: str, tables: Sequence[str]) -> AsyncIterator[ShardChanges]:
        """Follow the change streams of all shards for ever, by long polls that reconnect.

        Starts with all rows of every shard (``restarted``), then yields what changed, within
        milliseconds. A batch may carry no rows: watermarks or the dense generation moved.
        A model that is not declared yet is waited for.
        """
        ...

    async def close(self) -> None: ...
