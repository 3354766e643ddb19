"""What a replica takes over of what another tells it: whether it makes sense, and which rows win. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sync.contents import Contents
from sync.errors import BadShape, ClockAhead
from sync.index import KeyIndex
from sync.knowledge import MAX_WRITERS, Known, newer
from sync.optimisers import group
from sync.records import Generation, Graves, Learned, Rows, Update
from sync.retirement import Settled

Keys = npt.NDArray[np.uint64]
Epochs = Mapping[int, int]
Times = npt.NDArray[np.uint64]
Writers = npt.NDArray[np.uint32]
Wins = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Won:
    """What of an update is newer than what is here; parts that are empty are left out. ``epochs``: of the writers that
    were not heard of before. How many rows and graves ``merged``, were ``covered``: known already, and ``lost``: to a
    newer version that is here."""

    rows: tuple[Rows, ...]
    graves: tuple[Graves, ...]
    generations: tuple[Generation, ...]
    epochs: dict[int, int]
    merged: int
    covered: int
    lost: int


def check(here: Contents, update: Update) -> None:
    """Nothing from another replica is trusted. Raises PeerFault, ClockAhead."""
    latest = here.clock.physical_us() + here.max_ahead_us
    if (ahead := max(times(update), default=0)) > latest:
        raise ClockAhead(
            f"shard {here.shard_id}: a version is {(ahead - latest + here.max_ahead_us) / 1e6:.0f} s ahead of "
            "this clock; set the clocks right, or allow more (sync.max_clock_skew)"
        )
    learned = {} if update.learned is None else update.learned.knowledge
    if (writers := len(here.knowledge.keys() | learned.keys())) > MAX_WRITERS:
        raise BadShape(f"shard {here.shard_id}: {writers} writers; {MAX_WRITERS} may be known at once")
    named: dict[str, list[Keys]] = {}
    for part in update.versioned:
        table = here.table(part.table)
        if table.spec.placement == "single":
            raise BadShape(f"table {part.table} is dense; only its generations travel")
        named.setdefault(part.table, []).append(table.check_keys(part.keys))
        if len(part.keys) and not part.time.min():
            raise BadShape(f"table {part.table}: a key has no version")
    for name, parts in named.items():
        # Of two states of one key the older could be written last.
        keys = np.concatenate(parts)
        if group(keys, np.empty(len(keys), np.int32)) != len(keys):
            raise BadShape(f"table {name}: a key is named twice")
    for rows in update.rows:
        here.table(rows.table).require_width(rows)
        if not (np.isfinite(rows.values).all() and np.isfinite(rows.state).all()):
            raise BadShape(f"table {rows.table}: a value is not finite")
    for one in update.generations:
        spec = here.table(one.table).spec
        shape = (spec.rows, spec.dim)
        if spec.placement != "single" or one.values.shape != shape or not np.isfinite(one.values).all():
            raise BadShape(f"table {one.table}: its generation is not finite {list(shape)} of a dense table")


def times(update: Update) -> Iterator[int]:
    """All version times that an update speaks of, or larger ones of the same part."""
    yield from (int(part.time.max(initial=0)) for part in update.versioned)
    yield from (one.time for one in update.generations)
    if update.learned is not None:
        yield from update.learned.knowledge.values()
        # A floor that nobody's knowledge will ever cover makes every exchange after it a full replacement.
        yield from update.learned.horizon.graves.values()
        yield from update.learned.horizon.last.values()


def winners(here: Contents, update: Update) -> Won:
    """What of a checked update is neither covered by what is known here nor older than what is stored here."""
    new = {writer: epoch for writer, epoch in update.epochs.items() if writer not in here.epochs}
    epochs = here.epochs | new
    known = Known.of(here.knowledge, here.horizon.retired, epochs)
    settled = Settled.of(here, update.final, epochs)
    merged = covered = lost = 0
    rows, graves = list[Rows](), list[Graves]()
    for part in update.versioned:
        uncovered = known.above(part.time, part.writer)
        latest = here.table(part.table).latest(part.keys)
        wins = newer((part.time, part.writer), latest, epochs) & uncovered
        covered += len(wins) - int(uncovered.sum())
        lost += int(uncovered.sum()) - int(wins.sum())
        if settled is not None:
            wins |= settled.undone(part, latest)
        merged += int(wins.sum())
        if not wins.any():
            continue
        if isinstance(part, Rows):
            rows.append(_rows(part, wins))
        else:
            graves.append(Graves(part.table, part.keys[wins], part.time[wins], part.writer[wins]))
    generations = tuple(
        one
        for one in update.generations
        if (known.is_below(one.time, one.writer) and _is_newer(here, one, epochs))
        or (settled is not None and settled.is_undone(here.dense(one.table), one))
    )
    return Won(tuple(rows), tuple(graves), generations, new, merged, covered, lost)


def _rows(part: Rows, wins: Wins) -> Rows:
    if wins.all():
        return part
    return Rows(
        part.table, part.keys[wins], part.values[wins], part.state[wins], part.time[wins], part.writer[wins]
    )


def _is_newer(here: Contents, one: Generation, epochs: Epochs) -> bool:
    mine, theirs = ((epochs.get(g.writer, 0), g.time, g.writer) for g in (here.dense(one.table), one))
    return theirs > mine


def is_news(here: Contents, learned: Learned | None, new: Epochs) -> bool:
    """Whether there is anything in ``learned`` that is not claimed here yet. ``new``: the epochs of writers that were
    not heard of before."""
    if learned is None:
        return False
    epochs = here.epochs | dict(new)
    fresh = any(
        time > here.knowledge.get(writer, 0) and not epochs.get(writer, 0) < here.horizon.retired
        for writer, time in learned.knowledge.items()
    )
    moved = any(progress.applied > here.pushes.applied(source) for source, progress in learned.progress)
    return fresh or moved or here.horizon.joined(learned.horizon, epochs) != here.horizon


def omitted(here: Contents, learned: Learned, whole: Mapping[str, Keys]) -> tuple[tuple[str, Keys], ...]:
    """By table, the keys here that a full replacement did not name, and whose versions it knew."""
    claimed = learned.knowledge
    if learned.horizon.retired < here.horizon.retired:
        # It may lack what retired writers wrote, for deletions that came too late and do not count here.
        claimed = {w: time for w, time in claimed.items() if here.epochs.get(w, 0) >= here.horizon.retired}
    retired = 0 if claimed is not learned.knowledge else learned.horizon.retired
    theirs = here.known(claimed, retired)
    found = []
    for spec in here.specs:
        if spec.placement == "single":
            continue
        named = KeyIndex()
        named.insert(np.ascontiguousarray(whole.get(spec.name, np.zeros(0, np.uint64))))
        keys = here.table(spec.name).known_keys(theirs)
        slots, missing = named.find(keys)
        if missing:
            found.append((spec.name, keys[slots < 0]))
    return tuple(found)
