"""Guest and host of a transfer. Both do the same, each under its own key and the other's (``sealed``).

    first        both ways   ``features``: how many the sender has; then ``keys``: a public key, and keys of rotations
    each step    both ways   ``matrix``, then ``masked``, then ``sums``
    each ``every`` steps     a checkpoint at both
    after each of ``gammas`` host ► guest   ``vectors`` of the quarter of rows that it was not trained on
    before the last training guest ► host   ``gamma``: which one

Labels of checkpoints: trial t is at t·(steps + 1), and at as much more as it has taken steps; the last training is one
more. A restart draws new keys; none is ever written down.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from federated.vertical.kinds import Setup
from federated.vertical.linear.solver import Scaling
from federated.vertical.parties import (
    Checkpoint,
    Draw,
    Effect,
    Incoming,
    PartResult,
    PeerFault,
    Progress,
    Role,
    Send,
    receive,
)
from federated.vertical.tables import MOST_COLUMNS, Table
from federated.vertical.transfer.model import GuestModel, HostModel, inputs_of
from federated.vertical.transfer.options import MOST_GAMMAS, TransferOptions
from federated.vertical.transfer.sealed import Owner, Plan, Weigher
from federated.vertical.transfer.sides import GuestSide, HostSide, first_weights
from federated.vertical.wire import Arr, Bytes, Expected, Int, pack, unpack
from models.metrics import auc

Values = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

PART: Final = 4
"""One in so many common rows is what ``gammas`` are chosen by."""
_STATE: Final[dict[str, Expected]] = {
    "trial": Int(0, MOST_GAMMAS),
    "reached": Arr("<f8", (None,), MOST_GAMMAS),
    "side": Bytes(2**31),
}


def drawn_seed(draw: Draw) -> int:
    """A seed of initial weights."""
    return int.from_bytes(draw(8), "little")


def own_table(setup: Setup) -> Table:
    """The party's common rows, fit for this job. Raises ValueError."""
    table = setup.table
    if table is None or not table.names:
        raise ValueError(f"{setup.me} has no features")
    check_rows(len(table), len(table.names))
    if setup.parties[setup.me] == "guest":
        if table.labels is None:
            raise ValueError(f"{setup.me} is the guest and has no labels")
        if len(np.unique(all_labels(setup))) != 2:
            raise ValueError("labels of a transfer are of two values")
    return table


def check_trials(options: TransferOptions, setup: Setup) -> None:
    """Raise ValueError where ``gammas`` cannot be tried on the common rows."""
    if not options.gammas:
        return
    kept, asked = _parts(setup)
    table = own_table(setup)
    check_rows(len(kept), len(table.names))
    if table.labels is not None and len(np.unique(table.labels[asked])) != 2:
        raise ValueError(f"the {len(asked)} common rows that gammas would be chosen by are of one class")


def check_rows(rows: int, features: int) -> None:
    """Raise ValueError for so few common rows that a gradient's sums would tell of each."""
    if rows <= features + 1:
        raise ValueError(
            f"{rows} common rows with {features} features: a gradient would tell all labels; it takes more than "
            f"{features + 1} rows"
        )


def all_labels(setup: Setup) -> Values:
    """Labels of the common rows, then of the guest's others, [N]."""
    parts = [one.labels for one in (setup.table, setup.rest) if one is not None and one.labels is not None]
    return np.concatenate(parts)


def guest_side(options: TransferOptions, setup: Setup, seed: int) -> tuple[Scaling, GuestSide]:
    """From all of the guest's rows, the common ones first."""
    scaling, features = _features(options, setup, rest=True)
    labels = all_labels(setup)
    signs = np.where(labels == labels.max(), 1.0, -1.0)
    table = own_table(setup)
    weights = first_weights(len(table.names), options, seed)
    return scaling, GuestSide(features, len(table), weights, options, labels=signs)


def host_side(options: TransferOptions, setup: Setup, seed: int) -> tuple[Scaling, HostSide]:
    """From the common rows; the others are good for scaling."""
    scaling, features = _features(options, setup, rest=False)
    weights = first_weights(len(own_table(setup).names), options, seed)
    return scaling, HostSide(features, len(features), weights, options)


def guest(
    options: TransferOptions, setup: Setup, state: bytes | None, draw: Draw = os.urandom
) -> Role[PartResult]:
    """The party with the labels."""
    peer, course = setup.one("host"), _Course.of(state)
    parts = _parts(setup)
    while course.trial < len(options.gammas):
        given = replace(options, gamma=options.gammas[course.trial])
        scaling, side = guest_side(given, _taken(setup, parts[0]), drawn_seed(draw))
        yield from _train(side, peer, course, draw)
        asked = _taken(setup, parts[1]).table
        assert asked is not None
        assert asked.labels is not None
        shown = unpack(
            (yield from receive(peer, "vectors")),
            peer,
            {"vectors": Arr("<f8", (len(asked), options.hidden))},
        )
        model = GuestModel(scaling, side.weights, side.phi(), peer)
        scores = model.combine(asked.features, {peer: shown["vectors"]})
        reached = auc((asked.labels == all_labels(setup).max()).astype(np.float64), scores)
        yield from course.ended(options, reached)
    if options.gammas:
        place = int(np.argmax(course.reached))
        yield Send(peer, "gamma", pack({"place": place}))
        options = replace(options, gamma=options.gammas[place])
    scaling, side = guest_side(options, setup, drawn_seed(draw))
    figures = yield from _train(side, peer, course, draw)
    model = GuestModel(scaling, side.weights, side.phi(), peer)
    return PartResult(figures, model.dump())


