"""A host of joint binning: columns, no labels. It sums encrypted labels by its bins, in an order that only it knows."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from federated.vertical.binning.columns import Columns, cut_columns
from federated.vertical.binning.findings import host_findings
from federated.vertical.binning.messages import (
    EVENT_FIELDS,
    EVENTS,
    KEY,
    KEY_FIELDS,
    MOST_BINS_IN_ALL,
    MOST_ROUNDS,
    OFFER,
    SUMS,
    TOLD,
    part,
    told_fields,
)
from federated.vertical.binning.options import BinningOptions
from federated.vertical.binning.telling import Told
from federated.vertical.histograms.lanes import ENCRYPTION, SLOTS, Bools, Ints, Lanes
from federated.vertical.histograms.sealed import masked_sums, permutation, read_key, sum_tasks
from federated.vertical.kinds import Setup
from federated.vertical.parties import (
    Checkpoint,
    Draw,
    Make,
    PartResult,
    PeerFault,
    Progress,
    Role,
    Send,
    receive,
)
from federated.vertical.tables import MOST_COLUMNS, Table
from federated.vertical.wire import Arr, Expected, Int, pack, unpack

_STATE: Final[dict[str, Expected]] = {
    "done": Int(0, MOST_ROUNDS),
    "places": Arr("<i8", (None,), MOST_COLUMNS),
    "order": Arr("<i8", (None,), MOST_BINS_IN_ALL),
}


@dataclass(frozen=True, slots=True)
class Shown:
    """The secret order in which the guest meets columns and bins. ``places``: each column's number there, int64 [F].
    ``order``: for each of the M bins there, its place among this party's, int64 [M]: column by column, as numbered."""

    places: Ints
    order: Ints

    @staticmethod
    def drawn(columns: Columns, draw: Draw) -> Shown:
        """A new order of columns, and of each one's bins."""
        column, _ = columns.places()
        places, bins = permutation(len(columns.bins), draw), permutation(len(column), draw)
        return Shown(places, np.lexsort((bins, places[column])).astype(np.int64))

    def bins(self, columns: Columns) -> Ints:
        """How many bins each numbered column has: int64 [F]."""
        found = np.empty_like(columns.bins)
        found[self.places] = columns.bins
        return found


def make_host(options: BinningOptions, setup: Setup, draw: Draw = os.urandom) -> Make:
    """The function that makes a host's role. Raises ValueError for a table that does not fit."""
    table = setup.table
    if table is None:
        raise ValueError("a host needs a table")
    columns = cut_columns(table.features, options)
    if int(columns.bins.sum()) > MOST_BINS_IN_ALL:
        raise ValueError(
            f"{columns.bins.sum()} bins, at most {MOST_BINS_IN_ALL}: take fewer, or fewer columns"
        )

    def make(state: bytes | None) -> Role[PartResult]:
        if state is None:
            return _Host(options, setup, table, draw, columns, Shown.drawn(columns, draw)).run()
        kept = unpack(state, "this checkpoint", _STATE)
        shown = Shown(kept["places"], kept["order"])
        return _Host(options, setup, table, draw, columns, shown, kept["done"]).run()

    return make


@dataclass(slots=True)
class _Host:
    options: BinningOptions
    setup: Setup
    table: Table
    draw: Draw
    columns: Columns
    shown: Shown
    done: int = 0
    guest: str = field(init=False)

    def run(self) -> Role[PartResult]:
        self.guest = guest = self.setup.one("guest")
        key = unpack((yield from receive(guest, KEY)), guest, KEY_FIELDS)
        read_key(key["public"], guest)
        if key["rows"] != len(self.table):
            raise PeerFault(guest, "rows", f"says {key['rows']} rows, here are {len(self.table)}")
        if key["least"] != self.options.least_rows:
            raise PeerFault(guest, "options", f"least_rows is {key['least']} there")
        rows, bins = self.columns.rows()[self.shown.order], self.shown.bins(self.columns)
        yield Send(guest, OFFER, pack({"bins": bins, "rows": rows}))
        events = unpack((yield from receive(guest, EVENTS)), guest, EVENT_FIELDS)
        lanes = self._lanes(events, key["lanes"])
        count, rounds = len(rows), events["rounds"]
        for number in range(self.done, rounds):
            some = part(count, rounds, number)
            tasks = sum_tasks(
                key["public"],
                tuple(events["cipher"]),
                guest,
                lanes,
                len(self.table),
                some.stop - some.start,
                self._inside(self.shown.order[some]),
                self.draw,
            )
            sums = [blob for found in self.setup.workers.map(masked_sums, tasks) for blob in found]
            yield Send(guest, SUMS, pack({"cipher": sums}))
            yield Checkpoint(number, self._state(number + 1))
            yield Progress(number + 1, rounds, "rounds of bins")
        classes = 1 if key["lanes"] == 1 else key["lanes"] + 1
        told = self._told((yield from receive(guest, TOLD)), classes)
        findings = host_findings(self.table.names, self.columns, self.shown.places, told, self.setup.me)
        figures: dict[str, float | int | str] = {
            "columns": len(self.columns.bins),
            "bins": count,
            "columns kept": int(told.kept.sum()),
            "encryption": ENCRYPTION,
        }
        return PartResult(figures, findings)

    def _lanes(self, events: dict[str, Any], count: int) -> Lanes:
        if events["copies"] * count > SLOTS:
            raise PeerFault(self.guest, "copies", f"{events['copies']} copies of {count} lanes")
        lanes = Lanes(count, events["copies"])
        # Without bins there is nothing to sum here, and the guest sends nothing.
        needed = lanes.inputs(len(self.table)) if len(self.shown.order) else 0
        if len(events["cipher"]) != needed:
            raise PeerFault(self.guest, "ciphertexts", "not as many as the rows need")
        return lanes

    def _inside(self, bins: Ints) -> _Inside:
        column, code = (one[bins] for one in self.columns.places())
        return _Inside(self.columns.codes, column, code)

    def _state(self, done: int) -> bytes:
        return pack({"done": done, "places": self.shown.places, "order": self.shown.order})

    def _told(self, body: bytes, classes: int) -> Told:
        """What the guest tells, in this party's own order of columns and bins."""
        columns, bins = len(self.columns.bins), len(self.shown.order)
        fields = unpack(body, self.guest, told_fields(columns, bins, classes, self.options.tell))
        iv, woe = fields["iv"], np.empty_like(fields["woe"])
        if (iv < 0).any():
            raise PeerFault(self.guest, "told", "an information value below 0")
        if len(woe):
            woe[self.shown.order] = fields["woe"]
        return Told(iv[self.shown.places] if len(iv) else iv, woe, fields["kept"][self.shown.places])


@dataclass(frozen=True, slots=True)
class _Inside:
    """Which rows stand in each of some bins: bool [m, N]."""

    codes: npt.NDArray[np.int16]
    column: Ints
    code: Ints

    def __call__(self, some: slice) -> Bools:
        found: Bools = self.codes.T[self.column[some]] == self.code[some, None]
        return found
