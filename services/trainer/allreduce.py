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
from services.parameter_server.step_client import Seat

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
        timeout = timedelta(seconds=self._wait_s)
        try:
            store = self._found(seat, timeout) if seat.rank == 0 else self._find(seat, timeout, still)
            options = _TORCH.distributed_c10d.ProcessGroupGloo._Options()
            options._timeout = timeout
            options._devices = [_TORCH.distributed_c10d.ProcessGroupGloo.create_device(hostname=self._host)]
            named = _TORCH.PrefixStore(str(seat.generation), store)
            gloo = _TORCH.distributed_c10d.ProcessGroupGloo(named, seat.rank, seat.members, options)
        except RuntimeError as error:
            raise Broken(f"the members of generation {seat.generation} did not meet: {error}") from error
        gloo.set_timeout(timedelta(seconds=LONGEST_S))
        self._open = AllReduce(gloo, store)
        return self._open

    def close(self) -> None:
        """Leave whatever is open."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _found(self, seat: Seat, timeout: timedelta) -> Any:
        store = _TORCH.TCPStore(self._host, 0, None, True, timeout, wait_for_workers=False)
        place = Place(seat.generation, self._host, store.port)
        self._store.put(KEY, msgspec.json.encode(place))
        return store

    def _find(self, seat: Seat, timeout: timedelta, still: Callable[[], bool]) -> Any:
        deadline_s = time.monotonic() + timeout.total_seconds()
        while time.monotonic() < deadline_s and still():
            entry = self._store.get(KEY)
            if entry is not None:
                place = msgspec.json.decode(entry.value, type=Place)
                if place.generation == seat.generation:
                    return _TORCH.TCPStore(
                        place.host, place.port, None, False, timeout, wait_for_workers=False
                    )
            time.sleep(_LOOK_S)
        raise Broken(f"rank 0 of generation {seat.generation} did not come")
