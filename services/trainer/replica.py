"""The dense weights as one trainer holds them in hybrid mode: the server's own code on the server's own state.

All trainers of a group load the same rows and apply the same sums by the same kernel, so all have the server's
bits. ``digest`` proves it after each step.
"""

from __future__ import annotations

import numpy as np
import xxhash

from models.parameters import Floats
from services.parameter_server.client.steps import DenseState
from sync.clock import HybridClock
from sync.pushes import Push, Source
from sync.records import Rows
from sync.shard import Shard
from sync.spec import TableSpec

_SOURCE = Source("replica", 0)


class DenseReplica:
    """One single table ``[rows, dim]`` with its optimiser's state."""

    def __init__(self, spec: TableSpec) -> None:
        self._spec = spec
        self._keys = np.arange(spec.rows, dtype=np.uint64)
        self._shard = Shard(0, (spec,), 1, HybridClock())
        self._steps = 0

    @property
    def keys(self) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
        """All keys of the table ``[rows]``."""
        return self._keys

    @property
    def values(self) -> Floats:
        """The weights ``[rows, dim]``, a copy."""
        return self._shard.pull(self._spec.name, self._keys)

    @property
    def digest(self) -> str:
        """Of the weights; the server's says the same, or one of the two is wrong."""
        return xxhash.xxh3_128_hexdigest(self.values.data)

    def load(self, state: DenseState) -> None:
        """Take over what the server has. Raises PeerFault where it does not fit the table."""
        self._shard, self._steps = Shard(0, (self._spec,), 1, HybridClock()), 0
        count = len(state.keys)
        versions = np.ones(count, np.uint64), np.ones(count, np.uint32)
        self._shard.put(Rows(self._spec.name, state.keys, state.values, state.state, *versions))

    def apply(self, gradient: Floats) -> None:
        """One optimiser step with ``gradient`` ``[rows, dim]``; what the server would refuse changes nothing."""
        part = (self._spec.name, self._keys, gradient)
        self._shard.push(Push(_SOURCE, self._steps, self._steps - 1, None, (part,)))
        self._steps += 1
