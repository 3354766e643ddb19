"""The guest of joint binning: it has the labels and the key, and learns what each column tells of the labels.

guest ► hosts  key                 hosts ► guest  offer
guest ► hosts  events, encrypted
in each round                      hosts ► guest  sums (masked)
  a checkpoint after each
guest ► hosts  told
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from federated.vertical.binning.columns import cut_columns
from federated.vertical.binning.evidence import Evidence, entropy_bits, outcomes, weigh
from federated.vertical.binning.findings import guest_findings
from federated.vertical.binning.messages import (
    EVENTS,
    KEY,
    MOST_BINS_IN_ALL,
    MOST_ROUNDS,
    MOST_ROWS,
    OFFER,
    OFFER_FIELDS,
    SUMS,
    TOLD,
    part,
    sum_fields,
)
from federated.vertical.binning.options import BinningOptions
from federated.vertical.binning.plain import count_classes
from federated.vertical.binning.telling import check_told, tell, told_bits
from federated.vertical.evaluation import MOST_CLASSES, task_of
from federated.vertical.histograms.lanes import ENCRYPTION, Ints, Lanes, choose_lanes
from federated.vertical.histograms.sealed import OUTPUTS_A_TASK, KeyHolder
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
from federated.vertical.tables import MOST_COLUMNS, Table
from federated.vertical.wire import Arr, Expected, Int, Value, pack, unpack

_MOST_HOSTS: Final = 8
_STATE: Final[dict[str, Expected]] = {
    "done": Int(0, MOST_ROUNDS),
    "bins": Arr("<i8", (None,), _MOST_HOSTS * MOST_COLUMNS),
    "rows": Arr("<i8", (None,), _MOST_HOSTS * MOST_BINS_IN_ALL),
    "events": Arr("<i8", (None, None), _MOST_HOSTS * MOST_BINS_IN_ALL * MOST_CLASSES),
}


@dataclass(frozen=True, slots=True)
class Offer:
    """A host's columns, numbered: how many bins each has [F], how many rows each bin [M]."""

    bins: Ints
    rows: Ints


def make_guest(options: BinningOptions, setup: Setup) -> Make:
    """The function that makes the guest's role. Raises ValueError for a table or labels that do not fit."""
    table = setup.table
    if table is None or table.labels is None:
        raise ValueError("the guest needs a table with labels")
    labels = table.labels
    values = np.unique(labels)
    if len(values) < 2 or task_of(labels) == "number":
        raise ValueError(
            f"labels of binning are classes, 2 to {MOST_CLASSES} whole numbers; there are {len(values)} values"
        )
    if len(table) > MOST_ROWS:
        raise ValueError(f"{len(table)} rows, at most {MOST_ROWS}")

    def make(state: bytes | None) -> Role[PartResult]:
        kept = None if state is None else unpack(state, "this checkpoint", _STATE)
        return _Guest(options, setup, table, labels, values).run(kept)

    return make


