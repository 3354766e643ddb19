"""What clients and parameter servers say to each other, beside the arrays.

All messages are MessagePack arrays: new fields go to the end, with defaults, and older readers skip them.
Arrays travel as frames of their own, in the order that each message's docstring gives.

Codes of failures: ``not-mine`` (the shard map changed), ``model-unknown``, ``model-mismatch``, ``refused``
(the request makes no sense), ``full`` (a bound is reached), ``incarnation`` (the server restarted),
``unknown-method``, ``internal``, and those of ``services.rpc.server``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

import msgspec

from services.parameter_server.types import Mark, PushStatus

NOT_MINE: Final = "not-mine"
MODEL_UNKNOWN: Final = "model-unknown"
MODEL_MISMATCH: Final = "model-mismatch"
REFUSED: Final = "refused"
FULL: Final = "full"
INCARNATION: Final = "incarnation"
UNKNOWN_METHOD: Final = "unknown-method"
INTERNAL: Final = "internal"

WireMark = tuple[str, int, int, int]
"""Incarnation of the events log, partition, offset, accepted_at_ms."""


class Wire(msgspec.Struct, array_like=True):
    """A message or a piece of one."""


class Part(Wire):
    """Keys of one table, those of each shard together: ``counts[i]`` of them for ``shards[i]``."""

    table: str
    shards: list[int]
    counts: list[int]


class ShardMarks(Wire):
    """The newest events that one shard's rows contain, how many pushes moved it since its start, and the fencing epoch
    of its newest step."""

    shard: int
    marks: list[WireMark]
    moves: int = 0
    epoch: int = 0


class DeclareRequest(Wire):
    """``declaration``: see ``declarations.py``. ``via``: the regions that it came through, in whose stores it is or
    will be. ``again``: this region has it in its store already, and a server did not know of it."""

    declaration: bytes
    via: list[str] = msgspec.field(default_factory=list)
    again: bool = False


class Done(Wire):
    """The answer where there is nothing to say."""


class PullRequest(Wire):
    """Arrays: keys uint64 ``[N]`` per part. ``followers``: replicas that do not lead the shards may answer, too;
    ``shards``: whose marks are wanted then beside those of the parts.

    ``versioned``: each part's keys are followed by versions uint64 ``[N, 2]``, the time and writer of the rows that the
    client has (2^64 - 1 twice: it has none), and it is told only what differs.
    """

    model: str
    epoch: int
    parts: list[Part]
    followers: bool = False
    versioned: bool = False
    shards: list[int] = []


class PullReply(Wire):
    """Arrays: rows float32 ``[N, d]`` per part. ``marks``: of all shards that the server leads; of those asked for
    where ``followers`` may answer.

    Where the request is ``versioned``: per part which keys changed, bool ``[N]``, and the M rows of these, float32
    ``[M, d]``, with their versions uint64 ``[M, 2]``; (0, 0) is the version of a key without a row.
    """

    marks: list[ShardMarks]


class PushRequest(Wire):
    """Arrays: keys uint64 ``[N]`` and gradients float32 ``[N, d]`` per part, in turn.

    ``shards`` are all shards of the server, ``predecessors`` beside them. ``incarnation`` 0: any. ``seen``,
    beside the shards too, are the ``moves`` that the pull before told; with it the push is ``stale`` on a
    shard that more than ``staleness`` pushes moved since. ``hops``: regions that it passed already.
    """

    model: str
    epoch: int
    log: str
    partition: int
    offset: int
    accepted_at_ms: int
    mark: WireMark | None
    shards: list[int]
    predecessors: list[int]
    parts: list[Part]
    incarnation: int = 0
    seen: list[int] = []
    staleness: int = 0
    hops: int = 0


class ShardOutcome(Wire):
    """What became of a push on one shard."""

    shard: int
    status: PushStatus
    applied: int
    durable: int
    reason: str = ""


class PushResponse(Wire):
    incarnation: int
    outcomes: list[ShardOutcome]


class AppliedRequest(Wire):
    """``shards``: those that the server leads, as whoever asks thinks. ``hops``: regions that it passed already."""

    model: str
    epoch: int
    log: str
    partition: int
    shards: list[int]
    hops: int = 0


class AppliedReply(Wire):
    """``shards``: shard, applied, durable of each."""

    incarnation: int
    shards: list[tuple[int, int, int]]


class DenseRequest(Wire):
    model: str
    epoch: int
    table: str
    published: bool


class DenseReply(Wire):
    """Arrays: values float32 ``[chunks, chunk]``."""

    generation: int
    marks: list[WireMark]


class PublishRequest(Wire):
    """``hops``: regions that it passed already."""

    model: str
    epoch: int
    table: str
    hops: int = 0


class PublishReply(Wire):
    generation: int


class ShardCursor(Wire):
    """How far a reader of changes has come: rows (``sync.changes.Cursor``), pushes seen, dense generation seen."""

    shard: int
    incarnation: int = 0
    sequence: int = 0
    pushes: int = -1
    generation: int = -1
    floor: int = 0
    table: int = -1
    slot: int = 0


class ChangesRequest(Wire):
    """Parks for at most ``wait_ms`` until a shard is ahead of its cursor. ``limit``: rows per shard."""

    model: str
    epoch: int
    tables: list[str]
    cursors: list[ShardCursor]
    limit: int
    wait_ms: int


class ShardDelta(Wire):
    """``parts``: table and number of rows. ``generation`` -1: the shard holds no dense table."""

    cursor: ShardCursor
    parts: list[tuple[str, int]]
    complete: bool
    restarted: bool
    marks: list[WireMark]


class ChangesReply(Wire):
    """Arrays: keys uint64 ``[N]`` and rows float32 ``[N, d]`` per part of every delta, in turn."""

    deltas: list[ShardDelta]


class TailShard(Wire):
    """One shard that the asking server follows. ``stream``: whose numbers ``number`` (the newest step that it
    has) and ``held`` (the newest that it and those behind it have) are; 0: it wants to join, and has the steps
    up to ``positions``: model → (epoch, position). ``held`` -1: what it has is not whole. ``unsettled``: models whose
    copies were read from the stream ``copied_from``, and need its further steps to be whole."""

    shard: int
    stream: int
    number: int
    held: int
    positions: dict[str, tuple[int, int]] = {}
    unsettled: list[str] = []
    copied_from: int = 0


class TailRequest(Wire):
    """Parks for at most ``wait_ms`` until a shard has a step that ``server``, as the process of ``incarnation``, does
    not have. ``epoch``: of the shard map that it goes by, so whom it counts among those behind it."""

    server: str
    shards: list[TailShard]
    wait_ms: int
    incarnation: int = 0
    epoch: int = 0


class TailedShard(Wire):
    """The steps after ``number``, of which ``newest`` is the last, each by its model; or the models that have to be
    copied first. ``stream`` 0: the numbers asked for mean nothing any more, and the shard has to be joined anew.
    ``unknown``: models of which there is no step here, so that those of the asking server are a deposed leader's."""

    shard: int
    stream: int
    number: int = 0
    models: list[str] = []
    copy: list[str] = []
    newest: int = 0
    unknown: list[str] = []


