"""``sync`` on the wire: pulls and batches of ``sync.exchange`` as messages and arrays.

A batch's small arrays lie together in one frame, since each frame costs as much as some kilobytes; large ones have
frames of their own. Nothing that comes from another region is trusted: what cannot be a pull or a batch raises
RecordDamaged or msgspec.DecodeError.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
import numpy as np

from services.parameter_server.holdings import FENCE_BITS
from services.parameter_server.messages import Wire, pack, unpack
from services.rpc.calls import Outgoing
from services.rpc.codec import Array, Reply
from sync.clock import MAX_TIME
from sync.errors import RecordDamaged
from sync.exchange import Batch, Piece, Pull, ShardName, Want
from sync.exchange.messages import MAX_ENTRIES, MAX_NAMES
from sync.quantise import PARTS, Precision, quantise, restore
from sync.records import Update
from sync.replica import Token
from sync.wire import from_parts, to_parts

SYNC: Final = "sync"
REST: Final = "sync-rest"
OTHER_SHARDS: Final = "other-shards"
"""The code of a refusal: the two regions do not have as many shards, so no shard is the same."""
SAME_NUMBER: Final = "same-number"
"""The code of a refusal: two regions have one number, so that versions of one could be taken for the other's."""
MAX_BUDGET: Final = 16 * 2**20
MAX_WAIT_S: Final = 30.0
WHOLE_BYTES: Final = 2 * 2**20
"""A larger batch is fetched piece by piece, so that who waits for it can tell a slow link from a dead one. Rows keep to
the budget of their pull; it is dense weights that may be larger."""
MAX_PART_BYTES: Final = 2**20
LARGEST_BYTES: Final = 512 * 2**20
LARGE_BYTES: Final = 32 * 2**10
"""An array of so many bytes has a frame of its own."""
MAX_NAME: Final = 64
MAX_MODELS: Final = 1_024
MAX_WRITTEN: Final = 2**16
_DTYPES: Final = {"u8": np.uint64, "u4": np.uint32, "f4": np.float32, "u2": np.uint16, "u1": np.uint8}
_VALUES_AT: Final = 1
_ROW_ARRAYS: Final = 5
"""Keys, values, state, times and writers (``sync.wire``), of which the values may be quantised."""

Vector = Annotated[list[tuple[int, int]], msgspec.Meta(max_length=MAX_ENTRIES)]
Name = tuple[str, int]
_SOME: Final = msgspec.Meta(max_length=MAX_NAMES)
"""Refuses a longer list before any of it is read."""


class WireWant(Wire):
    """``sync.exchange.Want``. ``token``: incarnation and counter."""

    model: str
    shard: int
    round: int
    knowledge: Vector
    retired: int = 0
    token: tuple[int, int] | None = None


class SyncRequest(Wire):
    """A pull. ``puller``: of all that ever pull the only one of this name; ``shards``: in how many its region cuts
    every model. ``models``: with the first pull of a stream, the models that are known there, by name, each with the
    digest of its declaration. ``precision`` to ``max_staleness_s``: how it wants to be fed. ``clock_us``: its physical
    clock. ``region_number``: leads the ids of all writers of its region (-1: not told).
    """

    puller: str
    region: str
    shards: int
    stream: int
    number: int
    budget: int
    wait_s: float
    wants: Annotated[list[WireWant], _SOME] = msgspec.field(default_factory=list)
    unwanted: Annotated[list[Name], _SOME] = msgspec.field(default_factory=list)
    held: Annotated[list[tuple[str, int, Vector]], _SOME] = msgspec.field(default_factory=list)
    models: dict[str, str] = msgspec.field(default_factory=dict)
    precision: Precision = "float32"
    state: bool = False
    coalesce_s: float = 0.005
    priority_share: float = 0.1
    max_staleness_s: float = 60.0
    clock_us: int = 0
    region_number: int = -1


class WirePiece(Wire):
    """``header``: of the update, see ``sync.wire``; ``rows``: how many of its records are rows. ``arrays``: type and
    shape of each, and whether it has a frame of its own."""

    model: str
    shard: int
    round: int
    header: bytes
    rows: int
    arrays: list[tuple[str, tuple[int, ...], bool]]
    first: bool = False
    whole: bool = False
    token: tuple[int, int] | None = None
    left: int = 0


class SyncReply(Wire):
    """A batch. Arrays: the small ones of all pieces in one uint8 ``[B]``, each padded to 8 bytes; then the large ones,
    each as uint8. ``declarations`` of models that the puller did not know, or otherwise. ``region``: the source's.
    ``lengths`` of all arrays, where the batch is too large to be sent at once: they are to be fetched by ``sync-rest``,
    one after the other as if they were one. ``written``: with the first batch of a stream, the shards that the source's
    region writes (None: not told).
    """

    stream: int
    number: int
    pieces: list[WirePiece] = msgspec.field(default_factory=list)
    serves: list[Name] = msgspec.field(default_factory=list)
    parked_s: float = 0.0
    clock_us: int = 0
    ended: bool = False
    precision: Precision = "float32"
    declarations: list[bytes] = msgspec.field(default_factory=list)
    region: str = ""
    lengths: list[int] = msgspec.field(default_factory=list)
    written: list[int] | None = None


