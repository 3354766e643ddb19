"""The shards that one parameter server holds, by model. No I/O: what is asked comes decoded, time by a clock.

Used by one thread, the server's loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from services.parameter_server import messages as wire
from services.parameter_server.declarations import Declaration, require_same
from services.parameter_server.offsets import DurableOffsets
from services.parameter_server.types import IncarnationChanged, ModelUnknown, ParametersRefused, PushStatus
from services.rpc.codec import MAX_FRAME_BYTES, Array
from sync.changes import Cursor
from sync.clock import HybridClock
from sync.placement import single_shard
from sync.pushes import Part, Push, Source, Watermark
from sync.records import Delta, Head
from sync.shard import Shard

Answer = tuple[wire.Wire, tuple[Array, ...]]
MAX_CHANGES = 262_144
"""Rows per shard in one answer to ``changes``."""
MAX_ANSWER_BYTES = MAX_FRAME_BYTES
"""Rows in one answer to ``pull``, and about as much in one to ``changes``."""
MAX_MODELS = 64


class NotMine(Exception):
    """The request names a shard that another server holds."""


@dataclass(slots=True)
class Held:
    """One shard of one model, with what of it is on disk.

    ``moves`` counts the pushes that moved its offsets. ``stale_total``: pushes that came too late for their bound.
    ``whole``: not a copy whose last steps are still to come.
    """

    shard: Shard
    durable: DurableOffsets = field(default_factory=DurableOffsets)
    stale_total: int = 0
    whole: bool = True

    @property
    def moves(self) -> int:
        counts = self.shard.counts
        return counts.applied_total + counts.refused_total


@dataclass(slots=True)
class Model:
    """One model on this server: its shards, and the number of its newest dense generation per single table."""

    declaration: Declaration
    held: dict[int, Held]
    generations: dict[str, int] = field(default_factory=dict)
    published_moves: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HostConfig:
    """Of how many shards this is a server, and the bound of their change streams."""

    name: str
    shards: int
    change_capacity: int


class Keeper(Protocol):
    """What keeps shards over restarts (``Durability`` provides it). May do I/O."""

    def open(
        self, model: str, shard_id: int, make: Callable[[], Shard], check: Callable[[Head], None]
    ) -> Held:
        """The shard as it was left, or ``make()``; ``check`` looks at what is known of a stored one first."""
        ...

    def record(self, held: Held, delta: Delta) -> None:
        """Keep a step of the shard."""
        ...

    def renew(self, held: Held) -> None:
        """Another shard was put in the place of ``held.shard``: keep that one, from scratch."""
        ...

    def forget(self, held: Held) -> None:
        """The shard is somebody else's now: keep nothing of it any more."""
        ...


