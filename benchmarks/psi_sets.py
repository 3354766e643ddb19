"""The sets of the PSI benchmark, the same for us and for peers in environments of their own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pair:
    """Two sets of texts, ``common`` of them in both."""

    first: list[str]
    second: list[str]
    common: int


def make_pair(first: int, second: int, common: int) -> Pair:
    """Sets of these sizes. Raises ValueError where they cannot share so many."""
    if not 0 <= common <= min(first, second):
        raise ValueError(f"sets of {first} and {second} cannot share {common}")
    start = first - common
    return Pair(_texts(0, first), _texts(start, start + second), common)


def make_three(size: int, common: int) -> list[list[str]]:
    """Three sets of ``size``: ``common`` in all of them, as many more in the first and the second, the rest in one.

    Raises ValueError where a set cannot hold that.
    """
    if not 0 <= 2 * common <= size:
        raise ValueError(f"sets of {size} cannot share {common} and as many more")
    shared, pair = _texts(0, common), _texts(common, 2 * common)
    rest = size - 2 * common
    return [
        [*shared, *pair, *_texts(2 * common, size)],
        [*shared, *pair, *_texts(size, size + rest)],
        [*shared, *_texts(size + rest, size + rest + common + rest)],
    ]


def _texts(start: int, end: int) -> list[str]:
    return [f"customer-{number:08d}@example.org" for number in range(start, end)]
