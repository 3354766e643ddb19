"""Records as a header and arrays, for messages and files alike.

The header is MessagePack: what kind of record it is, its small values, and how many rows each table has; the
arrays follow in the order that the header implies. Fields may be appended with defaults, never renamed. What
is read is checked: a peer's or a file's record is either well formed or ``RecordDamaged``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from sync.admission import SketchState
from sync.clock import MAX_TIME
from sync.errors import BadSpec, OtherFormat, RecordDamaged
from sync.guard import NormState
from sync.knowledge import Horizon, Knowledge
from sync.pushes import Progress, Source, Watermark
from sync.records import Delta, End, Generation, Graves, Head, Keys, Learned, Record, Rows, Update
from sync.spec import TableSpec

Array = npt.NDArray[np.generic]
Position = tuple[str, int, int, int]
FORMAT: Final = 3


class _Record(msgspec.Struct, tag_field="kind", omit_defaults=True):
    pass


class _Progress(msgspec.Struct, array_like=True):
    log: str
    partition: int
    applied: int
    mark: Position | None = None


class _Rows(_Record, tag="rows"):
    """``shape``: rows, values per row, floats of state per row."""

    table: str
    shape: tuple[int, int, int]


class _Graves(_Record, tag="graves"):
    table: str
    count: int


class _Horizon(msgspec.Struct, array_like=True):
    graves: list[tuple[int, int]]
    retired: int = 0
    retired_before: int = 0
    last: list[tuple[int, int]] = []


class _Learned(msgspec.Struct, array_like=True):
    knowledge: list[tuple[int, int]]
    horizon: _Horizon
    progress: list[_Progress] = []


class _Generation(msgspec.Struct, array_like=True):
    """``shape``: rows, values per row."""

    table: str
    number: int
    shape: tuple[int, int]
    time: int
    writer: int
    marks: list[Position] = []


class _Update(_Record, tag="update"):
    rows: list[tuple[str, int, int, int]] = []
    graves: list[tuple[str, int]] = []
    generations: list[_Generation] = []
    epochs: list[tuple[int, int]] = []
    urgent: bool = False
    learned: _Learned | None = None
    final: _Learned | None = None


class _Delta(_Record, tag="delta"):
    epoch: int
    position: int
    writer: int
    clock: int
    progress: list[_Progress] = []
    rows: list[tuple[str, int, int, int]] = []
    graves: list[tuple[str, int]] = []
    counted: list[tuple[str, int]] = []
    norms: list[tuple[str, float, int]] = []
    collected: list[tuple[str, list[tuple[int, int]]]] = []
    learned: _Learned | None = None
    epochs: list[tuple[int, int]] = []
    generations: list[_Generation] = []
    dropped: list[tuple[str, int]] = []


class _Head(_Record, tag="head"):
    format: int
    model: str
    shard_id: int
    fingerprint: str
    specs: list[dict[str, object]]
    epoch: int
    position: int
    clock: int
    history: list[tuple[int, int]]
    knowledge: list[tuple[int, int]]
    epochs: list[tuple[int, int]]
    pushes: list[_Progress]
    generations: list[_Generation] = []
    norms: list[tuple[str, float, int]] = []
    sketches: list[tuple[str, int, list[int]]] = []
    horizon: _Horizon | None = None
    stateless: bool = False


class _End(_Record, tag="end"):
    position: int


_Any = _Rows | _Graves | _Delta | _Head | _End | _Update
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(_Any)


def to_parts(record: Record) -> tuple[bytes, list[Array]]:
    """The record's header and arrays; the arrays are not copied."""
    arrays: list[Array] = []
    header: _Any
    match record:
        case Rows():
            arrays = _row_arrays(record)
            header = _Rows(record.table, (len(record.keys), record.values.shape[1], record.state.shape[1]))
        case Graves():
            arrays = [record.keys, record.time, record.writer]
            header = _Graves(record.table, len(record.keys))
        case Delta():
            header = _delta_header(record)
            arrays = _contents(record)
            arrays += [keys for _, keys in (*record.counted, *record.dropped)]
        case Update():
            header = _update_header(record)
            arrays = _contents(record)
        case Head():
            header = _head_header(record)
            arrays = [one.values for one in record.generations]
            arrays += [sketch.counters for sketch in record.sketches.values()]
        case End():
            header = _End(record.position)
    return _encoder.encode(header), arrays