class Host:
    """All models of one server: shards that it leads, and shards that follow another server's.

    ``keeper`` keeps each shard's steps; ``number(model, table)`` gives a number for a new dense generation that none
    before it had, or None if none can be had now. Both may do I/O and are called seldom.
    """

    def __init__(
        self,
        config: HostConfig,
        keeper: Keeper,
        number: Callable[[str, str], int | None],
        clock: HybridClock | None = None,
    ) -> None:
        self.config = config
        self.fences: dict[int, int] = {}
        """By shard that is led here: since which epoch of the shard map."""
        self.holds: set[int] = set()
        """The shards that are here, led or followed."""
        self.on_step: Callable[[str, int, Delta], None] = lambda model, shard, delta: None
        """Told of every step that a shard led here takes."""
        self._keeper, self._number = keeper, number
        self._clock = clock or HybridClock()
        self.models: dict[str, Model] = {}
        self.newest_accepted_at_ms = 0
        """When the newest event among all pushes was accepted (the API's clock, Unix ms)."""

    def declare(self, declaration: Declaration) -> None:
        """Hold the model's shards from now on. Raises ModelMismatch if it, or its snapshot, is another."""
        known = self.models.get(declaration.model)
        if known is not None:
            require_same(known.declaration, declaration)
            return
        if len(self.models) >= MAX_MODELS:
            raise ParametersRefused(f"{self.config.name} holds {MAX_MODELS} models already")
        model = self.models[declaration.model] = Model(declaration, {})
        for shard in sorted(self.holds):
            self._start(model, shard)

    @property
    def incarnation(self) -> int:
        """Changes whenever this server begins to lead a shard: what clients knew of it may be wrong then."""
        return max(self.fences.values(), default=0)

    def _start(self, model: Model, shard_id: int) -> None:
        """Open a shard of a model as it was left; lead it if that is this server's part."""
        declaration = model.declaration

        def check(head: Head) -> None:
            require_same(Declaration(head.model, head.fingerprint, head.specs), declaration)

        held = self._keeper.open(
            declaration.model, shard_id, lambda: self._empty(declaration, shard_id), check
        )
        model.held[shard_id] = held
        if shard_id in self.fences:
            self._own(model, held)

    def _empty(self, declaration: Declaration, shard_id: int) -> Shard:
        return Shard(
            shard_id,
            declaration.tables,
            0,
            self._clock,
            model=declaration.model,
            fingerprint=declaration.fingerprint,
            change_capacity=self.config.change_capacity,
        )

    def _own(self, model: Model, held: Held) -> None:
        shard, fence = held.shard, self.fences[held.shard.shard_id]
        # The fence is what nobody wrote under before, so it serves as the writer's id, too.
        shard.lead(fence, fence)
        shard.on_delta = lambda delta: self._stepped(held, delta)
        for table, at in self._single_tables(model):
            # Restored weights get a number of their own: they may differ from what was published before.
            if at == shard.shard_id and shard.pushes:
                self.publish(model.declaration.model, table)

    def _stepped(self, held: Held, delta: Delta) -> None:
        self._keeper.record(held, delta)
        self.on_step(held.shard.model, held.shard.shard_id, delta)

    def of(self, shard: int) -> Mapping[str, Shard]:
        """By model, its shard number ``shard``, where it is here."""
        return {name: model.held[shard].shard for name, model in self.models.items() if shard in model.held}

    def lead(self, shard: int, fence: int) -> None:
        """Own the shard of every model from now on, under ``fence``, which is newer than all before."""
        self._hold(shard)
        self.fences[shard] = fence
        for model in self.models.values():
            self._own(model, model.held[shard])

    def follow(self, shard: int) -> None:
        """Hold the shard, and take no pushes for it any more."""
        self._hold(shard)
        if self.fences.pop(shard, None) is None:
            return
        for model in self.models.values():
            model.held[shard].shard.resign()
            for spec in model.declaration.tables:
                if spec.placement == "single" and single_shard(spec.name, self.config.shards) == shard:
                    model.generations.pop(spec.name, None)
                    model.published_moves.pop(spec.name, None)

    def _hold(self, shard: int) -> None:
        if shard in self.holds:
            return
        self.holds.add(shard)
        for model in self.models.values():
            self._start(model, shard)

    def drop(self, shard: int) -> None:
        """The shard belongs to other servers now."""
        self.follow(shard)
        self.holds.discard(shard)
        for model in self.models.values():
            self._keeper.forget(model.held.pop(shard))

    def blank(self, head: Head) -> Shard:
        """An empty shard to copy into, of a model that may not be known here yet. Raises ModelMismatch,
        ParametersRefused."""
        declaration = Declaration(head.model, head.fingerprint, head.specs)
        self.declare(declaration)
        return self._empty(declaration, head.shard_id)

    def adopt(self, copy: Shard) -> None:
        """Put a copy in the place of the shard that is here. Nothing of it is kept until it is ``settled``."""
        held = self.models[copy.model].held[copy.shard_id]
        held.shard, held.whole = copy, False

    def settled(self, shard: Shard) -> None:
        """A copy is whole: keep it from now on."""
        held = self.models[shard.model].held[shard.shard_id]
        held.whole = True
        shard.settle()
        self._keeper.renew(held)

    def took(self, shard: Shard, delta: Delta) -> None:
        """A shard took over a step of its leader."""
        held = self.models[shard.model].held[shard.shard_id]
        if held.whole:
            self._keeper.record(held, delta)

    def all_held(self) -> Iterator[tuple[str, Held]]:
        """Every shard of every model, with the model's name."""
        for name, model in self.models.items():
            for held in model.held.values():
                yield name, held

    def model(self, name: str) -> Model:
        """Raises ModelUnknown."""
        try:
            return self.models[name]
        except KeyError:
            raise ModelUnknown(f"model {name} is not declared on {self.config.name}") from None

    def held(self, model: Model, shard: int, *, followed: bool = False) -> Held:
        """A shard of ``model`` that is led here, or (``followed``) at least held. Raises NotMine."""
        held = model.held.get(shard)
        if held is None or not (shard in self.fences or (followed and held.whole)):
            raise NotMine(f"shard {shard} is not led by {self.config.name}")
        return held

    def led(self, model: Model) -> Iterator[tuple[int, Held]]:
        """The shards of ``model`` that are led here, by number."""
        return ((shard, held) for shard, held in model.held.items() if shard in self.fences)

    def _single_tables(self, model: Model) -> Iterator[tuple[str, int]]:
        for spec in model.declaration.tables:
            shard = single_shard(spec.name, self.config.shards)
            if spec.placement == "single" and shard in model.held and shard in self.fences:
                yield spec.name, shard

    def _ranges(
        self, model: Model, part: wire.Part, arrays: Sequence[Array], *, followed: bool = False
    ) -> Iterator[tuple[Held, tuple[Array, ...]]]:
        """Each shard's share of a part's arrays ``[N, ...]``. Raises ParametersRefused, NotMine."""
        if len(part.shards) != len(part.counts) or min(part.counts, default=0) < 0:
            raise ParametersRefused(
                f"table {part.table}: {len(part.shards)} shards, {len(part.counts)} counts"
            )
        _require_once(part.shards, "shard")
        if any(array.ndim < 1 or len(array) != sum(part.counts) for array in arrays):
            raise ParametersRefused(f"table {part.table}: the arrays are not as long as their counts say")
        start = 0
        for shard, count in zip(part.shards, part.counts, strict=True):
            yield (
                self.held(model, shard, followed=followed),
                tuple(array[start : start + count] for array in arrays),
            )
            start += count

    def pull(self, request: wire.PullRequest, arrays: Sequence[Array]) -> Answer:
        """Rows of every part, in the order of its keys."""
        model = self.model(request.model)
        if len(arrays) != len(request.parts):
            raise ParametersRefused(f"{len(request.parts)} parts, {len(arrays)} arrays")
        wanted = zip(request.parts, arrays, strict=True)
        size = sum(keys.size * _row_bytes(model, part.table) for part, keys in wanted)
        if size > MAX_ANSWER_BYTES:
            raise ParametersRefused(f"rows of {size} bytes; one answer has at most {MAX_ANSWER_BYTES}")
        rows: list[Array] = []
        for part, keys in zip(request.parts, arrays, strict=True):
            found = [
                held.shard.pull(part.table, _keys(some))
                for held, (some,) in self._ranges(model, part, (keys,), followed=request.followers)
            ]
            dim = model.declaration.table(part.table).dim
            rows.append(np.concatenate(found) if len(found) != 1 and found else _first(found, dim))
        named = {shard for part in request.parts for shard in part.shards}
        shards = (
            [(shard, model.held[shard]) for shard in sorted(named)] if request.followers else self.led(model)
        )
        marks = [
            wire.ShardMarks(shard, _wire_marks(held.shard.watermarks().values()), held.moves)
            for shard, held in shards
        ]
        return wire.PullReply(marks), tuple(rows)

    def push(self, request: wire.PushRequest, arrays: Sequence[Array]) -> Answer:
        """Apply a push on every shard that it names; each shard is atomic on its own."""
        outcomes = []
        seen: Sequence[int | None] = request.seen or [None] * len(request.shards)
        if len(seen) != len(request.shards):
            raise ParametersRefused(f"{len(request.shards)} shards, {len(seen)} of them seen")
        for (held, push), moves in zip(self.pushes(request, arrays), seen, strict=True):
            too_old = moves is not None and held.moves - moves > request.staleness
            if too_old and push.offset > held.shard.applied(push.source):
                held.stale_total += 1
                outcomes.append(self.outcome(held, push.source, "stale", held.shard.applied(push.source)))
                continue
            found = held.shard.push(push)
            outcomes.append(self.outcome(held, push.source, found.status, found.applied, found.reason))
        self.pushed(request.model, request.accepted_at_ms)
        return wire.PushResponse(self.incarnation, outcomes), ()

    def outcome(
        self, held: Held, source: Source, status: PushStatus, applied: int, reason: str = ""
    ) -> wire.ShardOutcome:
        """What is answered of a push from ``source`` on one shard."""
        durable = held.durable.of(source)
        return wire.ShardOutcome(held.shard.shard_id, status, applied, durable, reason)

    def pushed(self, model: str, accepted_at_ms: int) -> None:
        """To be called once shards of ``model`` moved: notes the acceptance, publishes first weights."""
        self.newest_accepted_at_ms = max(self.newest_accepted_at_ms, accepted_at_ms)
        self._publish_first(model, self.model(model))

    def pushes(self, request: wire.PushRequest, arrays: Sequence[Array]) -> list[tuple[Held, Push]]:
        """What a push is on each shard that it names, in that order; nothing is applied yet."""
        model = self.model(request.model)
        self.require_incarnation(request.incarnation)
        _require_once(request.shards, "shard")
        if len(request.shards) != len(request.predecessors):
            raise ParametersRefused(f"{len(request.shards)} shards, {len(request.predecessors)} predecessors")
        parts = self.parts(request.model, request.parts, arrays)
        if unnamed := parts.keys() - set(request.shards):
            raise ParametersRefused(f"gradients for shards {sorted(unnamed)}, which are not named")
        source = Source(request.log, request.partition)
        mark = None if request.mark is None else Watermark(*request.mark)
        return [
            (
                self.held(model, shard),
                Push(source, request.offset, predecessor, mark, tuple(parts.get(shard, ()))),
            )
            for shard, predecessor in zip(request.shards, request.predecessors, strict=True)
        ]

    def parts(
        self, model_name: str, parts: Sequence[wire.Part], arrays: Sequence[Array]
    ) -> dict[int, list[Part]]:
        """The gradients of each shard. Arrays: keys ``[N]`` and gradients ``[N, d]`` per part, in turn."""
        model = self.model(model_name)
        if len(arrays) != 2 * len(parts):
            raise ParametersRefused(f"{len(parts)} parts, {len(arrays)} arrays")
        found: dict[int, list[Part]] = {}
        for number, part in enumerate(parts):
            pair = arrays[2 * number : 2 * number + 2]
            for held, (keys, gradients) in self._ranges(model, part, pair):
                shares = found.setdefault(held.shard.shard_id, [])
                shares.append((part.table, _keys(keys), _floats(gradients)))
        return found

    def require_incarnation(self, expected: int) -> None:
        """Raises IncarnationChanged unless this is the process that is ``expected`` (0: any)."""
        if expected not in (0, self.incarnation):
            raise IncarnationChanged(self.config.name, expected, self.incarnation)

    def _publish_first(self, name: str, model: Model) -> None:
        for table, shard in self._single_tables(model):
            if table not in model.generations and model.held[shard].moves:
                self.publish(name, table)

    def applied(self, request: wire.AppliedRequest) -> Answer:
        """Applied and durable offset of a source on every shard."""
        source = Source(request.log, request.partition)
        model = self.model(request.model)
        _require_once(request.shards, "shard")
        found = [(shard, self.held(model, shard)) for shard in request.shards]
        shards = [(shard, held.shard.applied(source), held.durable.of(source)) for shard, held in found]
        return wire.AppliedReply(self.incarnation, shards), ()

    def dense(self, request: wire.DenseRequest) -> Answer:
        """The dense weights, published or live."""
        model = self.model(request.model)
        held = self._dense_shard(model, request.table)
        values = held.shard.dense(request.table, published=request.published)
        generation = model.generations.get(request.table, 0)
        return wire.DenseReply(generation, _wire_marks(values.watermarks.values())), (values.values,)

    def holder(self, model: str, table: str) -> Held | None:
        """The shard of the single ``table``, if it is led here. Raises ModelUnknown."""
        shard = single_shard(table, self.config.shards)
        return self.model(model).held.get(shard) if shard in self.fences else None

    def _dense_shard(self, model: Model, table: str) -> Held:
        return self.held(model, single_shard(table, self.config.shards))

    def publish(self, model_name: str, table: str) -> int:
        """Publish the live dense weights if they changed; the number of the newest generation (0: none yet).

        Readers of several incarnations compare numbers, so they come from outside and never repeat.
        """
        model = self.model(model_name)
        held = self._dense_shard(model, table)
        before = held.shard.dense(table).generation
        if table in model.generations and model.published_moves.get(table) == held.moves:
            return model.generations[table]
        # The number comes first: if none can be had now, nothing is published under an old one.
        number = self._number(model_name, table)
        if number is None:
            return model.generations.get(table, 0)
        if held.shard.publish_dense(table) != before or table not in model.generations:
            model.generations[table] = number
        model.published_moves[table] = held.moves
        return model.generations[table]

    def publish_all(self) -> None:
        """Publish every dense table that changed and was published before."""
        for name, model in self.models.items():
            for table in list(model.generations):
                self.publish(name, table)

    def describe(self) -> list[wire.ModelReply]:
        """Every model with the rows that it holds here."""
        return [
            wire.ModelReply(
                name,
                model.declaration.fingerprint,
                [
                    wire.TableReply(
                        spec.name,
                        spec.dim,
                        sum(len(held.shard.table(spec.name)) for held in model.held.values()),
                    )
                    for spec in model.declaration.tables
                ],
            )
            for name, model in self.models.items()
        ]

    def changes(self, request: wire.ChangesRequest) -> Answer | None:
        """What the reader has not seen yet, or None where it has seen everything."""
        model = self.model(request.model)
        _require_once([cursor.shard for cursor in request.cursors], "shard")
        _require_once(request.tables, "table")
        limit = _most_rows(model, request)
        generation = self._generations(model)
        deltas: list[wire.ShardDelta] = []
        arrays: list[Array] = []
        for cursor in request.cursors:
            held = self.held(model, cursor.shard)
            now = wire.ShardCursor(
                cursor.shard,
                held.shard.incarnation,
                held.shard.cursor().sequence,
                held.moves,
                generation.get(cursor.shard, -1),
                held.shard.cursor().floor,
            )
            if cursor == now:
                continue
            found = held.shard.changes(
                Cursor(cursor.incarnation, cursor.sequence, cursor.floor), tuple(request.tables), limit
            )
            now.sequence, now.floor = found.cursor.sequence, found.cursor.floor
            if not found.complete:
                now.pushes = -1
            deltas.append(
                wire.ShardDelta(
                    now,
                    [(table, len(keys)) for table, (keys, _) in found.parts.items()],
                    found.complete,
                    found.reset,
                    _wire_marks(found.watermarks.values()),
                )
            )
            for pair in found.parts.values():
                arrays += pair
        return (wire.ChangesReply(deltas), tuple(arrays)) if deltas else None

    def _generations(self, model: Model) -> dict[int, int]:
        """By shard, a number that changes when any dense table there is published: the newest of them."""
        newest: dict[int, int] = {}
        for table, shard in self._single_tables(model):
            newest[shard] = max(newest.get(shard, 0), model.generations.get(table, 0))
        return newest


