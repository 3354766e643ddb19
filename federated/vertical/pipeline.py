"""A whole joint job as one role: align the rows, hold some out, train, and score what was held out.

    hosts, guest   alignment (PSI, or a comparison of digests where rows are aligned already)
    guest ► coord. ``align``: that the alignment has a checkpoint, or its end, where there is a coordinator
    guest ► all    ``rows``: how many rows are joint, and which positions are held out
    all            the kind's own role on the other rows
    hosts ► guest  ``partial``: each host's share of the answer for the held-out rows, as in joint inference

Labels of checkpoints: those of the alignment 0, 1, 2… whatever its own are (which grow with the tables, and a
coordinator, who takes no part, keeps empty ones at the same labels); ``ALIGNED`` when rows are aligned; the kind's own
label k as ``ALIGNED`` + 1 + k.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from federated.vertical.evaluation import measures
from federated.vertical.kinds import Kind, Setup
from federated.vertical.parties import (
    Checkpoint,
    Effect,
    Incoming,
    Make,
    PartResult,
    PeerFault,
    Role,
    Send,
    broadcast,
    gather,
    receive,
)
from federated.vertical.tables import MOST_ROWS, Table
from federated.vertical.wire import AnyArr, Arr, Bytes, Expected, Int, Text, pack, unpack

Figures = Mapping[str, float | int | str]
ALIGNED: Final = 2**20
LAST_LABEL: Final = 2**40
LEAST_ROWS: Final = 10
"""Joint rows without which there is no joint job."""
MOST_STATE: Final = 2**31
SEEN: Final = {
    "align": "that the alignment has come to one more checkpoint (about 16 in all), or to its end",
    "digest": "whether both tables list the same ids in the same order; nothing else",
    "rows": "how many rows are joint, and which positions of them are held out",
    "partial": "a host's share of the answer for held-out rows, as in joint inference",
}


@dataclass(frozen=True, slots=True)
class Alignment:
    """By ``kind`` (its PartResult has ``rows``) with ``options``; where kind is None rows are aligned already."""

    kind: Kind[Any] | None = None
    options: Any = None


@dataclass(frozen=True, slots=True)
class _Joint:
    """``rows``: positions in this party's table, in the joint order (empty at a party without a table). ``told``: the
    alignment's own figures."""

    count: int
    rows: npt.NDArray[np.int64]
    test: npt.NDArray[np.int64]
    told: Figures = field(default_factory=dict)

    def train(self) -> npt.NDArray[np.int64]:
        """Positions in the joint order that are trained on."""
        kept = np.ones(self.count, np.bool_)
        kept[self.test] = False
        return np.flatnonzero(kept).astype(np.int64)


_STATE: Final[dict[str, Expected]] = {
    "aligned": Int(0, 1),
    "steps": Int(0, ALIGNED),
    "count": Int(0, MOST_ROWS),
    "rows": Arr("<i8", (None,)),
    "test": Arr("<i8", (None,)),
    "told": Text(2**16),
    "inner": Bytes(MOST_STATE),
}


def joint(kind: Kind[Any], options: Any, setup: Setup, alignment: Alignment, test: float) -> Make:
    """The function that makes this party's role in the whole job. ``setup.table``: all of its rows.

    ``test``: the part of joint rows that is held out, [0, 1). Raises ValueError for what cannot be.
    """
    check_roles(kind, setup)
    if not kind.aligned:
        return kind.make(options, setup)
    if not 0.0 <= test < 1.0:
        raise ValueError(f"test is {test}, not within 0 and 1")

    def make(state: bytes | None) -> Role[PartResult]:
        return _role(kind, options, setup, alignment, test, state)

    return make


def check_roles(kind: Kind[Any], setup: Setup) -> None:
    """Raise ValueError where the parties are not those that ``kind`` needs."""
    for role in dict.fromkeys((*kind.roles, *setup.parties.values())):
        count, has = kind.roles.get(role), len(setup.named(role))
        if count is None:
            raise ValueError(f"{kind.name} has no {role}")
        if not count.least <= has <= count.most:
            raise ValueError(f"{kind.name} takes {count} as {role}, there are {has}")