class TailReply(Wire):
    """Arrays: per shard with steps, their bytes as in a log (``sync.snapshot``), uint8 ``[B]``."""

    shards: list[TailedShard]


class CopyRequest(Wire):
    """A piece of a shard: its head where ``cursor`` is None, else rows or graves from there on."""

    model: str
    shard: int
    cursor: tuple[int, bool, int] | None


class CopyReply(Wire):
    """Arrays: those of the record. ``cursor``: where to go on; None: this was the last piece. ``position``: the
    newest step now; the copy is whole once it has it too. ``stream``: of the server; pieces fit together only where
    all have the same."""

    header: bytes
    cursor: tuple[int, bool, int] | None
    position: int
    stream: int = 0


class DescribeRequest(Wire):
    pass


class TableReply(Wire):
    name: str
    dim: int
    rows: int


class ModelReply(Wire):
    name: str
    fingerprint: str
    tables: list[TableReply]


class HeldTable(Wire):
    """One table of one shard. ``allocated_bytes``: with room for growth, versions, index, graves and sketch;
    ``row_bytes``: values and optimiser state of the rows alone. ``waiting``: about how many keys were pushed and
    have no row yet. The totals count rows since the server's start."""

    name: str
    rows: int
    allocated_bytes: int
    row_bytes: int
    graves: int
    waiting: int
    norm: float
    normed: int
    pushed_total: int
    unadmitted_total: int
    expired_total: int


class HeldModel(Wire):
    """One model's part of a shard. ``steps``: since the shard was born, the newest under ``epoch``; the totals count
    since the server's start."""

    model: str
    epoch: int
    steps: int
    whole: bool
    applied_total: int
    duplicate_total: int
    gap_total: int
    refused_total: int
    stale_total: int
    deleted_total: int
    last_refusal: str
    tables: list[HeldTable]


class HeldShard(Wire):
    """A shard that the server holds. ``behind``: by server that follows it here, the steps that it lacks."""

    shard: int
    leads: bool
    fence: int
    behind: dict[str, int]
    models: list[HeldModel]


class DescribeReply(Wire):
    """``map_epoch``: of the shard map that the server goes by (0: none yet)."""

    name: str
    incarnation: int
    shards: list[int]
    models: list[ModelReply]
    pushes: int
    snapshot_age_s: float | None
    map_epoch: int = 0
    held: list[HeldShard] = []


class CheckpointRequest(Wire):
    """Answered once everything applied before is on disk, in a snapshot or in the log after one."""


class MetricsRequest(Wire):
    pass


class MetricsReply(Wire):
    """``text``: Prometheus exposition."""

    text: str


W = TypeVar("W", bound=Wire)
_encoder = msgspec.msgpack.Encoder()


def pack(message: Wire) -> bytes:
    """The message's bytes."""
    return _encoder.encode(message)


def unpack(data: bytes, kind: type[W]) -> W:
    """Read ``pack``'s bytes back. Raises msgspec.DecodeError."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (RecursionError, UnicodeDecodeError) as error:
        raise msgspec.DecodeError(str(error)) from error


def least_marks(shards: int, reported: Mapping[int, Sequence[WireMark]]) -> dict[tuple[str, int], Mark]:
    """What all shards together have reached: per events partition the least offset over ``shards`` shards.

    A partition that some shard has not heard of is left out, as is everything while a shard is missing.
    """
    least: dict[tuple[str, int], tuple[int, Mark]] = {}
    for marks in reported.values():
        for log, partition, offset, accepted_at_ms in marks:
            count, known = least.get((log, partition), (0, None))
            mark = Mark(offset, accepted_at_ms)
            least[log, partition] = (count + 1, mark if known is None or mark < known else known)
    return {where: mark for where, (count, mark) in least.items() if count == shards}
