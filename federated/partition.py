"""Which client holds which row: partitioners as pure functions of the labels and a generator.

Every partitioner is a partition (each row with exactly one client), leaves no client with fewer than ``least`` rows,
depends on its arguments alone, and takes a number of vectorised passes that does not depend on what was drawn: the
usual "draw anew until every client has enough" need not end, so too small clients are topped up by one rule instead
(``top_up``). Cut 2 million rows for 100,000 clients in about a second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
Labels = npt.NDArray[np.int64]

_FITTING_PASSES: Final = 20
_SMALLEST_PART: Final = 1e-12


class PartitionImpossible(ValueError):
    """There are too few rows, or too few of a class, for what was asked."""


@dataclass(frozen=True, slots=True)
class Partition:
    """The rows of C clients: those of client c are ``rows[offsets[c]:offsets[c + 1]]``.

    ``rows`` [N] is a permutation of the row numbers, ``offsets`` [C + 1] rises from 0 to N.
    """

    rows: Rows
    offsets: Rows

    @property
    def clients(self) -> int:
        """C."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Rows:
        """Rows of each client [C]."""
        return np.diff(self.offsets)

    def of(self, client: int) -> Rows:
        """The rows of one client."""
        return self.rows[self.offsets[client] : self.offsets[client + 1]]

    @classmethod
    def from_sizes(cls, rows: Rows, sizes: Rows) -> Self:
        """The first ``sizes[0]`` of ``rows`` to client 0, and so on."""
        return cls(rows, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))

    @classmethod
    def from_owners(cls, owners: Rows, clients: int) -> Self:
        """By the owner [N] of each row; each client's rows keep their order."""
        return cls.from_sizes(_grouped(owners, clients), np.bincount(owners, minlength=clients))


def iid(labels: Labels, clients: int, generator: np.random.Generator) -> Partition:
    """Rows drawn evenly, sizes that differ by at most one. Raises PartitionImpossible for fewer rows than clients."""
    _require_rows(len(labels), clients, 1)
    return Partition.from_sizes(_shuffled(len(labels), generator), _even(len(labels), clients))


def dirichlet(
    labels: Labels, clients: int, generator: np.random.Generator, alpha: float = 0.5, least: int = 1
) -> Partition:
    """Each class is cut over the clients by its own draw of Dirichlet(alpha), so sizes differ too (Yurochkin et al.
    2019; Li et al. 2022). Whoever then has fewer than ``least`` rows is topped up. Raises PartitionImpossible."""
    _require_rows(len(labels), clients, least)
    _require_positive("alpha", alpha)
    owners = np.empty(len(labels), np.int64)
    for rows in _by_class(labels, generator):
        cuts = np.cumsum(_dirichlet(generator, alpha, (1, clients))[0])
        # Row i of n goes where (i + u) / n falls: one offset u per class keeps the rounding free of bias.
        points = (np.arange(len(rows)) + generator.random()) / len(rows)
        owners[rows] = np.minimum(np.searchsorted(cuts, points, side="right"), clients - 1)
    return top_up(owners, clients, least, generator)


def dirichlet_equal(
    labels: Labels, clients: int, generator: np.random.Generator, alpha: float = 0.5
) -> Partition:
    """Equal sizes; each client's mix of classes is its own draw of Dirichlet(alpha · K · prior) over K classes (Hsu et
    al. 2019). The mixes are then fitted to the rows there are, so that each is used once: by passes of proportional
    fitting, which keep a class that a client hardly has rare there, and for what these leave by random exchange.
    Raises PartitionImpossible."""
    _require_rows(len(labels), clients, 1)
    _require_positive("alpha", alpha)
    _, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    classes = len(counts)
    prior = counts / counts.sum()
    mixes = _dirichlet(generator, alpha * classes * prior, (clients, classes))
    for _ in range(_FITTING_PASSES):
        # Tiny parts stay above zero, so that every class can be handed to somebody.
        mixes = np.maximum(mixes, _SMALLEST_PART)
        mixes *= prior / mixes.mean(axis=0)
        mixes /= mixes.sum(axis=1, keepdims=True)
    mixes = np.cumsum(mixes, axis=1)
    sizes = _even(len(labels), clients)
    slot_client = np.repeat(np.arange(clients), sizes)
    wanted = np.empty(len(labels), np.int64)
    draws = generator.random(len(labels))
    wanted[:] = classes - 1
    for code in reversed(range(classes - 1)):
        wanted[draws < mixes[slot_client, code]] = code

    surplus = np.maximum(np.bincount(wanted, minlength=classes) - counts, 0)
    shuffled = _shuffled(len(labels), generator)
    given_up = shuffled[_rank_in_group(wanted[shuffled], classes) < surplus[wanted[shuffled]]]
    missing = np.maximum(counts - np.bincount(wanted, minlength=classes), 0)
    wanted[given_up] = generator.permutation(np.repeat(np.arange(classes), missing))

    rows_by_class = _shuffled(len(labels), generator)
    rows_by_class = rows_by_class[_grouped(codes[rows_by_class], classes)]
    rows = np.empty(len(labels), np.int64)
    rows[_grouped(wanted, classes)] = rows_by_class
    return Partition.from_sizes(rows, sizes)