def _role(
    kind: Kind[Any], options: Any, setup: Setup, alignment: Alignment, test: float, state: bytes | None
) -> Role[PartResult]:
    fields: dict[str, Any] = (
        {"aligned": 0, "steps": 0, "inner": b""}
        if state is None
        else unpack(state, "this checkpoint", _STATE)
    )
    inner: bytes | None = fields["inner"][1:] if fields["inner"] else None
    if fields["aligned"]:
        found = _Joint(fields["count"], fields["rows"], fields["test"], json.loads(fields["told"]))
    else:
        rows, told = yield from _align(setup, alignment, fields["steps"], inner)
        found = replace((yield from _hold_out(setup, rows, test)), told=told)
        inner = None
        yield Checkpoint(ALIGNED, _kept(found))
    seen = _seen(setup)
    table = None if seen is None else seen.take(found.rows)
    train = None if table is None else table.take(found.train())
    own = replace(setup, table=train, rows=found.count - len(found.test), rest=_rest(seen, found.rows))
    result = yield from _rewritten(kind.make(options, own)(inner), _shifted(found))
    result = replace(
        result,
        figures={**_sizes(seen, found), **result.figures},
        rows=found.rows if table is not None else None,
        test=found.test,
    )
    if kind.load is None or not len(found.test):
        return result
    return (yield from _score(kind, setup, table, found, result))


def _sizes(table: Table | None, found: _Joint) -> Figures:
    """How many rows and columns there are, and what the alignment told."""
    own = {} if table is None else {"own rows": len(table), "own columns": len(table.names)}
    aligned = {f"alignment: {name}": value for name, value in found.told.items()}
    return {**own, "joint rows": found.count, "held-out rows": len(found.test), **aligned}


def _align(
    setup: Setup, alignment: Alignment, steps: int, state: bytes | None
) -> Generator[Effect, Incoming | None, tuple[npt.NDArray[np.int64], Figures]]:
    """Positions of the joint rows, and the alignment's figures. ``steps``: how many of its checkpoints were before, the
    last of them with ``state``."""
    table, holders = setup.table, [name for name, role in setup.parties.items() if role != "coordinator"]
    if table is None:
        if alignment.kind is not None:
            yield from _look_on(setup.one("guest"), steps)
        return np.empty(0, np.int64), {}
    if alignment.kind is not None:
        parties = {name: setup.parties[name] for name in holders}
        role = alignment.kind.make(alignment.options, replace(setup, parties=parties))(state)
        told = setup.named("coordinator") if setup.me == setup.one("guest") else ()
        result = yield from _rewritten(role, _Numbering(steps, told))
        yield from broadcast(told, "align", pack({"more": 0}))
        if result.rows is None:
            raise ValueError(f"{alignment.kind.name} with these options aligns nothing at {setup.me}")
        return result.rows, result.figures
    guest = setup.one("guest")
    if setup.me == guest:
        hosts = [name for name in holders if name != guest]
        yield from broadcast(hosts, "digest", table.digest())
    else:
        digest = yield from receive(guest, "digest")
        if digest != table.digest():
            raise PeerFault(
                guest, "alignment", "its rows are not the same, or not in the same order, as here"
            )
    return np.arange(len(table), dtype=np.int64), {}


def _look_on(guest: str, steps: int) -> Generator[Effect, Incoming | None, None]:
    """A coordinator while the others align: a checkpoint wherever they have one."""
    while unpack((yield from receive(guest, "align")), guest, {"more": Int(0, 1)})["more"]:
        if steps >= ALIGNED:
            raise PeerFault(guest, "align", f"tells of more than {ALIGNED} checkpoints")
        steps += 1
        yield Checkpoint(steps - 1, _unaligned(steps, None))


def _hold_out(
    setup: Setup, rows: npt.NDArray[np.int64], test: float
) -> Generator[Effect, Incoming | None, _Joint]:
    guest = setup.one("guest")
    if setup.me == guest:
        assert setup.table is not None
        if len(rows) < LEAST_ROWS:
            raise ValueError(f"{len(rows)} rows are joint; fewer than {LEAST_ROWS} are no job")
        held = held_out(setup.table.take(rows), test, setup.seed)
        others = [name for name in setup.parties if name != guest]
        yield from broadcast(others, "rows", pack({"count": len(rows), "test": held}))
        return _Joint(len(rows), rows, held)
    body = yield from receive(guest, "rows")
    fields = unpack(body, guest, {"count": Int(LEAST_ROWS, MOST_ROWS), "test": Arr("<i8", (None,))})
    count, held = fields["count"], fields["test"]
    if setup.table is not None and count != len(rows):
        raise PeerFault(guest, "rows", f"says that {count} rows are joint, here {len(rows)} are")
    if len(held) and (held[0] < 0 or held[-1] >= count or (np.diff(held) <= 0).any()):
        raise PeerFault(guest, "rows", "held-out positions that are not rising within the joint rows")
    return _Joint(count, rows, held)


def _seen(setup: Setup) -> Table | None:
    """The table as the kind's own role sees it. Rows are held out by the whole one: the draw depends on all columns,
    and is to be the same for a job on some of them that were chosen without the rows that it holds out."""
    if setup.table is None or setup.columns is None:
        return setup.table
    return setup.table.only(setup.columns)


