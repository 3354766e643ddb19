"""The guest: it has the labels, the key, and columns of its own. It grows the trees.

    guest ► hosts  key            hosts ► guest  offer
    for each tree, for each level of it:
      guest ► hosts  gradients of the level's smaller children, encrypted    hosts ► guest  sums (masked)
      guest          sums of its own columns; those of siblings by subtraction; each node's best split
      guest ► hosts  splits                                                  hosts ► guest  sides of their own splits
      guest ► hosts  children, but after the last level
    a checkpoint after each tree

A level's nodes are known to all as lists of rows, from left to right. Gradients are encrypted anew for the rows of
each smaller child alone: that is cheaper than multiplying all rows by zero, and every ciphertext is used for one node.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from federated.vertical.boosting.candidates import Candidates, candidates_of
from federated.vertical.boosting.messages import (
    CHILDREN,
    GRADIENTS,
    KEY,
    LEFT_ALONE,
    MOST_ROWS,
    NOTHING,
    OFFER,
    OFFER_FIELDS,
    OTHERS,
    SIDES,
    SPLITS,
    SUMS,
    WITHHELD,
    YOURS,
    pieces,
    side_fields,
    sum_fields,
)
from federated.vertical.boosting.model import GuestModel
from federated.vertical.boosting.objective import Whole, fit_objective, gains, leaf_value, whole
from federated.vertical.boosting.options import BoostingOptions
from federated.vertical.boosting.plain import boost
from federated.vertical.boosting.trees import LEAF, Splits, Tree
from federated.vertical.histograms.bins import Codes, encode, fit_edges
from federated.vertical.histograms.lanes import (
    ENCRYPTION,
    HALF,
    MOST_LANES,
    Bools,
    Ints,
    Lanes,
    choose_lanes,
)
from federated.vertical.histograms.sealed import KeyHolder
from federated.vertical.kinds import Setup
from federated.vertical.parties import (
    Checkpoint,
    Effect,
    Incoming,
    Make,
    PartResult,
    PeerFault,
    Progress,
    Role,
    Send,
    broadcast,
    gather,
)
from federated.vertical.tables import Table
from federated.vertical.wire import Arr, Bytes, Expected, Value, pack, unpack

GUEST: Final = 0
"""The guest's place among owners of splits; hosts follow in the job's order."""
MOST_STATE: Final = 2**31
_STATE: Final[dict[str, Expected]] = {
    "model": Bytes(MOST_STATE),
    "scores": Arr("<f8", (None, None), MOST_ROWS * MOST_LANES),
}

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sums:
    """One party's candidates at a node: ``left`` int64 [M, L] and whether each may be taken, bool [M]. What may not be
    taken may have any sums."""

    left: Ints
    allowed: Bools


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the level: its number in the tree, rows, sums over all of them [L], candidates' sums by party."""

    number: int
    rows: Ints
    total: Ints
    parties: tuple[Sums, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two children of ``parent`` (the root alone where it is None). Hosts are asked for ``asked``."""

    asked: tuple[int, Ints]
    sibling: tuple[int, Ints] | None
    parent: Node | None
    asked_is_left: bool


@dataclass(frozen=True, slots=True)
class Best:
    """A node's split: whose, the candidates of that gain (the first in the party's order is meant), and the gain."""

    owner: int
    tied: Ints
    gain: float


def make_guest(options: BoostingOptions, setup: Setup) -> Make:
    """The function that makes the guest's role. Raises ValueError for a table or labels that do not fit."""
    table = setup.table
    if table is None or table.labels is None:
        raise ValueError("the guest needs a table with labels")
    if not len(table):
        raise ValueError("the guest's table has no rows")
    if len(table) > MOST_ROWS:
        raise ValueError(f"{len(table)} rows, at most {MOST_ROWS}")
    if len(table) < 2 * options.least_rows:
        raise ValueError(
            f"{len(table)} rows allow no split with {options.least_rows} rows on each side; take lower least_rows"
        )
    objective, targets = fit_objective(table.labels, options.loss)
    edges = fit_edges(table.features, options.bins, options.least_rows)
    codes = encode(table.features, edges)
    candidates = candidates_of(codes, edges, options.least_rows)
    hosts = setup.named("host")

    def make(state: bytes | None) -> Role[PartResult]:
        if state is None:
            columns: tuple[list[int], ...] = tuple([] for _ in hosts)
            model = GuestModel(objective, table.names, hosts, Splits(), columns, [])
            scores = np.tile(objective.base, (len(table), 1))
        else:
            fields = unpack(state, "this checkpoint", _STATE)
            model, scores = GuestModel.read(fields["model"]), fields["scores"]
        return _Guest(options, setup, table, targets, edges, codes, candidates, model, scores).run()

    return make


