"""A host: columns, no labels. It sums encrypted gradients, and splits by what only it knows."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from federated.vertical.boosting.candidates import Candidates, candidates_of
from federated.vertical.boosting.messages import (
    ALL,
    CHILDREN,
    GRADIENTS,
    KEY,
    KEY_FIELDS,
    LEFT_ALONE,
    MOST_CANDIDATES,
    NOTHING,
    OFFER,
    SIDES,
    SPLITS,
    SUMS,
    WITHHELD,
    YOURS,
    child_fields,
    gradient_fields,
    pieces,
    split_fields,
)
from federated.vertical.boosting.model import HostModel
from federated.vertical.boosting.options import BoostingOptions
from federated.vertical.boosting.trees import Splits
from federated.vertical.histograms.bins import Codes, encode, fit_edges
from federated.vertical.histograms.lanes import ENCRYPTION, SLOTS, Bools, Ints, Lanes
from federated.vertical.histograms.sealed import SumTask, masked_sums, permutation, read_key, sum_tasks
from federated.vertical.kinds import Setup
from federated.vertical.parties import (
    Checkpoint,
    Draw,
    Effect,
    Incoming,
    Make,
    PartResult,
    PeerFault,
    Progress,
    Role,
    Send,
    receive,
)
from federated.vertical.wire import pack, unpack


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the level: its rows (rising), and which candidates may split it, bool [M]."""

    rows: Ints
    allowed: Bools


@dataclass(frozen=True, slots=True)
class Asked:
    """What the guest fixed in the beginning."""

    public: bytes
    lanes: int
    least: int


def make_host(options: BoostingOptions, setup: Setup, draw: Draw = os.urandom) -> Make:
    """The function that makes a host's role. Raises ValueError for a table that does not fit."""
    table = setup.table
    if table is None:
        raise ValueError("a host needs a table")
    edges = fit_edges(table.features, options.bins, options.least_rows)
    codes = encode(table.features, edges)
    candidates = candidates_of(codes, edges, options.least_rows)
    if len(candidates) > MOST_CANDIDATES:
        raise ValueError(f"{len(candidates)} ways to split, at most {MOST_CANDIDATES}: take fewer bins")

    def make(state: bytes | None) -> Role[PartResult]:
        if state is None:
            names = permutation(len(table.names), draw)
            model = HostModel(Splits(), names, table.names, 0)
        else:
            model = HostModel.read(state)
        return _Host(options, setup, draw, edges, codes, candidates, model).run()

    return make


