"""What a parameter server answers about the shards that it holds. No I/O: what is asked comes decoded.

Used by one thread, the server's loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from services.parameter_server import messages as wire
from services.parameter_server.holdings import Held, Holdings, Model
from services.parameter_server.types import ParametersRefused, PushStatus
from services.rpc.codec import MAX_FRAME_BYTES, Array
from sync.changes import Cursor
from sync.pushes import Part, Push, Source, Watermark

Answer = tuple[wire.Wire, tuple[Array, ...]]
MAX_CHANGES = 262_144
"""Rows per shard in one answer to ``changes``."""
MAX_ANSWER_BYTES = MAX_FRAME_BYTES
"""Rows in one answer to ``pull``, and about as much in one to ``changes``."""


class Host(Holdings):
    """Answers what is asked of the shards of one server."""

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
        """Rows of every part, in the order of its keys; where the request is versioned, those that differ."""
        model = self.model(request.model)
        each = 2 if request.versioned else 1
        if len(arrays) != each * len(request.parts):
            raise ParametersRefused(f"{len(request.parts)} parts, {len(arrays)} arrays")
        wanted = zip(request.parts, arrays[::each], strict=True)
        size = sum(keys.size * _row_bytes(model, part.table) for part, keys in wanted)
        if size > MAX_ANSWER_BYTES:
            raise ParametersRefused(f"rows of {size} bytes; one answer has at most {MAX_ANSWER_BYTES}")
        rows: list[Array] = []
        for number, part in enumerate(request.parts):
            some = arrays[each * number : each * number + each]
            rows += self._pulled(model, part, some, followed=request.followers)
        marks = [
            wire.ShardMarks(
                shard, _wire_marks(held.shard.watermarks().values()), held.moves, held.shard.epoch
            )
            for shard, held in self._marked(model, request)
        ]
        return wire.PullReply(marks), tuple(rows)

    def _pulled(
        self, model: Model, part: wire.Part, arrays: Sequence[Array], *, followed: bool
    ) -> list[Array]:
        """The answer to one part: rows, or (with versions) which changed, their rows and versions."""
        dim = model.declaration.table(part.table).dim
        ranges = self._ranges(model, part, arrays, followed=followed)
        if len(arrays) == 1:
            found = [held.shard.pull(part.table, _keys(keys)) for held, (keys,) in ranges]
            return [np.concatenate(found) if len(found) != 1 and found else _first(found, dim)]
        changes = [
            _differing(held, part.table, _keys(keys), _versions(theirs)) for held, (keys, theirs) in ranges
        ]
        if not changes:
            return [np.empty(0, np.bool_), np.empty((0, dim), np.float32), np.empty((0, 2), np.uint64)]
        return [np.concatenate(column) for column in zip(*changes, strict=True)]

    def _marked(self, model: Model, request: wire.PullRequest) -> Iterator[tuple[int, Held]]:
        """The shards whose marks are told with a pull. Raises NotMine."""
        if not request.followers:
            yield from self.led(model)
            return
        for shard in sorted({*request.shards, *(shard for part in request.parts for shard in part.shards)}):
            yield shard, self.held(model, shard, followed=True)

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
        self.require_written(request.model, request.shards)
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
        self.require_written(model_name, (shard for part in parts for shard in part.shards))
        found: dict[int, list[Part]] = {}
        for number, part in enumerate(parts):
            pair = arrays[2 * number : 2 * number + 2]
            for held, (keys, gradients) in self._ranges(model, part, pair):
                shares = found.setdefault(held.shard.shard_id, [])
                shares.append((part.table, _keys(keys), _floats(gradients)))
        return found

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
        written = self.writes(held.shard.shard_id)
        # The live weights of a shard that another region writes are there.
        values = held.shard.dense(request.table, published=request.published or not written)
        generation = model.generations.get(request.table, 0) if written else values.number
        return wire.DenseReply(generation, _wire_marks(values.watermarks.values())), (values.values,)

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
                Cursor(cursor.incarnation, cursor.sequence, cursor.floor, cursor.table, cursor.slot),
                tuple(request.tables),
                limit,
            )
            at = found.cursor
            now.sequence, now.floor, now.table, now.slot = at.sequence, at.floor, at.table, at.slot
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
        for table, shard in self.single_tables(model):
            newest[shard] = max(newest.get(shard, 0), model.generations.get(table, 0))
        for spec in model.declaration.tables:
            if spec.placement == "single" and not self.writes(shard := self.shard_of(spec.name)):
                held = model.held.get(shard)
                number = 0 if held is None else held.shard.dense(spec.name).number
                newest[shard] = max(newest.get(shard, 0), number)
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


def _versions(array: Array) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    if array.dtype != np.uint64 or array.ndim != 2 or array.shape[1] != 2:
        raise ParametersRefused(f"versions are {array.dtype} {list(array.shape)}, not uint64 [N, 2]")
    return array.view(np.uint64)


def _differing(
    held: Held, table: str, keys: npt.NDArray[np.uint64], theirs: npt.NDArray[np.uint64]
) -> tuple[Array, Array, Array]:
    """Which of ``keys`` ``[N]`` have other versions than ``theirs`` ``[N, 2]``; the rows and versions of these."""
    stored = held.shard.table(table)
    checked = stored.check_keys(keys)
    time, writer = stored.versions(checked)
    changed = (time != theirs[:, 0]) | (writer != theirs[:, 1])
    ours = np.stack([time[changed], writer[changed].astype(np.uint64)], axis=1)
    held.unchanged_total += len(keys) - len(ours)
    return changed, held.shard.pull(table, checked[changed]), ours


def _floats(array: Array) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    if array.dtype != np.float32:
        raise ParametersRefused(f"gradients are {array.dtype}, not float32")
    return array.view(np.float32)


def _wire_marks(marks: Iterable[Watermark]) -> list[wire.WireMark]:
    return [(mark.log, mark.partition, mark.offset, mark.accepted_at_ms) for mark in marks]