@dataclass(slots=True)
class _Guest:
    options: BoostingOptions
    setup: Setup
    table: Table
    targets: Floats
    edges: Sequence[Floats]
    codes: Codes
    candidates: Candidates
    model: GuestModel
    scores: Floats

    @property
    def hosts(self) -> tuple[str, ...]:
        return self.model.hosts

    def run(self) -> Role[PartResult]:
        objective = self.model.objective
        key = KeyHolder()
        offers, columns = yield from self._begin(key)
        for number in range(len(self.model.trees), self.options.trees):
            numbers = whole(objective.derivatives(self.scores, self.targets), HALF)
            tree, leaf = yield from self._grow(key, offers, columns, numbers)
            self.model.trees.append(tree)
            self.scores = self.scores + np.array(tree.value)[leaf]
            yield Checkpoint(number, pack({"model": self.model.dump(), "scores": self.scores}))
            yield Progress(number + 1, self.options.trees, "trees")
        assert self.table.labels is not None
        options = self.options
        self.model.own = boost(
            self.table.features,
            self.table.labels,
            trees=options.trees,
            depth=options.depth,
            bins=options.bins,
            rule=options.rule,
            loss=objective.loss,
        )
        scores = objective.answer(self.scores)
        rows = np.arange(len(self.table), dtype=np.int64)
        return PartResult(self._figures(), self.model.dump(), rows, scores)

    def _figures(self) -> dict[str, float | int | str]:
        figures: dict[str, float | int | str] = {
            "encryption": ENCRYPTION,
            "trees": len(self.model.trees),
            "loss": self.model.objective.loss,
        }
        for party, (gain, count) in self.model.importance_by_party().items():
            figures |= {f"splits of {party}": count, f"gain of {party}": gain}
        for name, (gain, _) in list(self.model.importance().items())[:10]:
            figures[f"gain by {name}"] = gain
        return figures

    def _begin(self, key: KeyHolder) -> Generator[Effect, Incoming | None, tuple[list[int], list[int]]]:
        """How many candidates, and how many columns, each host has."""
        lanes = 2 * self.model.objective.outputs
        told: dict[str, Value] = {
            "public": key.public,
            "rows": len(self.table),
            "lanes": lanes,
            "least": self.options.least_rows,
        }
        yield from broadcast(self.hosts, KEY, pack(told))
        bodies = yield from gather(self.hosts, OFFER)
        offers = [unpack(body, host, OFFER_FIELDS) for host, body in bodies.items()]
        return [one["candidates"] for one in offers], [one["columns"] for one in offers]

    def _grow(
        self, key: KeyHolder, offers: Sequence[int], columns: Sequence[int], numbers: Whole
    ) -> Generator[Effect, Incoming | None, tuple[Tree, Ints]]:
        """A tree, and the leaf [N] in which each row ends."""
        rows, lanes = numbers.values.shape
        tree, leaf = Tree(lanes // 2), np.zeros(rows, np.int64)
        pairs = [Pair((tree.add(), np.arange(rows)), None, None, True)]
        for depth in range(self.options.depth):
            level = yield from self._ask(key, offers, pairs, numbers)
            best = [self._best(node, numbers) for node in level]
            lefts = yield from self._split(level, best, columns, numbers)
            if not lefts:
                break
            pairs = []
            for place, (split, left) in lefts.items():
                node, chosen = level[place], best[place]
                assert chosen is not None
                one, other = tree.divide(node.number, chosen.owner, split, chosen.gain)
                leaf[node.rows[left]], leaf[node.rows[~left]] = one, other
                children = (one, node.rows[left]), (other, node.rows[~left])
                smaller_is_left = len(children[0][1]) <= len(children[1][1])
                asked, sibling = children if smaller_is_left else children[::-1]
                pairs.append(Pair(asked, sibling, node, smaller_is_left))
            if depth + 1 < self.options.depth:
                bits = np.packbits(np.concatenate([left for _, left in lefts.values()]))
                yield from broadcast(self._active(offers), CHILDREN, pack({"left": bits}))
        for number in range(len(tree)):
            if tree.owner[number] == LEAF:
                total = numbers.values[leaf == number].sum(axis=0)
                tree.value[number] = leaf_value(total, numbers.scale, self.options.rule)
        return tree, leaf

    def _ask(
        self, key: KeyHolder, offers: Sequence[int], pairs: Sequence[Pair], numbers: Whole
    ) -> Generator[Effect, Incoming | None, list[Node]]:
        """Sums of all parties' candidates at the level's nodes, from left to right."""
        lanes = numbers.values.shape[1]
        plans: list[Lanes] = []
        blobs: list[bytes] = []
        for pair in pairs:
            _, rows = pair.asked
            plans.append(choose_lanes(lanes, len(rows), tuple(offers)))
            if any(offers):
                blobs += key.encrypt(plans[-1].spread(numbers.values[rows]))
        if any(offers):
            copies = np.array([plan.copies for plan in plans], np.int32)
            yield from broadcast(self._active(offers), GRADIENTS, pack({"copies": copies, "cipher": blobs}))
        bodies = yield from gather(self._active(offers), SUMS)
        asked: list[list[tuple[Sums, Bools]]] = []
        for host, offered in zip(self.hosts, offers, strict=True):
            if offered:
                asked.append(self._read_sums(key, host, bodies[host], offered, pairs, plans, numbers))
            else:
                nothing = Sums(np.zeros((0, lanes), np.int64), np.zeros(0, np.bool_))
                asked.append([(nothing, nothing.allowed)] * len(pairs))
        level: list[Node] = []
        for place, pair in enumerate(pairs):
            level += self._nodes(pair, [one[place] for one in asked], numbers)
        return level

    def _active(self, offers: Sequence[int]) -> list[str]:
        return [host for host, offered in zip(self.hosts, offers, strict=True) if offered]

    def _read_sums(
        self,
        key: KeyHolder,
        host: str,
        body: bytes,
        offered: int,
        pairs: Sequence[Pair],
        plans: Sequence[Lanes],
        numbers: Whole,
    ) -> list[tuple[Sums, Bools]]:
        """For each pair: the asked node's sums, and which candidates its sibling may take. Raises PeerFault."""
        fields = unpack(body, host, sum_fields(len(pairs), offered))
        found: list[tuple[Sums, Bools]] = []
        at = 0
        for pair, lanes, refs, bits in zip(pairs, plans, fields["refs"], fields["allowed"], strict=True):
            values = numbers.values[pair.asked[1]]
            count = int(refs.max(initial=NOTHING)) + 1
            if refs.min(initial=NOTHING) < WITHHELD or len(np.unique(refs[refs >= 0])) != count:
                raise PeerFault(host, "sums", "places that are not those of the sums")
            if (bits > (1 if pair.sibling is None else 3)).any() or ((bits > 0) & (refs == WITHHELD)).any():
                raise PeerFault(host, "sums", "candidates that are allowed without sums")
            blobs = fields["cipher"][at : at + lanes.outputs(count)]
            at += lanes.outputs(count)
            if len(blobs) != lanes.outputs(count):
                raise PeerFault(host, "sums", "fewer ciphertexts than sums")
            sums = lanes.collect(key.decrypt(blobs, host))[:count]
            _check_sums(host, sums, values)
            total = values.sum(axis=0)
            zeros = np.zeros_like(total)
            # From the end: WITHHELD, ALL, NOTHING.
            table = np.concatenate([sums, np.stack([zeros, total, zeros])])
            found.append((Sums(table[refs], (bits & 1) > 0), (bits & 2) > 0))
        if at != len(fields["cipher"]):
            raise PeerFault(host, "sums", "more ciphertexts than sums")
        return found

    def _nodes(self, pair: Pair, hosts: Sequence[tuple[Sums, Bools]], numbers: Whole) -> list[Node]:
        asked = self._node(pair.asked, [sums for sums, _ in hosts], numbers)
        if pair.sibling is None or pair.parent is None:
            return [asked]
        others: list[Sums] = []
        for name, before, (sums, allowed) in zip(self.hosts, pair.parent.parties[1:], hosts, strict=True):
            if (allowed & ~before.allowed).any():
                raise PeerFault(name, "sums", "a candidate that the parent could not take")
            others.append(Sums(before.left - sums.left, allowed))
        sibling = self._node(pair.sibling, others, numbers)
        return [asked, sibling] if pair.asked_is_left else [sibling, asked]

    def _node(self, child: tuple[int, Ints], hosts: Sequence[Sums], numbers: Whole) -> Node:
        number, rows = child
        values, codes = numbers.values[rows], self.codes[rows]
        counts, least = self.candidates.count_left(codes), self.options.least_rows
        own = Sums(self.candidates.sum_left(codes, values), (counts >= least) & (len(rows) - counts >= least))
        return Node(number, rows, values.sum(axis=0), (own, *hosts))

    def _best(self, node: Node, numbers: Whole) -> Best | None:
        """The split of the largest gain; of equal ones the first party's. None where no gain is enough."""
        rule = self.options.rule
        best: Best | None = None
        for owner, sums in enumerate(node.parties):
            if not sums.allowed.any():
                continue
            found = np.full(len(sums.allowed), -np.inf)
            found[sums.allowed] = gains(sums.left[sums.allowed], node.total, numbers.scale, rule.l2)
            gain = float(found.max())
            if gain >= rule.least_gain and (best is None or gain > best.gain):
                best = Best(owner, np.flatnonzero(found == gain), gain)
        return best

    def _split(
        self, level: Sequence[Node], best: Sequence[Best | None], columns: Sequence[int], numbers: Whole
    ) -> Generator[Effect, Incoming | None, dict[int, tuple[int, Bools]]]:
        """For each node (by place) that is split: its owner's id of the split, and which of its rows go left."""
        owners = np.array([-1 if one is None else one.owner for one in best])
        active = [host for place, host in enumerate(self.hosts, 1) if level[0].parties[place].allowed.size]
        for host in active:
            place = self.hosts.index(host) + 1
            mine = [one.tied for one in best if one is not None and one.owner == place]
            told = np.select([owners < 0, owners == place], [LEFT_ALONE, YOURS], OTHERS).astype(np.uint8)
            ties = np.array([len(one) for one in mine], np.int32)
            tied = np.concatenate([*mine, np.empty(0, np.int64)]).astype(np.int32)
            yield Send(host, SPLITS, pack({"owner": told, "ties": ties, "best": tied}))
        bodies = yield from gather(active, SIDES)
        found: dict[int, tuple[int, Bools]] = {}
        for node in np.flatnonzero(owners == GUEST).tolist():
            found[node] = self._own_split(level[node], best[node])
        for host, body in bodies.items():
            place = self.hosts.index(host)
            nodes = np.flatnonzero(owners == place + 1).tolist()
            sizes = [len(level[node].rows) for node in nodes]
            fields = unpack(body, host, side_fields(len(nodes), sum(sizes)))
            known = self.model.columns[place]
            for at, (node, left) in enumerate(zip(nodes, pieces(fields["left"], sizes), strict=True)):
                split, column = int(fields["split"][at]), int(fields["column"][at])
                if split != len(known) or not 0 <= column < columns[place]:
                    raise PeerFault(host, "sides", "not the next split's id, or a column that there is not")
                self._check_side(host, level[node], best[node], place + 1, left, numbers)
                known.append(column)
                found[node] = split, left
        return dict(sorted(found.items()))

    def _own_split(self, node: Node, best: Best | None) -> tuple[int, Bools]:
        assert best is not None
        one = self.candidates.take(best.tied[:1])
        feature, edge = int(one.feature[0]), int(one.edge[0])
        threshold = -np.inf if edge < 0 else float(self.edges[feature][edge])
        split = self.model.splits.add(feature, threshold, bool(one.missing_left[0]))
        return split, one.left(self.codes[node.rows])[0]

    def _check_side(
        self, host: str, node: Node, best: Best | None, place: int, left: Bools, numbers: Whole
    ) -> None:
        """A side must be one of those whose sums won: what was changed on the way, or made up, is not."""
        assert best is not None
        sums = numbers.values[node.rows[left]].sum(axis=0)
        if not (node.parties[place].left[best.tied] == sums).all(axis=1).any():
            raise PeerFault(host, "sides", "rows whose sums are not those that it sent for this split")
        if min(int(left.sum()), int((~left).sum())) < self.options.least_rows:
            raise PeerFault(host, "sides", "fewer rows on a side than agreed")


def _check_sums(host: str, sums: Ints, values: Any) -> None:
    """No subset of rows has sums beyond these. What was changed in a ciphertext decrypts to noise, mostly beyond."""
    most, least = np.maximum(values, 0).sum(axis=0), np.minimum(values, 0).sum(axis=0)
    if ((sums > most) | (sums < least)).any():
        raise PeerFault(host, "sums", "sums that no rows have")