@dataclass(slots=True)
class _Host:
    options: BoostingOptions
    setup: Setup
    draw: Draw
    edges: Sequence[npt.NDArray[np.float64]]
    codes: Codes
    candidates: Candidates
    model: HostModel

    def run(self) -> Role[PartResult]:
        guest = self.setup.one("guest")
        asked = yield from self._begin(guest)
        for tree in range(self.model.trees, self.options.trees):
            # A new order for each tree: what a place stood for in one tells nothing in the next.
            order = permutation(len(self.candidates), self.draw)
            if len(order):
                # Without candidates there is nothing to ask here, and the guest does not.
                yield from self._grow(guest, asked, order)
            self.model.trees = tree + 1
            yield Checkpoint(tree, self.model.dump())
            yield Progress(tree + 1, self.options.trees, "trees")
        assert self.setup.table is not None
        own = Counter(self.setup.table.names[one] for one in self.model.splits.feature)
        figures: dict[str, float | int | str] = {
            "encryption": ENCRYPTION,
            "trees": self.model.trees,
            "splits": len(self.model.splits),
        }
        figures |= {f"splits by {name}": count for name, count in own.most_common(10)}
        return PartResult(figures, self.model.dump())

    def _begin(self, guest: str) -> Generator[Effect, Incoming | None, Asked]:
        fields = unpack((yield from receive(guest, KEY)), guest, KEY_FIELDS)
        read_key(fields["public"], guest)
        if fields["rows"] != len(self.codes):
            raise PeerFault(guest, "rows", f"says {fields['rows']} rows, here are {len(self.codes)}")
        if fields["least"] != self.options.least_rows:
            raise PeerFault(guest, "options", f"least_rows is {fields['least']} there")
        columns = len(self.edges)
        yield Send(guest, OFFER, pack({"candidates": len(self.candidates), "columns": columns}))
        return Asked(fields["public"], fields["lanes"], fields["least"])

    def _grow(self, guest: str, asked: Asked, order: Ints) -> Generator[Effect, Incoming | None, None]:
        candidates = self.candidates.take(order)
        rows = np.arange(len(self.codes))
        # Pairs of a node whose sums are asked, and its sibling, which the guest finds by subtraction.
        pairs: list[tuple[Ints, Ints | None]] = [(rows, None)]
        first_asked = [True]
        for depth in range(self.options.depth):
            level = yield from self._answer(guest, asked, candidates, pairs, first_asked)
            fields = unpack((yield from receive(guest, SPLITS)), guest, split_fields(len(level)))
            owner = fields["owner"]
            sides = self._sides(guest, level, fields, candidates, order)
            mine = [sides[node] for node in sorted(sides)]
            yield Send(guest, SIDES, self._describe(mine))
            split = np.flatnonzero(owner != LEFT_ALONE).tolist()
            if not split or depth + 1 == self.options.depth:
                return
            lefts = yield from self._children(
                guest, level, split, {node: one[2] for node, one in sides.items()}
            )
            pairs, first_asked = [], []
            for node, left in zip(split, lefts, strict=True):
                one, other = level[node].rows[left], level[node].rows[~left]
                smaller_first = len(one) <= len(other)
                pairs.append((one, other) if smaller_first else (other, one))
                first_asked.append(smaller_first)

    def _answer(
        self,
        guest: str,
        asked: Asked,
        candidates: Candidates,
        pairs: Sequence[tuple[Ints, Ints | None]],
        first_asked: Sequence[bool],
    ) -> Generator[Effect, Incoming | None, list[Node]]:
        """Send the sums of each pair's first node; the nodes of the level, from left to right."""
        body = yield from receive(guest, GRADIENTS)
        fields = unpack(body, guest, gradient_fields(len(pairs)))
        blobs: list[bytes] = fields["cipher"]
        refs = np.full((len(pairs), len(candidates)), WITHHELD, np.int32)
        allowed = np.zeros((len(pairs), len(candidates)), np.uint8)
        tasks: list[SumTask] = []
        level: list[Node] = []
        at = 0
        for place, ((rows, sibling), copies) in enumerate(zip(pairs, fields["copies"].tolist(), strict=True)):
            if not 1 <= copies * asked.lanes <= SLOTS:
                raise PeerFault(guest, "copies", f"{copies} copies of {asked.lanes} lanes")
            lanes = Lanes(asked.lanes, copies)
            inputs = tuple(blobs[at : at + lanes.inputs(len(rows))])
            at += lanes.inputs(len(rows))
            if at > len(blobs):
                raise PeerFault(guest, "ciphertexts", "fewer than the rows need")
            nodes = [
                Node(one, self._allowed(candidates, one, asked.least))
                for one in (rows, sibling)
                if one is not None
            ]
            refs[place], chosen = self._refs(candidates, nodes)
            for bit, node in enumerate(nodes):
                allowed[place] |= node.allowed.astype(np.uint8) << bit
            tasks += self._tasks(asked, guest, inputs, lanes, candidates.take(chosen), rows)
            level += nodes if first_asked[place] else nodes[::-1]
        if at != len(blobs):
            raise PeerFault(guest, "ciphertexts", "more than the rows need")
        sums = [blob for found in self.setup.workers.map(masked_sums, tasks) for blob in found]
        yield Send(guest, SUMS, pack({"refs": refs, "allowed": allowed, "cipher": sums}))
        return level

    def _allowed(self, candidates: Candidates, rows: Ints, least: int) -> Bools:
        counts = candidates.count_left(self.codes[rows])
        found: Bools = (counts >= least) & (len(rows) - counts >= least)
        return found

    def _refs(self, candidates: Candidates, nodes: Sequence[Node]) -> tuple[npt.NDArray[np.int32], Ints]:
        """For the first of ``nodes``: where each candidate's sum stands, int32 [M], and which candidates are summed.

        Candidates of one column that send the same rows left have one sum: the guest would see equal numbers anyway.
        """
        rows = nodes[0].rows
        counts = candidates.count_left(self.codes[rows])
        missing = (self.codes[rows] < 0).sum(axis=0)
        # Within a column, sets by rising edges hold one another, so equally many are the same.
        with_missing = candidates.missing_left & (missing[candidates.feature] > 0)
        needed = np.logical_or.reduce([node.allowed for node in nodes])
        refs = np.full(len(candidates), WITHHELD, np.int32)
        refs[needed & (counts == 0)] = NOTHING
        refs[needed & (counts == len(rows))] = ALL
        summed = np.flatnonzero(needed & (counts > 0) & (counts < len(rows)))
        if not len(summed):
            return refs, summed
        keys = np.stack([candidates.feature, with_missing, counts], axis=1)[summed]
        _, first, which = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        # NumPy numbers them by column and edge; they go out in the order of the tree.
        rank = np.empty(len(first), np.int32)
        rank[np.argsort(first)] = np.arange(len(first), dtype=np.int32)
        refs[summed] = rank[which.reshape(-1)]
        return refs, summed[np.sort(first)]

    def _tasks(
        self,
        asked: Asked,
        guest: str,
        inputs: tuple[bytes, ...],
        lanes: Lanes,
        chosen: Candidates,
        rows: Ints,
    ) -> Iterator[SumTask]:
        codes = self.codes[rows]

        def left(some: slice) -> Bools:
            return chosen.take(np.arange(some.start, some.stop)).left(codes)

        return sum_tasks(asked.public, inputs, guest, lanes, len(rows), len(chosen), left, self.draw)

    def _sides(
        self, guest: str, level: Sequence[Node], fields: dict[str, Any], candidates: Candidates, order: Ints
    ) -> dict[int, tuple[int, int, Bools]]:
        """For each node that is split here: the new split's id, its opaque column, which rows go left."""
        owner, ties, best = fields["owner"], fields["ties"].tolist(), fields["best"]
        mine = np.flatnonzero(owner == YOURS).tolist()
        if (
            (owner > YOURS).any()
            or len(ties) != len(mine)
            or sum(ties) != len(best)
            or min(ties, default=1) < 1
        ):
            raise PeerFault(guest, "splits", "not as many candidates as nodes")
        found: dict[int, tuple[int, int, Bools]] = {}
        at = 0
        for node, count in zip(mine, ties, strict=True):
            tied = best[at : at + count]
            at += count
            if tied.min() < 0 or tied.max() >= len(order) or not level[node].allowed[tied].all():
                raise PeerFault(guest, "splits", "a candidate that is not offered for this node")
            # Of equal gains the first in this party's own order, whatever the order of the tree.
            place = tied[order[tied].argmin()]
            one = candidates.take(np.array([place]))
            feature, edge = int(one.feature[0]), int(one.edge[0])
            threshold = -np.inf if edge < 0 else float(self.edges[feature][edge])
            split = self.model.splits.add(feature, threshold, bool(one.missing_left[0]))
            found[node] = (split, int(self.model.opaque[feature]), one.left(self.codes[level[node].rows])[0])
        return found

    def _describe(self, mine: Sequence[tuple[int, int, Bools]]) -> bytes:
        lefts = [left for _, _, left in mine]
        return pack(
            {
                "split": np.array([split for split, _, _ in mine], np.int32),
                "column": np.array([column for _, column, _ in mine], np.int32),
                "left": np.packbits(np.concatenate(lefts)) if lefts else np.empty(0, np.uint8),
            }
        )

    def _children(
        self, guest: str, level: Sequence[Node], split: Sequence[int], mine: dict[int, Bools]
    ) -> Generator[Effect, Incoming | None, list[Bools]]:
        sizes = [len(level[node].rows) for node in split]
        fields = unpack((yield from receive(guest, CHILDREN)), guest, child_fields(sum(sizes)))
        lefts = pieces(fields["left"], sizes)
        for node, left in zip(split, lefts, strict=True):
            # A guest that made nodes of single rows would read each row's bins from their sums.
            if min(int(left.sum()), int((~left).sum())) < self.options.least_rows:
                raise PeerFault(guest, "least_rows", "a node of fewer rows than agreed")
            if node in mine and not np.array_equal(mine[node], left):
                raise PeerFault(guest, "children", "not the rows that this party's own split sends left")
        return lefts
