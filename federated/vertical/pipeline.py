"""A whole joint job as one role: align the rows, hold some out, train, and score what was held out.

    hosts, guest   alignment (PSI, or a comparison of digests where rows are aligned already)
    guest ► all    ``rows``: how many rows are joint, and which positions are held out
    all            the kind's own role on the other rows
    hosts ► guest  ``partial``: each host's share of the answer for the held-out rows, as in joint inference

Labels of checkpoints: the alignment's own label k as k, where there is no coordinator (who takes no part in it, and has
none of its checkpoints); ``ALIGNED`` when rows are aligned; the kind's own label k as ``ALIGNED`` + 1 + k.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
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
from federated.vertical.wire import AnyArr, Arr, Bytes, Expected, Int, pack, unpack

ALIGNED: Final = 2**20
LAST_LABEL: Final = 2**40
LEAST_ROWS: Final = 10
"""Joint rows without which there is no joint job."""
MOST_STATE: Final = 2**31
SEEN: Final = {
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
    """``rows``: positions in this party's table, in the joint order (empty at a party without a table)."""

    count: int
    rows: npt.NDArray[np.int64]
    test: npt.NDArray[np.int64]

    def train(self) -> npt.NDArray[np.int64]:
        """Positions in the joint order that are trained on."""
        kept = np.ones(self.count, np.bool_)
        kept[self.test] = False
        return np.flatnonzero(kept).astype(np.int64)


_STATE: Final[dict[str, Expected]] = {
    "aligned": Int(0, 1),
    "count": Int(0, MOST_ROWS),
    "rows": Arr("<i8", (None,)),
    "test": Arr("<i8", (None,)),
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
            raise ValueError(f"{kind.name} needs {count.least} to {count.most} of {role}, there are {has}")


def _role(
    kind: Kind[Any], options: Any, setup: Setup, alignment: Alignment, test: float, state: bytes | None
) -> Role[PartResult]:
    fields: dict[str, Any] = (
        {"aligned": 0, "inner": b""} if state is None else unpack(state, "this checkpoint", _STATE)
    )
    inner: bytes | None = fields["inner"][1:] if fields["inner"] else None
    if fields["aligned"]:
        found = _Joint(fields["count"], fields["rows"], fields["test"])
    else:
        rows = yield from _align(setup, alignment, inner)
        found = yield from _hold_out(setup, rows, test)
        inner = None
        yield Checkpoint(ALIGNED, _kept(found, None))
    table = None if setup.table is None else setup.table.take(found.rows)
    train = None if table is None else table.take(found.train())
    own = replace(setup, table=train, rows=found.count - len(found.test), rest=_rest(setup.table, found.rows))
    result = yield from _shifted(kind.make(options, own)(inner), found)
    result = replace(result, rows=found.rows if table is not None else None, test=found.test)
    if kind.load is None or not len(found.test):
        return result
    return (yield from _score(kind, setup, table, found, result))


def _align(
    setup: Setup, alignment: Alignment, state: bytes | None
) -> Generator[Effect, Incoming | None, npt.NDArray[np.int64]]:
    table, holders = setup.table, [name for name, role in setup.parties.items() if role != "coordinator"]
    if table is None:
        return np.empty(0, np.int64)
    if alignment.kind is not None:
        parties = {name: setup.parties[name] for name in holders}
        role = alignment.kind.make(alignment.options, replace(setup, parties=parties))(state)
        result = yield from _shifted(role, None if len(holders) < len(setup.parties) else _NOTHING)
        if result.rows is None:
            raise ValueError(f"{alignment.kind.name} with these options aligns nothing at {setup.me}")
        return result.rows
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
    return np.arange(len(table), dtype=np.int64)


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


_NOTHING: Final = _Joint(0, np.empty(0, np.int64), np.empty(0, np.int64))


def _kept(found: _Joint, inner: bytes | None) -> bytes:
    return pack(
        {
            "aligned": int(found is not _NOTHING),
            "count": found.count,
            "rows": found.rows,
            "test": found.test,
            "inner": b"" if inner is None else b"\1" + inner,
        }
    )


def _shifted(role: Role[PartResult], found: _Joint | None) -> Role[PartResult]:
    """A kind's own role, its checkpoints with the alignment in them; without any where ``found`` is None."""
    answer: Incoming | None = None
    while True:
        try:
            effect = role.send(answer)
        except StopIteration as end:
            result: PartResult = end.value
            return result
        if isinstance(effect, Checkpoint):
            if found is None:
                answer = None
                continue
            first, beyond = (0, ALIGNED) if found is _NOTHING else (ALIGNED + 1, LAST_LABEL)
            if not 0 <= effect.label < beyond - first:
                raise ValueError(f"a checkpoint's label {effect.label}")
            effect = Checkpoint(first + effect.label, _kept(found, effect.state))
        answer = yield effect


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
