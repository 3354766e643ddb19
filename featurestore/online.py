"""The online feature store seam: the newest value of every feature, by entity and id.

Every backend passes the one contract test class in ``tests/featurestore/test_online.py``.

Exceptions::

    StoreError
    └── StoreUnavailable     the backend cannot be reached; retry later
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Value = None | bool | int | float | str | bytes | list[str] | list[int] | list[float]


class StoreError(Exception):
    """The online store refused, or could not do, what was asked."""


class StoreUnavailable(StoreError):
    """The backend cannot be reached now."""


@dataclass(frozen=True, slots=True)
class EntityKey:
    """Which row: an entity (``user``, ``item``, ...) and the client's id."""

    entity: str
    id: str


@dataclass(frozen=True, slots=True)
class Cell:
    """One feature's value and the time of the event that set it (Unix ms). ``ttl_ms`` 0 means for ever."""

    value: Value
    event_time_ms: int
    ttl_ms: int = 0


Status = Literal["present", "null", "not_found", "expired"]


def read_status(cell: Cell | None, now_ms: int) -> Status:
    """What a reader may say of a cell at ``now_ms``: expired wins over null, and its value is not shown."""
    if cell is None:
        return "not_found"
    if cell.ttl_ms and cell.event_time_ms + cell.ttl_ms <= now_ms:
        return "expired"
    return "null" if cell.value is None else "present"


@dataclass(frozen=True, slots=True)
class Claim:
    """A first-come claim on an event id by one log position (``owner``)."""

    id: str
    owner: str


class OnlineStore(Protocol):
    """Reads and writes many entities in one round trip. Thread-safe; several processes share it."""

    def read(self, keys: Sequence[EntityKey], fields: Sequence[str] | None = None) -> list[dict[str, Cell]]:
        """The stored cells of each key, in order ({} where the entity is unknown), in one round trip.

        Expired cells are returned too: the reader judges by ``event_time_ms + ttl_ms``.
        """
        ...

    def write(self, rows: Mapping[EntityKey, Mapping[str, Cell]]) -> None:
        """Set the given cells, leave all others, and record each key as changed. One round trip, atomic per
        key and durable when it returns."""
        ...

    def delete(self, keys: Sequence[EntityKey]) -> list[bool]:
        """Remove whole entities; tells which existed. A deleted key is recorded as changed."""
        ...

    def changes(self, entity: str, cursor: int, limit: int) -> tuple[list[str], int]:
        """Ids of ``entity`` changed after ``cursor`` (0: all there are), oldest first, each once, and the
        cursor to go on from. Bounded: one mark per id."""
        ...

    def claim(self, claims: Sequence[Claim], ttl_s: float) -> list[bool]:
        """True for each id that nobody, or the very same owner, claimed within ``ttl_s``. Atomic per id;
        bounded by TTL and by the backend's maximum number of claims (oldest go first)."""
        ...

    def scan(self, entity: str, after: str, limit: int) -> list[str]:
        """Ids of ``entity`` greater than ``after`` in lexicographic order (for paging through all)."""
        ...

    def close(self) -> None: ...
