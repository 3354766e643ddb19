"""What a shard consists of, in pieces that can be stored, sent and replayed.

A shard at rest is a ``Head`` and any number of ``Rows`` and ``Graves``; what happens to it after is a sequence
of ``Delta``, numbered by position without gaps. Snapshot files, the log of updates, copies to another server
and replication all carry these four and nothing else.

What replicas of different regions tell each other is an ``Update``; to take one over is a step like any other.

A delta holds the rows as they are after a push, not its gradients. So applying it again, or to a copy that was
read row by row while pushes went on, gives the same: a copy that began at position p is whole once every delta
after p, up to the end of the reading, was applied to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from sync.admission import SketchState
from sync.guard import NormState
from sync.knowledge import NO_HORIZON, Horizon, Knowledge
from sync.pushes import Progress, Source, Watermarks
from sync.spec import TableSpec

Keys = npt.NDArray[np.uint64]
Times = npt.NDArray[np.uint64]
Writers = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]

History = tuple[tuple[int, int], ...]
"""(epoch, first position written under it), ascending: which line of owners a shard's deltas come from."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Stored rows of one table: ``keys`` [N], ``values`` [N, d], ``state`` [N, s] and the version of each:
    ``time`` [N], ``writer`` [N]."""

    table: str
    keys: Keys
    values: Floats
    state: Floats
    time: Times
    writer: Writers


@dataclass(frozen=True, slots=True)
class Graves:
    """Deleted keys [N] of one table with the version of their deletion."""

    table: str
    keys: Keys
    time: Times
    writer: Writers


@dataclass(frozen=True, slots=True)
class Generation:
    """A published generation of a dense table: ``values`` [rows, d], read-only, and the version of its publication.

    ``number`` grows with each publication that changed something (0: the initial values). Two owners may publish
    different values under one number; readers compare the writer, too.
    """

    table: str
    number: int
    values: Floats
    time: int
    writer: int
    watermarks: Watermarks = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Learned:
    """What a replica may claim from now on, once it holds all that belongs to it: knowledge and its horizon, to be
    joined with its own, and how far the sources of pushes have come."""

    knowledge: Knowledge
    horizon: Horizon = NO_HORIZON
    progress: tuple[tuple[Source, Progress], ...] = ()


@dataclass(frozen=True, slots=True)
class Update:
    """A piece of what one replica tells another: newest states of rows, graves and dense generations.

    ``epochs``: the fencing epoch of each writer in it, which leads its versions. ``urgent``: of high priority.
    ``learned`` comes with the last piece of an exchange, and only then may knowledge move. ``final`` comes with every
    piece of a full replacement for who has not heard of a retirement: what the sender knew when it began. What a
    retired writer wrote, and the sender does not hold, loses.
    """

    rows: tuple[Rows, ...] = ()
    graves: tuple[Graves, ...] = ()
    generations: tuple[Generation, ...] = ()
    epochs: Mapping[int, int] = field(default_factory=dict)
    urgent: bool = False
    learned: Learned | None = None
    final: Learned | None = None

    @property
    def versioned(self) -> tuple[Rows | Graves, ...]:
        """Everything that has keys, each with a version."""
        return (*self.rows, *self.graves)

    @property
    def nbytes(self) -> int:
        """Roughly what it takes on the wire, in float32."""
        rows = sum(r.values.nbytes + r.state.nbytes + 20 * len(r.keys) for r in self.rows)
        dense = sum(one.values.nbytes + 64 for one in self.generations)
        told = (one for one in (self.learned, self.final) if one is not None)
        vector = sum(12 * len(one.knowledge) + 64 for one in told)
        return 64 + rows + sum(20 * len(g.keys) for g in self.graves) + dense + vector


def all_of(updates: Sequence[Update]) -> Update:
    """The pieces of one exchange as one; the last of them says what may be claimed."""
    return replace(
        updates[-1],
        rows=tuple(rows for one in updates for rows in one.rows),
        graves=tuple(graves for one in updates for graves in one.graves),
        generations=tuple(generation for one in updates for generation in one.generations),
        epochs={writer: epoch for one in updates for writer, epoch in one.epochs.items()},
    )


@dataclass(frozen=True, slots=True)
class Delta:
    """One atomic step of a shard.

    ``position``: one more than the step before. ``epoch``: the fencing epoch of the owner that wrote it.
    ``clock``: the owner's last version time. ``progress``: the sources that advanced. ``counted``: keys that a
    push counted for admission, by table; ``norms``: running gradient norms that moved. ``collected``: tables whose
    graves up to these versions were forgotten.

    A step that took over what another replica wrote, instead of writing itself, has ``learned``, maybe of nothing;
    ``epochs`` of the writers in it; ``generations`` published elsewhere; and ``dropped``, rows that are gone and whose
    graves nobody has any more.
    """

    epoch: int
    position: int
    writer: int
    clock: int
    progress: tuple[tuple[Source, Progress], ...] = ()
    rows: tuple[Rows, ...] = ()
    graves: tuple[Graves, ...] = ()
    counted: tuple[tuple[str, Keys], ...] = ()
    norms: tuple[tuple[str, NormState], ...] = ()
    collected: tuple[tuple[str, Knowledge], ...] = ()
    learned: Learned | None = None
    epochs: Mapping[int, int] = field(default_factory=dict)
    generations: tuple[Generation, ...] = ()
    dropped: tuple[tuple[str, Keys], ...] = ()

    @property
    def nbytes(self) -> int:
        """Roughly what it takes in memory, for bounds."""
        rows = sum(r.keys.nbytes + r.values.nbytes + r.state.nbytes + 12 * len(r.keys) for r in self.rows)
        named = sum(keys.nbytes for _, keys in (*self.counted, *self.dropped))
        dense = sum(one.values.nbytes for one in self.generations)
        return 256 + rows + sum(20 * len(g.keys) for g in self.graves) + named + dense


@dataclass(frozen=True, slots=True)
class Head:
    """Everything about a shard but its rows, as of ``position``.

    ``knowledge``: writer → version time (``Shard.knowledge``). ``epochs``: writer → fencing epoch, for versions.
    ``generations``: the newest of each dense table that has one. ``norms``, ``sketches``: by table, the running
    gradient norm and the admission counters. ``horizon``: what was forgotten. ``stateless``: its rows have no optimiser
    state.
    """

    model: str
    shard_id: int
    fingerprint: str
    specs: tuple[TableSpec, ...]
    epoch: int = 0
    position: int = 0
    clock: int = 0
    history: History = ()
    knowledge: Mapping[int, int] = field(default_factory=dict)
    epochs: Mapping[int, int] = field(default_factory=dict)
    pushes: Mapping[Source, Progress] = field(default_factory=dict)
    generations: tuple[Generation, ...] = ()
    norms: Mapping[str, NormState] = field(default_factory=dict)
    sketches: Mapping[str, SketchState] = field(default_factory=dict)
    horizon: Horizon = NO_HORIZON
    stateless: bool = False


@dataclass(frozen=True, slots=True)
class End:
    """The end of a snapshot: it is whole once every delta up to ``position`` was applied to it."""

    position: int


Record = Head | Rows | Graves | Delta | End | Update
