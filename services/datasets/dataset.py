"""A data set in memory: who, what, and what happened, as columns. Pure: readers and writers stand beside."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

Attribute = None | bool | int | float | str | list[str]
NO_VALUE: Final = float("nan")


@dataclass(frozen=True, slots=True)
class Entities:
    """Users or items: ids and, for each, its attributes."""

    ids: tuple[str, ...]
    attributes: tuple[Mapping[str, Attribute], ...]

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.attributes):
            raise ValueError(f"{len(self.ids)} ids, but {len(self.attributes)} rows of attributes")

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Interactions:
    """What happened, N rows in the order of the source.

    ``user`` int32[N] and ``item`` int32[N] index the data set's entities, ``action`` int16[N] indexes
    ``actions``; ``value`` float64[N] is NaN where there is none; ``timestamp_ms`` int64[N] is event time;
    ``event_id`` object[N] holds strings that are the same each time the source is read.
    """

    user: NDArray[np.int32]
    item: NDArray[np.int32]
    action: NDArray[np.int16]
    value: NDArray[np.float64]
    timestamp_ms: NDArray[np.int64]
    event_id: NDArray[np.object_]
    actions: tuple[str, ...]

    def __post_init__(self) -> None:
        columns = (self.user, self.item, self.action, self.value, self.timestamp_ms, self.event_id)
        if len({column.shape for column in columns}) != 1 or self.user.ndim != 1:
            raise ValueError(f"columns differ in shape: {[column.shape for column in columns]}")

    def __len__(self) -> int:
        return len(self.user)

    def take(self, rows: NDArray[np.intp]) -> Self:
        """The given rows, in the given order."""
        return replace(
            self,
            user=self.user[rows],
            item=self.item[rows],
            action=self.action[rows],
            value=self.value[rows],
            timestamp_ms=self.timestamp_ms[rows],
            event_id=self.event_id[rows],
        )

    def liked(self, actions: Sequence[str], rating_threshold: float) -> NDArray[np.bool_]:
        """bool[N]: rows whose action is one of ``actions``, or a rating of at least ``rating_threshold``."""
        positive = np.array([name in actions for name in self.actions] or [False])
        rating = np.array([name == "rating" for name in self.actions] or [False])
        with np.errstate(invalid="ignore"):
            rated = rating[self.action] & (self.value >= rating_threshold)
        return positive[self.action] | rated


@dataclass(frozen=True, slots=True)
class Dataset:
    """Users, items and interactions, with a name (it leads the event ids) and where they came from."""

    name: str
    source: str
    users: Entities
    items: Entities
    interactions: Interactions
    generated: bool = False
    """Whether this is made up because the real data could not be had; whoever shows figures must say so."""

    def __post_init__(self) -> None:
        for column, entities in ((self.interactions.user, self.users), (self.interactions.item, self.items)):
            if len(column) and not 0 <= int(column.min()) <= int(column.max()) < len(entities):
                raise ValueError("an interaction names an entity that the data set lacks")

    def in_time_order(self) -> Self:
        """The same with interactions by event time; rows of the same time keep the order of the source."""
        order = np.argsort(self.interactions.timestamp_ms, kind="stable")
        return replace(self, interactions=self.interactions.take(order))

    def split(self, fraction: float) -> tuple[Self, Self]:
        """The first ``fraction`` of the interactions in time order, and the rest. Entities are in both."""
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"a fraction lies between 0 and 1, not {fraction}")
        ordered = self.in_time_order()
        cut = round(len(self.interactions) * fraction)
        rows = np.arange(len(self.interactions), dtype=np.intp)
        return (
            replace(ordered, interactions=ordered.interactions.take(rows[:cut])),
            replace(ordered, interactions=ordered.interactions.take(rows[cut:])),
        )

    def split_time_ms(self, fraction: float) -> int:
        """Event time at which the first ``fraction`` of the interactions is over (0 if there are none)."""
        before, after = self.split(fraction)
        if len(before.interactions):
            return int(before.interactions.timestamp_ms[-1])
        return int(after.interactions.timestamp_ms[0]) if len(after.interactions) else 0

    def shifted(self, by_ms: int) -> Self:
        """The same with every event time moved by ``by_ms``."""
        moved = self.interactions.timestamp_ms + np.int64(by_ms)
        return replace(self, interactions=replace(self.interactions, timestamp_ms=moved))

    def shift_to(self, at_ms: int, fraction: float) -> Self:
        """The same with every event time moved alike, so that the split at ``fraction`` is at ``at_ms``."""
        return self.shifted(at_ms - self.split_time_ms(fraction))

    def digest(self) -> str:
        """SHA-256 (hex) of ids, attributes other than titles, and interactions, in a canonical form.

        Titles are left out: sources that agree in all that is learned from may still spell them differently.
        """
        entities = [
            [
                [id_, {key: value for key, value in sorted(row.items()) if key != "title"}]
                for id_, row in zip(table.ids, table.attributes, strict=True)
            ]
            for table in (self.users, self.items)
        ]
        seen = self.interactions
        hashed = hashlib.sha256(msgspec.json.encode([entities, list(seen.actions)], order="deterministic"))
        for column in (
            seen.user.astype("<i4"),
            seen.item.astype("<i4"),
            seen.action.astype("<i2"),
            seen.value.astype("<f8"),
            seen.timestamp_ms.astype("<i8"),
        ):
            hashed.update(column.tobytes())
        hashed.update("\n".join(seen.event_id).encode())
        return hashed.hexdigest()


def ratings(
    name: str,
    user: NDArray[np.int32],
    item: NDArray[np.int32],
    value: NDArray[np.float64],
    timestamp_ms: NDArray[np.int64],
) -> Interactions:
    """Interactions that are all ratings; the id of row n (counted from 1) is ``name/n``."""
    count = len(user)
    event_id = np.array([f"{name}/{row}" for row in range(1, count + 1)], dtype=np.object_)
    return Interactions(user, item, np.zeros(count, np.int16), value, timestamp_ms, event_id, ("rating",))