def held_out(table: Table, test: float, seed: int) -> npt.NDArray[np.int64]:
    """Positions to hold out, rising: the part ``test`` of each class where labels are few, of all rows else.

    The same for the same table and seed. The draw depends on the whole table, which nobody else knows, for the others
    hear the positions and know the seed: with the seed alone, places within a class tell which rows are of one class.
    """
    labels = np.zeros(len(table)) if table.labels is None else table.labels
    values = np.unique(labels)
    groups = [labels == value for value in values] if len(values) <= 20 else [np.ones(len(table), np.bool_)]
    secret = int.from_bytes(table.fingerprint(), "little")
    generator = np.random.default_rng([seed, 0x7E57, secret])
    chosen = [
        generator.permutation(np.flatnonzero(group))[: round(test * int(group.sum()))] for group in groups
    ]
    return np.sort(np.concatenate(chosen)).astype(np.int64)


def _kept(found: _Joint, inner: bytes | None = None) -> bytes:
    """A checkpoint's state once rows are aligned; ``inner``: of the kind's own role."""
    return _packed(1, 0, found, inner)


def _unaligned(steps: int, inner: bytes | None) -> bytes:
    """A checkpoint's state within the alignment."""
    nothing = np.empty(0, np.int64)
    return _packed(0, steps, _Joint(0, nothing, nothing), inner)


def _packed(aligned: int, steps: int, found: _Joint, inner: bytes | None) -> bytes:
    return pack(
        {
            "aligned": aligned,
            "steps": steps,
            "count": found.count,
            "rows": found.rows,
            "test": found.test,
            "told": json.dumps(dict(found.told), allow_nan=False),
            "inner": b"" if inner is None else b"\1" + inner,
        }
    )


Rewrite = Callable[[Checkpoint], Generator[Effect, Incoming | None, None]]


class _Numbering:
    """Checkpoints of the alignment in the whole job's sequence; each is announced to ``told``."""

    def __init__(self, steps: int, told: Sequence[str]) -> None:
        self._steps, self._told, self._before = steps, told, -1

    def __call__(self, effect: Checkpoint) -> Generator[Effect, Incoming | None, None]:
        if effect.label <= self._before or self._steps >= ALIGNED:
            raise ValueError(f"the alignment's checkpoint {effect.label} after {self._before}")
        self._before = effect.label
        self._steps += 1
        for name in self._told:
            yield Send(name, "align", pack({"more": 1}))
        yield Checkpoint(self._steps - 1, _unaligned(self._steps, effect.state))


def _shifted(found: _Joint) -> Rewrite:
    """The kind's own checkpoints behind those of the alignment, whose result is in them."""

    def rewrite(effect: Checkpoint) -> Generator[Effect, Incoming | None, None]:
        if not 0 <= effect.label < LAST_LABEL - ALIGNED - 1:
            raise ValueError(f"a checkpoint's label {effect.label}")
        yield Checkpoint(ALIGNED + 1 + effect.label, _kept(found, effect.state))

    return rewrite


def _rewritten(role: Role[PartResult], rewrite: Rewrite) -> Role[PartResult]:
    """``role`` with what ``rewrite`` makes of each of its checkpoints."""
    answer: Incoming | None = None
    while True:
        try:
            effect = role.send(answer)
        except StopIteration as end:
            result: PartResult = end.value
            return result
        if not isinstance(effect, Checkpoint):
            answer = yield effect
            continue
        yield from rewrite(effect)
        answer = None


def _rest(table: Table | None, rows: npt.NDArray[np.int64]) -> Table | None:
    """The rows of ``table`` that are not joint."""
    if table is None or len(rows) == len(table):
        return None
    left = np.ones(len(table), np.bool_)
    left[rows] = False
    return table.take(np.flatnonzero(left).astype(np.int64))


def _score(
    kind: Kind[Any], setup: Setup, table: Table | None, found: _Joint, result: PartResult
) -> Role[PartResult]:
    """Held-out rows by joint inference; at the guest with the measures."""
    if table is None:
        return result
    assert kind.load is not None
    if result.model is None:
        raise ValueError(f"{kind.name} gave {setup.me} no part of the model")
    part: Any = kind.load(result.model)
    rows = table.take(found.test)
    guest = setup.one("guest")
    if setup.me != guest:
        yield Send(guest, "partial", pack({"partial": part.partial(rows.features)}))
        return result
    bodies = yield from gather(setup.named("host"), "partial")
    partials = {
        name: unpack(body, name, {"partial": AnyArr(len(rows))})["partial"] for name, body in bodies.items()
    }
    scores = part.combine(rows.features, partials)
    figures = dict(result.figures)
    if rows.labels is not None:
        figures |= {f"test {name}": value for name, value in measures(rows.labels, scores).items()}
        alone = measures(rows.labels, part.alone(rows.features))
        figures |= {f"fallback {name}": value for name, value in alone.items()}
    return replace(result, figures=figures, scores=scores)