class RestRequest(Wire):
    """``size`` bytes from ``start`` on of a batch that was too large. Arrays of the answer: these, uint8 ``[B]``."""

    puller: str
    stream: int
    number: int
    start: int
    size: int


class RestReply(Wire):
    pass


@dataclass(frozen=True, slots=True)
class Received:
    """An answer as it is taken in. ``nbytes``: what it took on the wire, about."""

    batch: Batch
    declarations: tuple[bytes, ...]
    region: str
    nbytes: int
    written: frozenset[int] | None = None


def request_of(pull: Pull, template: SyncRequest, clock_us: int) -> Outgoing:
    """A pull to send. ``template``: what is the same in all pulls of this puller, and ``models`` for the first."""
    request = msgspec.structs.replace(
        template,
        stream=pull.stream,
        number=pull.number,
        budget=pull.budget,
        wait_s=pull.wait_s,
        wants=[
            WireWant(
                *want.shard,
                want.round,
                sorted(want.knowledge.items()),
                want.retired,
                None if want.token is None else (want.token.incarnation, want.token.counter),
            )
            for want in pull.wants
        ],
        unwanted=list(pull.unwanted),
        held=[(*name, sorted(vector.items())) for name, vector in pull.held],
        models=template.models if pull.number == 1 else {},
        clock_us=clock_us,
    )
    return Outgoing(SYNC, pack(request))


def pull_of(request: SyncRequest) -> Pull:
    """The pull that a request is. Raises RecordDamaged."""
    _require(0 < len(request.puller) <= 4 * MAX_NAME, "a puller without a proper name")
    _require(0 < request.stream < MAX_TIME and 0 < request.number < MAX_TIME, "a pull without a number")
    times = (request.wait_s, request.coalesce_s, request.max_staleness_s)
    _require(all(0.0 <= time < math.inf for time in times), "a time that is none")
    _require(0.0 <= request.priority_share <= 1.0, "a share that is none")
    _require(len(request.models) <= MAX_MODELS, f"{len(request.models)} models")
    held = {_name(model, shard, request.shards): _vector(vector) for model, shard, vector in request.held}
    return Pull(
        request.stream,
        request.number,
        min(max(request.budget, 1), MAX_BUDGET),
        min(request.wait_s, MAX_WAIT_S),
        tuple(_want(one, request.shards) for one in request.wants),
        tuple(_name(*one, request.shards) for one in request.unwanted),
        tuple(held.items()),
    )


def _want(one: WireWant, shards: int) -> Want:
    name = _name(one.model, one.shard, shards)
    return Want(name, _natural(one.round), _vector(one.knowledge), _natural(one.retired), _token(one.token))


def reply_of(
    batch: Batch,
    precision: Precision,
    declarations: Sequence[bytes] = (),
    region: str = "",
    written: Collection[int] | None = None,
) -> tuple[bytes, tuple[Array, ...]]:
    """A batch as a body and arrays."""
    small: list[Array] = []
    large: list[Array] = []
    pieces = [_wire_piece(piece, precision, small, large) for piece in batch.pieces]
    reply = SyncReply(
        batch.stream,
        batch.number,
        pieces,
        list(batch.serves),
        batch.parked_s,
        batch.clock_us,
        batch.ended,
        precision,
        list(declarations),
        region,
        written=None if written is None else sorted(written),
    )
    block = np.zeros(sum(_padded(array.nbytes) for array in small), np.uint8)
    at = 0
    for array in small:
        block[at : at + array.nbytes] = _bytes(array)
        at += _padded(array.nbytes)
    return pack(reply), (block, *(_bytes(array) for array in large))


def _wire_piece(piece: Piece, precision: Precision, small: list[Array], large: list[Array]) -> WirePiece:
    header, arrays = to_parts(piece.update)
    described = []
    for array in _quantised(arrays, len(piece.update.rows), precision):
        is_large = array.nbytes >= LARGE_BYTES
        (large if is_large else small).append(array)
        described.append((f"{array.dtype.kind}{array.itemsize}", array.shape, is_large))
    token = None if piece.token is None else (piece.token.incarnation, piece.token.counter)
    return WirePiece(
        *piece.shard, piece.round, header, len(piece.update.rows), described,
        piece.first, piece.whole, token, piece.left,
    )  # fmt: skip


def _quantised(arrays: Sequence[Array], rows: int, precision: Precision) -> Iterator[Array]:
    for number, array in enumerate(arrays):
        if number < rows * _ROW_ARRAYS and number % _ROW_ARRAYS == _VALUES_AT:
            yield from quantise(array.view(np.float32), precision)
        else:
            yield array