def _require_once(named: Sequence[int] | Sequence[str], what: str) -> None:
    """Who names one thing many times would be answered as many times. Raises ParametersRefused."""
    if len(set(named)) != len(named):
        raise ParametersRefused(f"a {what} is named twice")


def _row_bytes(model: Model, table: str) -> int:
    return 4 * model.declaration.table(table).dim


def _most_rows(model: Model, request: wire.ChangesRequest) -> int:
    """Rows per shard in an answer to ``request``: as many as it asks for and one answer can hold."""
    widest = max((_row_bytes(model, table) for table in request.tables), default=1)
    room = MAX_ANSWER_BYTES // (widest * max(1, len(request.cursors)))
    return max(1, min(request.limit, MAX_CHANGES, room))


def _first(found: Sequence[Array], dim: int) -> Array:
    return found[0] if found else np.empty((0, dim), np.float32)


def _keys(array: Array) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    if array.dtype != np.uint64:
        raise ParametersRefused(f"keys are {array.dtype}, not uint64")
    return array.view(np.uint64)


def _floats(array: Array) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    if array.dtype != np.float32:
        raise ParametersRefused(f"gradients are {array.dtype}, not float32")
    return array.view(np.float32)


def _wire_marks(marks: Iterable[Watermark]) -> list[wire.WireMark]:
    return [(mark.log, mark.partition, mark.offset, mark.accepted_at_ms) for mark in marks]
