"""What every backend builds in the same way: leases by id, and counters and single holders from compare-and-swap.

Also the key ranges of prefixes, which both backends order by the UTF-8 bytes of the key.
"""

from __future__ import annotations

import json
from typing import Final, Protocol

from services.coordination.contract import Conflict, Coordination, Lease

_ATTEMPTS: Final = 1_000


class LeaseStore(Protocol):
    """A backend that renews and ends leases by their id."""

    def renew(self, lease_id: int) -> None:
        """Renew for another full TTL. Raises LeaseLost if it ended."""
        ...

    def end(self, lease_id: int) -> None:
        """End it now."""
        ...


class StoreLease:
    """A lease of either backend, made by its ``lease``."""

    def __init__(self, store: LeaseStore, lease_id: int) -> None:
        self._store = store
        self._id = lease_id

    @property
    def id(self) -> int:
        return self._id

    def keep_alive(self) -> None:
        self._store.renew(self._id)

    def revoke(self) -> None:
        self._store.end(self._id)


def increment(store: Coordination, name: str) -> int:
    """Add one to the counter ``name`` and return it. Raises Conflict if 1,000 others were faster in a row."""
    key = f"counters/{name}"
    for _ in range(_ATTEMPTS):
        entry = store.get(key)
        value, revision = (int(entry.value), entry.revision) if entry else (0, 0)
        try:
            store.put(key, str(value + 1).encode(), expect_revision=revision)
        except Conflict:
            continue
        return value + 1
    raise Conflict(f"the counter {name} changed {_ATTEMPTS} times in a row before this process could")


def acquire(store: Coordination, name: str, owner: str, lease: Lease) -> int | None:
    """Become the holder of ``name`` under ``lease``; the fencing epoch, or None if another lease holds it.

    The epoch is the revision of the write: revisions only grow, so each holder's epoch exceeds that of every
    holder before. Asking again under the same lease returns the same epoch.
    """
    key = f"holders/{name}"
    claim = json.dumps({"owner": owner, "lease": lease.id}, sort_keys=True).encode()
    try:
        return store.put(key, claim, lease=lease, expect_revision=0)
    except Conflict:
        entry = store.get(key)
    return entry.revision if entry is not None and entry.value == claim else None


def prefix_end(prefix: bytes) -> bytes | None:
    """The least byte string above all that start with ``prefix`` (None: there is none)."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else None
