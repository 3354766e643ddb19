"""What callers of the parameter servers see: values, replies and errors.

Exceptions::

    ParameterError
    ├── ParametersUnavailable    no answer before the deadline; names the servers; retry later
    ├── ParametersRefused        the servers refuse this request; a retry would be refused again
    │   ├── ModelUnknown         the model was never declared
    │   └── ModelMismatch        the model was declared otherwise (both sides are named)
    ├── IncarnationChanged       a server restarted since the caller last looked; rewind to ``applied``
    └── ReplicationChanged       a server's own: its settings do not fit the shard map
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.float32]
PushStatus = Literal["applied", "duplicate", "gap", "refused", "stale"]


class ParameterError(Exception):
    """The parameter servers refused, or could not do, what was asked."""


class ParametersUnavailable(ParameterError):
    """Some servers did not answer before the deadline."""

    def __init__(self, what: str, servers: tuple[str, ...], deadline_s: float) -> None:
        self.servers = servers
        names = ", ".join(servers) or "no parameter server is registered"
        super().__init__(f"{what}: no answer within {deadline_s:g} s from: {names}")


class ParametersRefused(ParameterError):
    """A server read the request and refuses it."""


class ModelUnknown(ParametersRefused):
    """Nobody declared the model yet."""


class ModelMismatch(ParametersRefused):
    """The model was declared with other tables or another schema."""


class IncarnationChanged(ParameterError):
    """A server restarted: what it had not made durable is gone, and has to be sent again."""

    def __init__(self, server: str, expected: int, found: int) -> None:
        self.server, self.expected, self.found = server, expected, found
        super().__init__(f"{server} is now incarnation {found}, expected {expected}")


class ReplicationChanged(ParameterError):
    """The shard map in force was made for another way to replicate."""


class Mark(NamedTuple):
    """How far an events partition has come: offset of the newest applied event, and its acceptance."""

    offset: int
    accepted_at_ms: int


Watermarks = Mapping[tuple[str, int], Mark]
"""By (incarnation of the events log, partition)."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """Rows per table, ``[N, d]`` float32 in the order of the keys asked for.

    ``watermarks`` are the least over all shards: every event up to them is in the parameters. ``moves``: by
    shard, how many pushes moved it since its server started (see ``Bound``); not known where followers answered.
    """

    rows: dict[str, Rows]
    watermarks: Watermarks
    moves: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bound:
    """How stale a push may be: at most ``staleness`` other pushes moved a shard since the pull that told
    ``seen`` (``Pulled.moves``)."""

    seen: Mapping[int, int]
    staleness: int


@dataclass(frozen=True, slots=True)
class PushReply:
    """What one shard did with a push.

    ``applied`` and ``durable`` are the last offset of the push's source that the shard holds, in memory
    and on disk (-1: none); while a disk fails, ``durable`` stands still. On ``gap`` nothing was applied: push from
    ``applied + 1`` on. A ``refused`` push (``reason``) counts as applied, or it would block its source. On
    ``stale`` nothing was applied either: pull again, compute again.
    """

    status: PushStatus
    applied: int
    durable: int
    incarnation: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Applied:
    """How far one shard has applied a source, in memory and durably (-1: nothing)."""

    applied: int
    durable: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class DenseSnapshot:
    """A model's dense weights in chunks, ``values [chunks, chunk]`` float32, read-only.

    ``generation`` is the number of the newest published one, also when ``values`` are the live weights.
    Numbers grow and are never used twice, also over restarts. 0: none was published yet, and ``values``
    are the initial weights.
    """

    generation: int
    values: Rows
    watermarks: Watermarks


@dataclass(frozen=True, slots=True)
class ShardChanges:
    """What changed in one shard since the last batch from it.

    ``parts`` holds keys ``[N]`` and their newest rows ``[N, d]`` per table. ``restarted``: this batch
    starts over with all rows of the shard (first batch, server restart). ``complete``: the reader has
    caught up as of ``watermarks``; until then ``watermarks`` must not be claimed. ``generation`` is the
    newest published dense generation of the model, None on shards that do not hold the dense table.
    """

    shard: int
    shards: int
    incarnation: int
    parts: dict[str, tuple[Keys, Rows]]
    watermarks: Watermarks
    complete: bool
    restarted: bool
    generation: int | None