def from_parts(header: bytes | memoryview, arrays: Sequence[Array]) -> Record:
    """Read ``to_parts``' form back; the arrays are used as they are. Raises RecordDamaged."""
    try:
        found = _decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordDamaged(f"the header of a record cannot be read: {error}") from error
    rest = iter(arrays)
    try:
        record = _record(found, rest)
    except BadSpec as error:
        raise RecordDamaged(f"a record's tables cannot exist: {error}") from error
    if next(rest, None) is not None:
        raise RecordDamaged("a record has more arrays than its header says")
    return record


def _record(found: _Any, arrays: Iterator[Array]) -> Record:
    match found:
        case _Rows():
            return _rows(found.table, found.shape, arrays)
        case _Graves():
            return _graves(found.table, found.count, arrays)
        case _End():
            return End(_natural(found.position))
        case _Delta():
            return _delta(found, arrays)
        case _Update():
            return _update(found, arrays)
        case _Head():
            return _head(found, arrays)


def _contents(record: Delta | Update) -> list[Array]:
    arrays: list[Array] = []
    for rows in record.rows:
        arrays += _row_arrays(rows)
    for graves in record.graves:
        arrays += [graves.keys, graves.time, graves.writer]
    return arrays + [one.values for one in record.generations]


def _row_arrays(rows: Rows) -> list[Array]:
    return [rows.keys, rows.values, rows.state, rows.time, rows.writer]


def _delta_header(delta: Delta) -> _Delta:
    return _Delta(
        epoch=delta.epoch,
        position=delta.position,
        writer=delta.writer,
        clock=delta.clock,
        progress=_plain_progress(delta.progress),
        rows=[(r.table, len(r.keys), r.values.shape[1], r.state.shape[1]) for r in delta.rows],
        graves=[(g.table, len(g.keys)) for g in delta.graves],
        counted=[(table, len(keys)) for table, keys in delta.counted],
        norms=[(table, norm.mean, norm.count) for table, norm in delta.norms],
        collected=[(table, sorted(cut.items())) for table, cut in delta.collected],
        learned=_plain_learned(delta.learned),
        epochs=sorted(delta.epochs.items()),
        generations=_plain_generations(delta.generations),
        dropped=[(table, len(keys)) for table, keys in delta.dropped],
    )


def _update_header(update: Update) -> _Update:
    return _Update(
        rows=[(r.table, len(r.keys), r.values.shape[1], r.state.shape[1]) for r in update.rows],
        graves=[(g.table, len(g.keys)) for g in update.graves],
        generations=_plain_generations(update.generations),
        epochs=sorted(update.epochs.items()),
        urgent=update.urgent,
        learned=_plain_learned(update.learned),
        final=_plain_learned(update.final),
    )


def _plain_generations(generations: Sequence[Generation]) -> list[_Generation]:
    return [
        _Generation(
            one.table, one.number, (one.values.shape[0], one.values.shape[1]), one.time, one.writer,
            [(m.log, m.partition, m.offset, m.accepted_at_ms) for m in one.watermarks.values()],
        )
        for one in generations
    ]  # fmt: skip


def _plain_learned(learned: Learned | None) -> _Learned | None:
    if learned is None:
        return None
    return _Learned(
        sorted(learned.knowledge.items()), _plain_horizon(learned.horizon), _plain_progress(learned.progress)
    )


