"""The coordination seam: a small consistent store with compare-and-swap, leases and watches.

Membership, the shard map, leases and dense generations are pure functions on top (``membership.py``,
``shardmap.py``). Every backend passes the one contract test class in ``tests/services/test_coordination.py``.

Exceptions::

    CoordinationError
    ├── Conflict             compare-and-swap lost: the key has another revision
    ├── LeaseLost            the lease expired or was revoked
    └── Unavailable          the backend cannot be reached; retry later
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class CoordinationError(Exception):
    """The coordination store refused, or could not do, what was asked."""


class Conflict(CoordinationError):
    """The key changed since it was read."""


class LeaseLost(CoordinationError):
    """The lease expired or was revoked: what it protected may belong to another by now."""


class Unavailable(CoordinationError):
    """The backend cannot be reached now."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A key's value with the store-wide revision at which it was written (grows with every write)."""

    key: str
    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class Change:
    """A change seen by a watch; ``value`` is None when the key was deleted or its lease ended."""

    key: str
    value: bytes | None
    revision: int


class Lease(Protocol):
    """A time-bounded claim. Keys put under it vanish when it ends."""

    @property
    def id(self) -> int: ...

    def keep_alive(self) -> None:
        """Renew for another full TTL. Raises LeaseLost if it ended."""
        ...

    def revoke(self) -> None:
        """End it now; its keys vanish at once."""
        ...


class Coordination(Protocol):
    """A consistent key-value store. Thread-safe."""

    def get(self, key: str) -> Entry | None: ...

    def scan(self, prefix: str) -> list[Entry]:
        """All live entries whose key starts with ``prefix``, sorted by key."""
        ...

    def put(
        self, key: str, value: bytes, *, lease: Lease | None = None, expect_revision: int | None = None
    ) -> int:
        """Write and return the new revision. ``expect_revision`` (0: must not exist) makes it a
        compare-and-swap that raises Conflict."""
        ...

    def delete(self, key: str) -> bool: ...

    def lease(self, ttl_s: float) -> Lease: ...

    def acquire(self, name: str, owner: str, lease: Lease) -> int | None:
        """Try to become the one holder of ``name`` while ``lease`` lives. Returns the fencing epoch (a
        revision larger than that of every earlier holder), or None if another holds it."""
        ...

    def increment(self, name: str) -> int:
        """Add one to a durable counter and return it (1 at first): incarnations and generations."""
        ...

    def watch(self, prefix: str, after_revision: int, timeout_s: float) -> list[Change]:
        """Wait until something under ``prefix`` changed after ``after_revision`` and return it, or [] on
        time-out. Several changes of one key may be folded into the last."""
        ...

    def close(self) -> None: ...