def by_label(labels: Labels, clients: int, generator: np.random.Generator, classes: int = 2) -> Partition:
    """Every client holds exactly ``classes`` different classes; a class is cut evenly among those that hold it.

    Raises PartitionImpossible when there are fewer classes, a class would have no holder, or more holders than rows.
    """
    present, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    kinds = len(present)
    if not 1 <= classes <= kinds:
        raise PartitionImpossible(f"{classes} classes a client, but the rows have {kinds}")
    if clients * classes < kinds:
        raise PartitionImpossible(
            f"{clients} clients of {classes} classes cannot hold {kinds} classes; take more of either"
        )
    # Within a block of clients every class is held equally often; each block has an order of its own.
    block = kinds // int(np.gcd(kinds, classes))
    orders = generator.permuted(np.tile(np.arange(kinds), (-(-clients // block), 1)), axis=1)
    client = np.arange(clients)
    places = (client % block)[:, None] * classes + np.arange(classes)
    held = orders[(client // block)[:, None], places % kinds]  # [clients, classes]
    holders = np.bincount(held.ravel(), minlength=kinds)
    if (holders > counts).any():
        worst = int((holders - counts).argmax())
        raise PartitionImpossible(
            f"class {present[worst]} has {counts[worst]} rows for {holders[worst]} clients; take fewer clients"
        )
    by_class = _grouped(held.ravel(), kinds) // classes  # clients, those of class 0 first
    starts = np.concatenate([[0], np.cumsum(holders)])
    owners = np.empty(len(labels), np.int64)
    for code, rows in enumerate(_by_class(codes, generator)):
        holding = generator.permutation(by_class[starts[code] : starts[code + 1]])
        owners[rows] = np.repeat(holding, _even(len(rows), len(holding)))
    return Partition.from_owners(owners, clients)


def shards(labels: Labels, clients: int, generator: np.random.Generator, each: int = 2) -> Partition:
    """Rows sorted by label, cut into ``clients · each`` shards, ``each`` of them to a client (McMahan et al. 2017). A
    shard may hold the border of two classes. Raises PartitionImpossible for fewer rows than shards."""
    if each < 1:
        raise PartitionImpossible(f"a client needs at least one shard, not {each}")
    _require_rows(len(labels), clients * each, 1)
    order = np.concatenate(_by_class(labels, generator))
    owner_of_shard = generator.permutation(np.repeat(np.arange(clients), each))
    owners = np.empty(len(labels), np.int64)
    owners[order] = np.repeat(owner_of_shard, _even(len(labels), clients * each))
    return Partition.from_owners(owners, clients)


def by_quantity(
    labels: Labels, clients: int, generator: np.random.Generator, exponent: float = 1.0, least: int = 1
) -> Partition:
    """Sizes fall as rank to the power of −``exponent`` (Zipf), in random order of clients, after ``least`` rows each;
    rows are drawn evenly. Raises PartitionImpossible."""
    _require_rows(len(labels), clients, least)
    if not 0.0 <= exponent < np.inf:
        raise PartitionImpossible(f"exponent must be finite and not negative, not {exponent}")
    shares = np.exp(-exponent * np.log(np.arange(1, clients + 1)))
    free = len(labels) - clients * least
    cuts = np.rint(np.cumsum(shares / shares.sum()) * free).astype(np.int64)
    cuts[-1] = free
    sizes = least + generator.permutation(np.diff(cuts, prepend=0))
    return Partition.from_sizes(_shuffled(len(labels), generator), sizes)


def by_user(owners: Rows) -> Partition:
    """Every user is a client: ``owners`` [N] says whose each row is, 0 to C − 1.

    Raises PartitionImpossible when a user in between has no row.
    """
    if len(owners) == 0 or owners.min() < 0:
        raise PartitionImpossible("there are no rows, or a row has no owner")
    clients = int(owners.max()) + 1
    if clients > len(owners) or not np.bincount(owners, minlength=clients).all():
        raise PartitionImpossible(f"not every one of {clients} users has a row")
    return Partition.from_owners(owners, clients)


def top_up(owners: Rows, clients: int, least: int, generator: np.random.Generator) -> Partition:
    """The partition by ``owners`` [N], after clients below ``least`` rows got what they lack from the largest.

    The largest are cut down to one level, and no further than ``least``; which of their rows go, and to whom, is drawn
    evenly. Nothing moves where nobody lacks anything. Raises PartitionImpossible.
    """
    _require_rows(len(owners), clients, least)
    sizes = np.bincount(owners, minlength=clients)
    lacking = np.maximum(least - sizes, 0)
    need = int(lacking.sum())
    if need == 0:
        return Partition.from_owners(owners, clients)
    level, rest = _level(sizes, need)
    gives = np.maximum(sizes - level, 0)
    # What the level takes beyond the need stays with the first of the givers.
    gives[np.flatnonzero(gives)[:rest]] -= 1
    shuffled = _shuffled(len(owners), generator)
    moving = shuffled[_rank_in_group(owners[shuffled], clients) < gives[owners[shuffled]]]
    moved = owners.copy()
    moved[moving] = generator.permutation(np.repeat(np.arange(clients), lacking))
    return Partition.from_owners(moved, clients)


PARTITIONERS: Final[dict[str, tuple[Callable[..., Partition], str | None, type[int] | type[float]]]] = {
    "iid": (iid, None, int),
    "dirichlet": (dirichlet, "alpha", float),
    "dirichlet_equal": (dirichlet_equal, "alpha", float),
    "label": (by_label, "classes", int),
    "shards": (shards, "each", int),
    "quantity": (by_quantity, "exponent", float),
}
"""Name to function, the name of its one option, and that option's type."""


def make_partition(text: str, labels: Labels, clients: int, generator: np.random.Generator) -> Partition:
    """What ``text`` asks for: a name, or a name and its option, as in ``dirichlet:0.1``, ``label:2``, ``iid``.

    ``labels`` [N] are of the rows to cut. Raises PartitionImpossible, ValueError for a text that means nothing.
    """
    partitioner, options = parse_partition(text)
    return partitioner(labels, clients, generator, **options)


def parse_partition(text: str) -> tuple[Callable[..., Partition], dict[str, float]]:
    """The partitioner that ``text`` names, and its options. Raises ValueError."""
    name, colon, value = text.partition(":")
    if name not in PARTITIONERS:
        raise ValueError(f"{name!r} is no partition; known are {', '.join(PARTITIONERS)}")
    partitioner, option, kind = PARTITIONERS[name]
    if not colon:
        return partitioner, {}
    if option is None:
        raise ValueError(f"partition {name} takes no option, but got {value!r}")
    try:
        return partitioner, {option: kind(value)}
    except ValueError as error:
        raise ValueError(f"partition {name} needs {option} as a number, not {value!r}") from error


def _require_rows(rows: int, clients: int, least: int) -> None:
    if clients < 1 or least < 0:
        raise PartitionImpossible(
            f"needs at least one client and no negative minimum, not {clients}, {least}"
        )
    if rows < clients * max(least, 1):
        raise PartitionImpossible(f"{rows} rows cannot give {clients} clients {max(least, 1)} each")


def _require_positive(name: str, value: float) -> None:
    if not 0.0 < value < np.inf:
        raise PartitionImpossible(f"{name} must be positive and finite, not {value}")


def _even(total: int, parts: int) -> Rows:
    """Sizes [parts] that sum to ``total`` and differ by at most one, the larger first."""
    return total // parts + (np.arange(parts) < total % parts).astype(np.int64)


def _shuffled(rows: int, generator: np.random.Generator) -> Rows:
    return generator.permutation(rows).astype(np.int64, copy=False)


def _grouped(groups: Rows, kinds: int) -> Rows:
    """Row numbers [N], those of group 0 first; within a group they keep their order."""
    # Narrow keys sort by radix, several times faster.
    keys = groups.astype(np.uint16) if kinds <= 1 << 16 else groups
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def _by_class(labels: Labels, generator: np.random.Generator) -> list[Rows]:
    """The rows of each class, in random order."""
    _, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    order = _shuffled(len(labels), generator)
    order = order[_grouped(codes[order], len(counts))]
    return np.split(order, np.cumsum(counts)[:-1])


def _rank_in_group(groups: Rows, kinds: int) -> Rows:
    """How many before it have the same group [N]."""
    order = _grouped(groups, kinds)
    starts = np.concatenate([[0], np.cumsum(np.bincount(groups, minlength=kinds))])[:-1]
    ranks = np.empty(len(groups), np.int64)
    ranks[order] = np.arange(len(groups)) - np.repeat(starts, np.bincount(groups, minlength=kinds))
    return ranks


def _level(sizes: Rows, need: int) -> tuple[int, int]:
    """The largest level to which cutting ``sizes`` frees at least ``need``, and by how much it exceeds it."""
    low, high = 0, int(sizes.max())
    while low < high:
        middle = (low + high + 1) // 2
        if int(np.maximum(sizes - middle, 0).sum()) >= need:
            low = middle
        else:
            high = middle - 1
    return low, int(np.maximum(sizes - low, 0).sum()) - need


def _dirichlet(
    generator: np.random.Generator, alpha: float | npt.NDArray[np.float64], shape: tuple[int, int]
) -> npt.NDArray[np.float64]:
    """Draws [n, K] of Dirichlet(alpha), finite however small alpha is.

    By log Gamma(a) = log Gamma(a + 1) + log(U) / a, since Gamma(a) itself underflows to 0 in every part.
    """
    alphas = np.broadcast_to(np.asarray(alpha, np.float64), shape)
    logs = np.log(generator.standard_gamma(alphas + 1.0)) + np.log1p(-generator.random(shape)) / alphas
    logs -= logs.max(axis=1, keepdims=True)
    parts = np.exp(logs)
    parts /= parts.sum(axis=1, keepdims=True)
    return np.asarray(parts, np.float64)