def _plain_horizon(horizon: Horizon) -> _Horizon:
    return _Horizon(
        sorted(horizon.graves.items()), horizon.retired, horizon.retired_before, sorted(horizon.last.items())
    )


def _head_header(head: Head) -> _Head:
    return _Head(
        format=FORMAT,
        model=head.model,
        shard_id=head.shard_id,
        fingerprint=head.fingerprint,
        specs=[spec.to_plain() for spec in head.specs],
        epoch=head.epoch,
        position=head.position,
        clock=head.clock,
        history=list(head.history),
        knowledge=sorted(head.knowledge.items()),
        epochs=sorted(head.epochs.items()),
        pushes=_plain_progress(sorted(head.pushes.items())),
        generations=_plain_generations(head.generations),
        norms=[(table, norm.mean, norm.count) for table, norm in head.norms.items()],
        sketches=[(table, one.counted, list(one.counters.shape)) for table, one in head.sketches.items()],
        horizon=_plain_horizon(head.horizon),
        stateless=head.stateless,
    )


def _plain_progress(progress: Sequence[tuple[Source, Progress]]) -> list[_Progress]:
    return [
        _Progress(
            source.log,
            source.partition,
            done.applied,
            None
            if (mark := done.watermark) is None
            else (mark.log, mark.partition, mark.offset, mark.accepted_at_ms),
        )
        for source, done in progress
    ]


def _read_progress(plain: Sequence[_Progress]) -> dict[Source, Progress]:
    return {
        Source(one.log, _natural(one.partition)): Progress(
            _natural(one.applied + 1) - 1, None if one.mark is None else Watermark(*one.mark)
        )
        for one in plain
    }


def _delta(found: _Delta, arrays: Iterator[Array]) -> Delta:
    return Delta(
        epoch=_natural(found.epoch),
        position=_natural(found.position),
        writer=_writer(found.writer),
        clock=_natural(found.clock),
        progress=tuple(_read_progress(found.progress).items()),
        rows=tuple(_rows(table, (n, dim, state), arrays) for table, n, dim, state in found.rows),
        graves=tuple(_graves(table, count, arrays) for table, count in found.graves),
        generations=_generations(found.generations, arrays),
        counted=tuple((table, _keys(count, arrays)) for table, count in found.counted),
        dropped=tuple((table, _keys(count, arrays)) for table, count in found.dropped),
        norms=_norms(found.norms),
        collected=tuple((table, _knowledge(cut)) for table, cut in found.collected),
        learned=_learned(found.learned),
        epochs=_knowledge(found.epochs),
    )


def _update(found: _Update, arrays: Iterator[Array]) -> Update:
    return Update(
        rows=tuple(_rows(table, (n, dim, state), arrays) for table, n, dim, state in found.rows),
        graves=tuple(_graves(table, count, arrays) for table, count in found.graves),
        generations=_generations(found.generations, arrays),
        epochs=_knowledge(found.epochs),
        urgent=found.urgent,
        learned=_learned(found.learned),
        final=_learned(found.final),
    )


def _generations(plain: Sequence[_Generation], arrays: Iterator[Array]) -> tuple[Generation, ...]:
    found = []
    for one in plain:
        values = _floats(one.shape, arrays)
        if values.flags.writeable:
            values = values.view()
            values.flags.writeable = False
        marks = {(log, partition): Watermark(log, partition, *rest) for log, partition, *rest in one.marks}
        time, writer = _natural(one.time), one.writer
        if not 0 <= writer < 2**32:
            raise RecordDamaged(f"writer {writer} is not in [0, 2^32)")
        found.append(Generation(one.table, _natural(one.number), values, time, writer, marks))
    return tuple(found)


def _learned(found: _Learned | None) -> Learned | None:
    if found is None:
        return None
    progress = tuple(_read_progress(found.progress).items())
    return Learned(_knowledge(found.knowledge), _horizon(found.horizon), progress)