def lengths_of(reply: Reply) -> list[int]:
    """Of the arrays of an answer that are to be fetched; none where all came. Raises RecordDamaged,
    msgspec.DecodeError."""
    found = unpack(reply.body, SyncReply).lengths
    fits = all(0 <= length <= LARGEST_BYTES for length in found) and sum(found) <= LARGEST_BYTES
    _require(fits, "a batch that is too large")
    return found


def received(reply: Reply) -> Received:
    """The batch of an answer, all of whose arrays are here. Raises RecordDamaged, msgspec.DecodeError."""
    found = unpack(reply.body, SyncReply)
    _require(0.0 <= found.parked_s < math.inf, "a wait that is no time")
    _require(len(reply.arrays) > 0, "a batch without its block")
    for array in reply.arrays:
        _require(array.dtype == np.uint8 and array.ndim == 1, f"a block of {array.dtype}")
    block, *large = reply.arrays
    frames = _Frames(block, large)
    pieces = tuple(_piece(one, found.precision, frames) for one in found.pieces)
    frames.end()
    batch = Batch(
        _natural(found.stream),
        _natural(found.number),
        pieces,
        tuple(_name(*one) for one in found.serves),
        found.parked_s,
        _natural(found.clock_us),
        found.ended,
    )
    nbytes = len(reply.body) + sum(array.nbytes for array in reply.arrays)
    written = None if found.written is None else frozenset(found.written)
    _require(len(found.written or ()) <= MAX_WRITTEN, "more shards than any region has")
    return Received(batch, tuple(found.declarations), found.region[:MAX_NAME], nbytes, written)


def _piece(one: WirePiece, precision: Precision, frames: _Frames) -> Piece:
    arrays = [frames.take(*described) for described in one.arrays]
    restored: list[Array] = []
    at = 0
    while at < len(arrays):
        number = len(restored)
        if number < one.rows * _ROW_ARRAYS and number % _ROW_ARRAYS == _VALUES_AT:
            parts = arrays[at : at + PARTS[precision]]
            _require(parts[0].ndim == 2, "values that are no rows")
            restored.append(restore(parts, precision, (parts[0].shape[0], parts[0].shape[1])))
            at += PARTS[precision]
        else:
            restored.append(arrays[at])
            at += 1
    update = from_parts(one.header, restored)
    if not isinstance(update, Update):
        raise RecordDamaged(f"a batch holds a {type(update).__name__}")
    # The next leader here has to find a larger one.
    told = [one.horizon.retired for one in (update.learned, update.final) if one is not None]
    _require(
        max([*update.epochs.values(), *told], default=0) < 2**FENCE_BITS, "an epoch that no shard map has"
    )
    return Piece(
        _name(one.model, one.shard),
        _natural(one.round),
        update,
        one.first,
        one.whole,
        _token(one.token),
        _natural(one.left),
    )


class _Frames:
    """Cuts arrays out of the frames of a batch, in the order in which they were put there."""

    def __init__(self, block: Array, large: Sequence[Array]) -> None:
        self._block, self._large = block, iter(large)
        self._at = 0

    def take(self, code: str, shape: tuple[int, ...], is_large: bool) -> Array:
        """The next array. Raises RecordDamaged."""
        dtype = _DTYPES.get(code)
        possible = len(shape) <= 2 and all(0 <= length < 2**31 for length in shape)
        _require(dtype is not None and possible, "an array of no kind")
        assert dtype is not None
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if is_large:
            data = next(self._large, None)
            _require(data is not None and len(data) == size, "an array that does not fill its frame")
            assert data is not None
        else:
            data = self._block[self._at : self._at + size]
            self._at += _padded(size)
            _require(len(data) == size and self._at <= len(self._block), "an array beyond its frame")
        found: Array = np.ascontiguousarray(data).view(dtype).reshape(shape)
        return found

    def end(self) -> None:
        """Raises RecordDamaged where something was left."""
        _require(self._at == len(self._block) and next(self._large, None) is None, "more bytes than arrays")


def _bytes(array: Array) -> Array:
    """The memory of ``array`` as uint8 ``[B]``."""
    return np.frombuffer(np.ascontiguousarray(array).data.cast("B") if array.size else b"", np.uint8)


def _padded(size: int) -> int:
    return size + -size % 8


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RecordDamaged(otherwise)


def _name(model: str, shard: int, shards: int = 2**31) -> ShardName:
    _require(0 < len(model) <= MAX_NAME and 0 <= shard < shards, f"no shard {shard} of {model[:MAX_NAME]!r}")
    return model, shard


def _token(found: tuple[int, int] | None) -> Token | None:
    return None if found is None else Token(_natural(found[0]), _natural(found[1]))


def _vector(plain: Vector) -> Mapping[int, int]:
    found = dict(plain)
    if found:
        _require(min(found) > 0 and max(found) < 2**32, "a writer is not in [1, 2^32)")
        _natural(min(found.values()))
        _natural(max(found.values()))
    return found


def _natural(number: int) -> int:
    _require(0 <= number < MAX_TIME, f"{number} is not in [0, 2^63)")
    return number