def host(
    options: TransferOptions, setup: Setup, state: bytes | None, draw: Draw = os.urandom
) -> Role[PartResult]:
    """The party whose customers are to be scored."""
    peer, course = setup.one("guest"), _Course.of(state)
    parts = _parts(setup)
    while course.trial < len(options.gammas):
        given = replace(options, gamma=options.gammas[course.trial])
        scaling, side = host_side(given, _taken(setup, parts[0]), drawn_seed(draw))
        yield from _train(side, peer, course, draw)
        asked = _taken(setup, parts[1]).table
        assert asked is not None
        shown = HostModel(scaling, side.weights).partial(asked.features)
        yield Send(peer, "vectors", pack({"vectors": shown}))
        yield from course.ended(options, 0.0)
    if options.gammas:
        body = yield from receive(peer, "gamma")
        place: int = unpack(body, peer, {"place": Int(0, len(options.gammas) - 1)})["place"]
        options = replace(options, gamma=options.gammas[place])
    scaling, side = host_side(options, setup, drawn_seed(draw))
    figures = yield from _train(side, peer, course, draw)
    return PartResult(figures, HostModel(scaling, side.weights).dump())


@dataclass(slots=True)
class _Course:
    """Where a party is in its trainings. ``reached``: AUC of each trial that is over, at the guest. ``side``: the state
    of the training that is under way, empty where it has not begun."""

    trial: int = 0
    reached: list[float] = field(default_factory=list)
    side: bytes = b""

    @classmethod
    def of(cls, state: bytes | None) -> _Course:
        """Raises PeerFault (of ``this checkpoint``)."""
        if state is None:
            return cls()
        fields = unpack(state, "this checkpoint", _STATE)
        return cls(fields["trial"], fields["reached"].tolist(), fields["side"])

    def label(self, options: TransferOptions, step: int) -> int:
        return self.trial * (options.steps + 1) + step

    def state(self, side: bytes) -> bytes:
        return pack({"trial": self.trial, "reached": np.array(self.reached, np.float64), "side": side})

    def ended(self, options: TransferOptions, reached: float) -> Generator[Effect, Incoming | None, None]:
        """A trial is over."""
        self.trial, self.side = self.trial + 1, b""
        self.reached.append(reached)
        yield Checkpoint(self.label(options, 0), self.state(b""))


def _parts(setup: Setup) -> tuple[Integers, Integers]:
    """Common rows to train on in trials, and to choose by: the same at both parties, by what both know."""
    order = np.random.default_rng([setup.seed, setup.rows]).permutation(setup.rows).astype(np.int64)
    asked, kept = np.split(order, [setup.rows // PART])
    return np.sort(kept), np.sort(asked)


def _taken(setup: Setup, rows: Integers) -> Setup:
    assert setup.table is not None
    return replace(setup, table=setup.table.take(rows), rows=len(rows))


def _train(
    side: GuestSide | HostSide, peer: str, course: _Course, draw: Draw
) -> Generator[Effect, Incoming | None, dict[str, float | int | str]]:
    """All steps that are left; figures to show."""
    if course.side:
        side.restore(course.side)
    options, features = side.options, len(side.weights) - 1
    own = Plan(options, side.common, features)
    if side.step < options.steps:
        yield Send(peer, "features", pack({"features": features}))
        body = yield from receive(peer, "features")
        count: int = unpack(body, peer, {"features": Int(1, MOST_COLUMNS)})["features"]
        try:
            check_rows(side.common, count)
            owner = Owner(Plan(options, side.common, count), peer, draw)
        except ValueError as error:
            raise PeerFault(peer, "features", str(error)) from None
        yield Send(peer, "keys", owner.keys())
        weigher = Weigher(own, (yield from receive(peer, "keys")), peer, draw)
    while side.step < options.steps:
        yield Send(peer, "matrix", owner.sealed(side.message()))
        weights, near = side.needs()
        masked, mask = weigher.hidden((yield from receive(peer, "matrix")), weights)
        yield Send(peer, "masked", masked)
        yield Send(peer, "sums", owner.answer((yield from receive(peer, "masked"))))
        sums = weigher.sums((yield from receive(peer, "sums")), mask)
        side.move((sums + near) / side.common)
        whole = (len(options.gammas) + 1) * options.steps
        yield Progress(course.trial * options.steps + side.step, whole, "steps")
        if side.step % options.every == 0 or side.step == options.steps:
            yield Checkpoint(course.label(options, side.step), course.state(side.state()))
    return _figures(side, own)


def _features(options: TransferOptions, setup: Setup, rest: bool) -> tuple[Scaling, Values]:
    table = own_table(setup)
    parts = [table.features] + ([] if setup.rest is None else [setup.rest.features])
    scaling = Scaling.of(np.vstack(parts), options.clip)
    return scaling, inputs_of(scaling, np.vstack(parts) if rest else table.features)


def _figures(side: GuestSide | HostSide, plan: Plan) -> dict[str, float | int | str]:
    found: dict[str, float | int | str] = {
        "steps": side.step,
        "gamma": side.options.gamma,
        "common rows": side.common,
        "rows learned from": len(side.features),
    }
    return found | {
        "protection": "CKKS, each party's own key; masks uniform over the modulus; labels of common rows are not safe "
        "from a host that solves its gradients",
        "sums a common row": round(side.options.steps * side.weights.size / side.common, 1),
        "noise_over_error": round(plan.flooding, 1),
    }
