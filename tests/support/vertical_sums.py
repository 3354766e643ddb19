"""A small kind of joint job, for tests of what carries it: in each turn the guest adds up the hosts' sums."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from federated.vertical.kinds import Count, Kind, Setup
from federated.vertical.parties import (
    Checkpoint,
    Make,
    PartResult,
    PeerFault,
    Progress,
    Role,
    Send,
    gather,
    receive,
)
from federated.vertical.wire import Float, Int, pack, unpack


@dataclass(frozen=True, slots=True)
class SumsOptions:
    """``pause_s``: how long each turn takes at the guest; ``fails_at``: the turn at which the guest's role raises."""

    turns: int = 5
    pause_s: float = 0.0
    fails_at: int = -1


class SumsPart:
    """Rows' sums, at a host and at the guest."""

    def partial(self, rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """[N]."""
        return np.nansum(rows, axis=1)

    def combine(
        self, rows: npt.NDArray[np.float64], partials: Mapping[str, npt.NDArray[Any]]
    ) -> npt.NDArray[np.float64]:
        """[N]."""
        total = self.partial(rows)
        for name, one in partials.items():
            if one.shape != total.shape:
                raise PeerFault(name, "malformed", f"shape {one.shape}")
            total = total + one
        return total

    def alone(self, rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """[N]."""
        return self.partial(rows)


_STATE: Final = {"turn": Int(), "total": Float()}


def make_sums(options: SumsOptions, setup: Setup) -> Make:
    """A role of the sums."""

    def guest(state: bytes | None) -> Role[PartResult]:
        found = {"turn": 0, "total": 0.0} if state is None else unpack(state, "state", _STATE)
        total: float = found["total"]
        for turn in range(found["turn"], options.turns):
            if turn == options.fails_at:
                raise ValueError("the guest's role fails")
            bodies = yield from gather(setup.named("host"), "sum")
            for name, body in bodies.items():
                total += unpack(body, name, {"turn": Int(turn, turn), "sum": Float()})["sum"]
            for name in setup.named("host"):
                yield Send(name, "total", pack({"total": total}))
            time.sleep(options.pause_s)
            yield Progress(turn + 1, options.turns, "sums")
            yield Checkpoint(turn, pack({"turn": turn + 1, "total": total}))
        return PartResult({"total": total}, model=b"sums")

    def host(state: bytes | None) -> Role[PartResult]:
        found = {"turn": 0, "total": 0.0} if state is None else unpack(state, "state", _STATE)
        assert setup.table is not None
        own, total = float(np.nansum(setup.table.features)), found["total"]
        for turn in range(found["turn"], options.turns):
            yield Send(setup.one("guest"), "sum", pack({"turn": turn, "sum": own}))
            body = yield from receive(setup.one("guest"), "total")
            total = unpack(body, setup.one("guest"), {"total": Float()})["total"]
            yield Checkpoint(turn, pack({"turn": turn + 1, "total": total}))
        return PartResult({"total": total}, model=b"sums")

    return guest if setup.parties[setup.me] == "guest" else host


KIND: Final = Kind(
    "sums",
    "adds up what hosts have",
    {"guest": Count(1, 1), "host": Count(1, 8)},
    SumsOptions,
    make_sums,
    {"sum": "the sum of all of a host's features", "total": "the sum over all hosts"},
    load=lambda model: SumsPart(),
)