@dataclass(slots=True)
class _Guest:
    """``labels`` [N] have the classes ``values`` [C], rising."""

    options: BinningOptions
    setup: Setup
    table: Table
    labels: npt.NDArray[np.float64]
    values: npt.NDArray[np.float64]

    @property
    def hosts(self) -> tuple[str, ...]:
        return self.setup.named("host")

    @property
    def totals(self) -> Ints:
        """Rows of each class: [C]."""
        return np.unique(self.labels, return_counts=True)[1].astype(np.int64)

    def run(self, kept: dict[str, Any] | None) -> Role[PartResult]:
        key = KeyHolder()
        # The first class has what the others leave of a bin's rows, so it need not be sent.
        numbers = (self.labels[:, None] == self.values[1:]).astype(np.int64)
        offers = yield from self._begin(key, numbers.shape[1])
        bits = self._check_told(offers)
        lanes = choose_lanes(numbers.shape[1], len(self.table), tuple(len(one.rows) for one in offers))
        outputs = max(lanes.outputs(len(one.rows)) for one in offers)
        rounds = min(MOST_ROUNDS, max(1, -(-outputs // OUTPUTS_A_TASK)))
        cipher = key.encrypt(lanes.spread(numbers)) if outputs else []
        for host, offer in zip(self.hosts, offers, strict=True):
            sent = cipher if len(offer.rows) else []
            yield Send(host, EVENTS, pack({"rounds": rounds, "copies": lanes.copies, "cipher": sent}))
        done, events = self._resumed(kept, offers, rounds)
        for number in range(done, rounds):
            yield from self._round(key, lanes, offers, events, rounds, number)
            yield Checkpoint(number, self._state(number + 1, offers, events))
            yield Progress(number + 1, rounds, "rounds of bins")
        counts = [count_classes(self.table.features, self.labels, self.options)]
        for host, offer, sums in zip(self.hosts, offers, events, strict=True):
            counts.append(self._counts(host, offer, sums))
        found = [[weigh(one, self.options.smoothing) for one in columns] for columns in counts]
        chosen = choose_columns(found, self.options)
        classes = outcomes(self.totals).size
        for host, evidence, keeps in zip(self.hosts, found[1:], chosen[1:], strict=True):
            told = tell(evidence, keeps, classes, self.options)
            yield Send(host, TOLD, pack({"iv": told.iv, "woe": told.woe, "kept": told.kept}))
        cuts = cut_columns(self.table.features, self.options).cuts
        findings = guest_findings(self.table.names, cuts, self.hosts, self.values, counts, found, chosen)
        figures: dict[str, float | int | str] = {
            "rows": len(self.table),
            "columns": sum(len(one) for one in found),
            "columns kept": int(sum(one.sum() for one in chosen)),
            "encryption": ENCRYPTION,
            "bits the labels hold": round(entropy_bits(self.totals)),
        }
        figures |= {f"bits {host} is told, at most": round(one) for host, one in bits.items()}
        return PartResult(figures, findings)

    def _begin(self, key: KeyHolder, lanes: int) -> Generator[Effect, Incoming | None, list[Offer]]:
        told: dict[str, Value] = {
            "public": key.public,
            "rows": len(self.table),
            "lanes": lanes,
            "least": self.options.least_rows,
        }
        yield from broadcast(self.hosts, KEY, pack(told))
        bodies = yield from gather(self.hosts, OFFER)
        offers: list[Offer] = []
        for host, body in bodies.items():
            fields = unpack(body, host, OFFER_FIELDS)
            offers.append(Offer(fields["bins"], fields["rows"]))
            _check_offer(host, offers[-1], len(self.table), self.options.least_rows)
        return offers

    def _check_told(self, offers: Sequence[Offer]) -> dict[str, float]:
        """The bits that each host will be told at most. Raises ValueError where they could hold all labels."""
        held, classes = entropy_bits(self.totals), outcomes(self.totals).size
        bits = {
            host: told_bits(offer.rows, len(offer.bins), classes, self.options)
            for host, offer in zip(self.hosts, offers, strict=True)
        }
        for host, one in bits.items():
            check_told(host, one, held, self.options)
        return bits

    def _round(
        self,
        key: KeyHolder,
        lanes: Lanes,
        offers: Sequence[Offer],
        events: Sequence[Ints],
        rounds: int,
        number: int,
    ) -> Generator[Effect, Incoming | None, None]:
        """Put the round's sums into ``events`` [M, L] of each host."""
        bodies = yield from gather(self.hosts, SUMS)
        for (host, body), offer, known in zip(bodies.items(), offers, events, strict=True):
            some = part(len(offer.rows), rounds, number)
            count = some.stop - some.start
            blobs = unpack(body, host, sum_fields(lanes.outputs(count)))["cipher"]
            sums = lanes.collect(key.decrypt(blobs, host))[:count]
            most = np.minimum(self.totals[1:], offer.rows[some, None])
            if (sums < 0).any() or (sums > most).any() or (sums.sum(axis=1) > offer.rows[some]).any():
                raise PeerFault(host, "sums", "more rows of a class than there are, or fewer than none")
            known[some] = sums

    def _counts(self, host: str, offer: Offer, events: Ints) -> list[Ints]:
        """Rows of each class in each bin, by column: [B, C]. What was changed on the way does not add up."""
        counts = np.concatenate([offer.rows[:, None] - events.sum(axis=1, keepdims=True), events], axis=1)
        columns = np.split(counts, np.cumsum(offer.bins)[:-1]) if len(offer.bins) else []
        if any(not np.array_equal(one.sum(axis=0), self.totals) for one in columns):
            raise PeerFault(host, "sums", "the bins of a column do not add up to all rows of each class")
        return columns

    def _state(self, done: int, offers: Sequence[Offer], events: Sequence[Ints]) -> bytes:
        return pack(
            {
                "done": done,
                "bins": np.concatenate([one.bins for one in offers]),
                "rows": np.concatenate([one.rows for one in offers]),
                "events": np.concatenate(events),
            }
        )

    def _resumed(
        self, kept: dict[str, Any] | None, offers: Sequence[Offer], rounds: int
    ) -> tuple[int, list[Ints]]:
        """How many rounds are done, and the sums of each host so far: int64 [M, L]."""
        width = len(self.values) - 1
        if kept is None:
            return 0, [np.zeros((len(one.rows), width), np.int64) for one in offers]
        bins = np.concatenate([one.bins for one in offers])
        rows = np.concatenate([one.rows for one in offers])
        if not (np.array_equal(bins, kept["bins"]) and np.array_equal(rows, kept["rows"])):
            told = " or ".join(self.hosts)
            raise PeerFault(self.hosts[0], "offer", f"bins of {told} are not those of the checkpoint")
        ends = np.cumsum([len(one.rows) for one in offers])[:-1]
        return min(kept["done"], rounds), [one.copy() for one in np.split(kept["events"], ends)]


def choose_columns(
    found: Sequence[Sequence[Evidence]], options: BinningOptions
) -> list[npt.NDArray[np.bool_]]:
    """Which columns of each party are kept: of equal information the first party's first."""
    value = np.array([one.iv.max() for columns in found for one in columns])
    kept = value >= options.least_iv
    if options.select:
        kept[np.argsort(-value, kind="stable")[options.select :]] = False
    ends = np.cumsum([len(columns) for columns in found])[:-1]
    return list(np.split(kept, ends))


def _check_offer(host: str, offer: Offer, rows: int, least: int) -> None:
    """An offer is of all rows, in each column; no bin is smaller than agreed but one that is alone."""
    if (offer.bins < 1).any() or int(offer.bins.sum()) != len(offer.rows):
        raise PeerFault(host, "offer", "columns and bins that do not fit")
    if len(offer.bins) and (np.add.reduceat(offer.rows, np.cumsum(offer.bins) - offer.bins) != rows).any():
        raise PeerFault(host, "offer", "a column whose bins do not have all rows")
    if (offer.rows < min(least, rows)).any():
        raise PeerFault(host, "offer", "a bin of fewer rows than agreed")
