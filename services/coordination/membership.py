"""Which processes are there: entries under leases that a background thread keeps alive.

A member's entry is ``members/<service>/<name>``. A process that was killed and started again writes the same
entry anew, so its readers see the new address at once and not only when the old lease has ended.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType

import msgspec

from services.coordination.contract import Coordination, CoordinationError, Lease, LeaseLost

_log = logging.getLogger(__name__)


class Member(msgspec.Struct, frozen=True):
    """One running process. ``incarnation`` grows with every start of anything of the same service."""

    name: str
    service: str
    address: str
    pid: int
    incarnation: int
    started_at_ms: int
    ready: bool = False


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Member)


def member_key(service: str, name: str) -> str:
    return f"members/{service}/{name}"


def members(store: Coordination, service: str) -> list[Member]:
    """The registered members of ``service``, by name. Entries of an unknown form are passed over."""
    found = []
    for entry in store.scan(member_key(service, "")):
        try:
            found.append(_decoder.decode(entry.value))
        except msgspec.DecodeError as error:
            _log.warning("member entry %s cannot be read: %s", entry.key, error)
    return found


def wait_for(
    store: Coordination,
    service: str,
    enough: Callable[[list[Member]], bool],
    timeout_s: float,
    *,
    monotonic: Callable[[], float] = time.monotonic,
    stop: threading.Event | None = None,
) -> list[Member]:
    """The members of ``service`` as soon as ``enough(members)``; whoever is there after ``timeout_s``.

    Ends early when ``stop`` is set.
    """
    deadline = monotonic() + timeout_s
    prefix = member_key(service, "")
    while True:
        entries = store.scan(prefix)
        found = members(store, service)
        remaining = deadline - monotonic()
        if enough(found) or remaining <= 0 or (stop is not None and stop.is_set()):
            return found
        newest = max((entry.revision for entry in entries), default=0)
        store.watch(prefix, newest, min(remaining, 0.25))


class Registration:
    """Keeps one member's entry alive by a background thread until closed.

    A lease that ended (the process was paused) is replaced by a new one, unless a later incarnation of the
    same name has registered meanwhile: then ``replaced`` is set, and this process should stop.
    """

    def __init__(self, store: Coordination, member: Member, ttl_s: float) -> None:
        """Register at once; raises CoordinationError if that fails."""
        self.replaced = threading.Event()
        self._store, self._member, self._ttl_s = store, member, ttl_s
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._lease: Lease = store.lease(ttl_s)
        self._write()
        self._thread = threading.Thread(target=self._keep, name=f"member-{member.name}", daemon=True)
        self._thread.start()

    @property
    def member(self) -> Member:
        return self._member

    def update(self, *, ready: bool | None = None, address: str | None = None) -> None:
        """Change the entry; raises CoordinationError if it cannot be written now."""
        with self._lock:
            self._member = msgspec.structs.replace(
                self._member,
                ready=self._member.ready if ready is None else ready,
                address=self._member.address if address is None else address,
            )
            try:
                self._write()
            except LeaseLost:
                self._renew_lost()

    def _write(self) -> None:
        key = member_key(self._member.service, self._member.name)
        self._store.put(key, _encoder.encode(self._member), lease=self._lease)

    def _renew_lost(self) -> None:
        """A new lease and entry, if this is still the newest incarnation of its name."""
        entry = self._store.get(member_key(self._member.service, self._member.name))
        if entry is not None and _decoder.decode(entry.value).incarnation > self._member.incarnation:
            self.replaced.set()
            return
        self._lease = self._store.lease(self._ttl_s)
        self._write()

    def _keep(self) -> None:
        while not self._closing.wait(self._ttl_s / 3):
            with self._lock:
                try:
                    self._lease.keep_alive()
                except LeaseLost:
                    _log.warning("%s: the lease ended before it was renewed", self._member.name)
                    self._recover()
                except CoordinationError as error:
                    _log.warning("%s: cannot renew the lease now: %s", self._member.name, error)
            if self.replaced.is_set():
                _log.error("%s: a later incarnation registered; this one is replaced", self._member.name)
                return

    def _recover(self) -> None:
        try:
            self._renew_lost()
        except (CoordinationError, msgspec.DecodeError) as error:
            _log.warning("%s: cannot register again now: %s", self._member.name, error)

    def close(self) -> None:
        """Leave: the entry goes at once where the store can be reached, by its lease where not."""
        self._closing.set()
        self._thread.join()
        try:
            self._lease.revoke()
        except CoordinationError as error:
            _log.warning("%s: the entry stays until its lease ends: %s", self._member.name, error)

    def __enter__(self) -> Registration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
