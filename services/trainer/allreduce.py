"""Sums over all trainers of a group by gloo's AllReduce, and how they find each other.

The member of rank 0 opens a TCP store and writes its address into coordination under the group's generation;
the others read it there. A group of one needs neither. What travels is neither encrypted nor authenticated:
hybrid mode is for machines that trust their network.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import msgspec
import numpy as np
import torch
import torch.distributed.distributed_c10d

from models.parameters import Floats
from services.coordination.contract import Coordination
from services.parameter_server.client.steps import Seat

KEY: Final = "trainers/meeting"
LONGEST_S: Final = 60.0
"""How long a sum may wait for the slowest member; a dead one breaks the connection at once."""
_LOOK_S: Final = 0.02
_TORCH: Final[Any] = torch.distributed
"""Torch's own annotations leave these classes out."""
_POLL_S: Final = 0.0002
_SLOW_POLL_S: Final = 0.002

log = logging.getLogger(__name__)


class Broken(Exception):
    """The sum was not made: a member is gone, or the group has changed."""


class Place(msgspec.Struct, frozen=True):
    """Where the members of one generation meet."""

    generation: int
    host: str
    port: int


class AllReduce:
    """Sums over the members of one generation."""

    def __init__(self, gloo: Any, store: Any) -> None:
        """``gloo`` None: the group has one member. ``store`` is kept open for as long as this is."""
        self._gloo, self._store = gloo, store

    def sum(self, values: Floats, still: Callable[[], bool]) -> Floats:
        """The sum of every member's ``values`` ``[N]``: the same bits for all. Waits while ``still()``.

        Raises Broken.
        """
        if self._gloo is None:
            return values
        total = torch.from_numpy(np.array(values, np.float32))
        started_s = time.monotonic()
        try:
            work = self._gloo.allreduce([total])
            while not work.is_completed():
                waited_s = time.monotonic() - started_s
                if waited_s > LONGEST_S or not still():
                    raise Broken("the group changed, or a member was too slow")
                time.sleep(_POLL_S if waited_s < 0.05 else _SLOW_POLL_S)
            work.wait()
        except RuntimeError as error:
            raise Broken(f"a member of the group is gone: {error}") from error
        result: Floats = total.numpy()
        return result

    def close(self) -> None:
        """Let go of the connections, which ends the other members' sums. Does not wait for its own."""
        gloo, self._gloo = self._gloo, None
        if gloo is not None:
            threading.Thread(target=gloo.abort, name="gloo-abort", daemon=True).start()


class _Connecting(threading.Thread):
    """Connects to the other members in a thread of its own, as gloo cannot be told to stop waiting for them."""

    def __init__(self, place: Any, seat: Seat, host: str, timeout: timedelta) -> None:
        """``place``: rank 0's store, or where it is."""
        super().__init__(name="gloo-connect", daemon=True)
        self._place, self._seat, self._host, self._timeout = place, seat, host, timeout
        self._made: AllReduce | None = None
        self._error: RuntimeError | None = None
        self.start()

    def run(self) -> None:
        try:
            self._made = self._connect()
        except RuntimeError as error:
            self._error = error

    def _connect(self) -> AllReduce:
        store = self._place
        if isinstance(store, Place):
            store = _TORCH.TCPStore(
                store.host, store.port, None, False, self._timeout, wait_for_workers=False
            )
        kind = _TORCH.distributed_c10d.ProcessGroupGloo
        options = kind._Options()
        options._timeout = self._timeout
        options._devices = [kind.create_device(hostname=self._host)]
        named = _TORCH.PrefixStore(str(self._seat.generation), store)
        gloo = kind(named, self._seat.rank, self._seat.members, options)
        gloo.set_timeout(timedelta(seconds=LONGEST_S))
        return AllReduce(gloo, store)

    def result(self) -> AllReduce:
        """What came of it, once it has ended. Raises Broken."""
        if self._made is None:
            raise Broken(f"generation {self._seat.generation} did not meet: {self._error}") from self._error
        return self._made


class Meeting:
    """Brings the members of a generation together. One thread."""

    def __init__(self, store: Coordination, host: str, wait_s: float) -> None:
        """``host``: where the others reach this machine; ``wait_s``: for them to come."""
        self._store, self._host, self._wait_s = store, host, wait_s
        self._open: AllReduce | None = None
        self._last = 0

    def join(self, seat: Seat, still: Callable[[], bool]) -> AllReduce:
        """Meet the other members, waiting while ``still()``; what was open before is closed. Each generation
        meets once.

        Raises Broken, CoordinationError.
        """
        self.close()
        if seat.generation <= self._last:
            raise Broken(f"generation {seat.generation} has met before")
        self._last = seat.generation
        if seat.members == 1:
            self._open = AllReduce(None, None)
            return self._open
        place = self._found(seat) if seat.rank == 0 else self._find(seat, still)
        connecting = _Connecting(place, seat, self._host, timedelta(seconds=self._wait_s))
        while connecting.is_alive():
            connecting.join(_LOOK_S)
            if not still():
                raise Broken(f"generation {seat.generation} is over before it met")
        self._open = connecting.result()
        return self._open

    def close(self) -> None:
        """Leave whatever is open."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _found(self, seat: Seat) -> Any:
        """Rank 0's store, whose address the others can read from now on."""
        timeout = timedelta(seconds=self._wait_s)
        store = _TORCH.TCPStore(self._host, 0, None, True, timeout, wait_for_workers=False)
        self._store.put(KEY, msgspec.json.encode(Place(seat.generation, self._host, store.port)))
        return store

    def _find(self, seat: Seat, still: Callable[[], bool]) -> Place:
        deadline_s = time.monotonic() + self._wait_s
        while time.monotonic() < deadline_s and still():
            entry = self._store.get(KEY)
            if entry is not None:
                place = msgspec.json.decode(entry.value, type=Place)
                if place.generation == seat.generation:
                    return place
            time.sleep(_LOOK_S)
        raise Broken(f"rank 0 of generation {seat.generation} did not come")