def _horizon(found: _Horizon | None) -> Horizon:
    if found is None:
        return Horizon()
    retired, before = _natural(found.retired), _natural(found.retired_before)
    return Horizon(_knowledge(found.graves), retired, before, _knowledge(found.last))


def _knowledge(plain: Sequence[tuple[int, int]]) -> Knowledge:
    return {_writer(writer): _natural(time) for writer, time in plain}


def _head(found: _Head, arrays: Iterator[Array]) -> Head:
    if found.format != FORMAT:
        raise OtherFormat(f"format {found.format}; this version reads {FORMAT}")
    return Head(
        model=found.model,
        shard_id=_natural(found.shard_id),
        fingerprint=found.fingerprint,
        specs=tuple(TableSpec.from_plain(spec) for spec in found.specs),
        epoch=_natural(found.epoch),
        position=_natural(found.position),
        clock=_natural(found.clock),
        history=tuple((_natural(epoch), _natural(first)) for epoch, first in found.history),
        knowledge=_knowledge(found.knowledge),
        epochs=_knowledge(found.epochs),
        pushes=_read_progress(found.pushes),
        generations=_generations(found.generations, arrays),
        norms=dict(_norms(found.norms)),
        sketches=_sketches(found.sketches, arrays),
        horizon=_horizon(found.horizon),
        stateless=found.stateless,
    )


def _norms(plain: Sequence[tuple[str, float, int]]) -> tuple[tuple[str, NormState], ...]:
    if not all(0.0 <= mean < math.inf for _, mean, _ in plain):
        raise RecordDamaged("a running norm is negative or not finite")
    return tuple((table, NormState(mean, _natural(count))) for table, mean, count in plain)


def _sketches(
    plain: Sequence[tuple[str, int, list[int]]], arrays: Iterator[Array]
) -> Mapping[str, SketchState]:
    return {
        table: SketchState(_array(np.dtype(np.uint8), tuple(shape), arrays).view(np.uint8), _natural(counted))
        for table, counted, shape in plain
    }


def _rows(table: str, shape: tuple[int, int, int], arrays: Iterator[Array]) -> Rows:
    count, dim, state = shape
    return Rows(
        table,
        _keys(count, arrays),
        _floats((count, dim), arrays),
        _floats((count, state), arrays),
        _times(count, arrays),
        _writers(count, arrays),
    )


def _graves(table: str, count: int, arrays: Iterator[Array]) -> Graves:
    return Graves(table, _keys(count, arrays), _times(count, arrays), _writers(count, arrays))


def _keys(count: int, arrays: Iterator[Array]) -> Keys:
    return _array(np.dtype(np.uint64), (count,), arrays).view(np.uint64)


def _times(count: int, arrays: Iterator[Array]) -> Keys:
    times = _keys(count, arrays)
    _natural(int(times.max(initial=0)))
    return times


def _writers(count: int, arrays: Iterator[Array]) -> npt.NDArray[np.uint32]:
    return _array(np.dtype(np.uint32), (count,), arrays).view(np.uint32)


def _floats(shape: tuple[int, int], arrays: Iterator[Array]) -> npt.NDArray[np.float32]:
    return _array(np.dtype(np.float32), shape, arrays).view(np.float32)


def _array(dtype: np.dtype[np.generic], shape: tuple[int, ...], arrays: Iterator[Array]) -> Array:
    """The next array, aligned and contiguous as kernels take it."""
    found = next(arrays, None)
    if found is None or found.shape != shape or found.dtype != dtype:
        what = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
        raise RecordDamaged(f"a record holds {what} where its header says {dtype} {list(shape)}")
    return np.require(found, dtype, ["C", "A"])


def _natural(number: int) -> int:
    if not 0 <= number < MAX_TIME:
        raise RecordDamaged(f"{number} is not in [0, 2^63)")
    return number


def _writer(number: int) -> int:
    if not 0 < number < 2**32:
        raise RecordDamaged(f"writer {number} is not in [1, 2^32)")
    return number
