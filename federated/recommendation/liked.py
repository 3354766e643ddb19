"""Which items each device knows something of, and what is held back to judge by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from federated.weights import Array

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Liked:
    """The items of C devices, each named once a device: those of device c are ``items[offsets[c]:offsets[c + 1]]``,
    ascending, out of ``catalogue`` items. Raises ValueError where the columns do not fit.

    In a simulation this stands for what lies on the devices; nothing here is ever sent.
    """

    items: Numbers
    offsets: Numbers
    catalogue: int

    def __post_init__(self) -> None:
        if not len(self.offsets) or self.offsets[0] != 0 or self.offsets[-1] != len(self.items):
            raise ValueError("offsets must begin with 0 and end with the number of items")
        if (np.diff(self.offsets) < 0).any():
            raise ValueError("offsets must not fall")
        if len(self.items) and not 0 <= int(self.items.min()) <= int(self.items.max()) < self.catalogue:
            raise ValueError(f"an item is none of the {self.catalogue} of the catalogue")

    @property
    def devices(self) -> int:
        """C."""
        return len(self.offsets) - 1

    @property
    def counts(self) -> Numbers:
        """Items of each device [C]."""
        return np.diff(self.offsets)

    def of(self, device: int) -> Numbers:
        """The items of one device."""
        return self.items[self.offsets[device] : self.offsets[device + 1]]

    def mask(self, devices: Numbers) -> Array:
        """[B, I]: 1 where one of the B devices has the item, else 0."""
        found = np.zeros((len(devices), self.catalogue), np.float32)
        for row, device in enumerate(devices.tolist()):
            found[row, self.of(device)] = 1.0
        return found


@dataclass(frozen=True, slots=True)
class LeaveOneOut:
    """``training``: what devices learn from; ``held_out`` [C]: each one's last item, -1 where it had but one."""

    training: Liked
    held_out: Numbers


def by_device(owners: Numbers, items: Numbers, devices: int, catalogue: int) -> Liked:
    """From pairs (owner, item), in any order and perhaps repeated. Raises ValueError for an owner that is no device."""
    if len(owners) and not 0 <= int(owners.min()) <= int(owners.max()) < devices:
        raise ValueError(f"an owner is none of the {devices} devices")
    pairs = np.unique(owners.astype(np.int64) * catalogue + items)
    offsets = np.searchsorted(pairs, np.arange(devices + 1, dtype=np.int64) * catalogue)
    return Liked(pairs % catalogue, offsets.astype(np.int64), catalogue)


def leave_last_out(
    owners: Numbers, items: Numbers, times: Numbers, devices: int, catalogue: int
) -> LeaveOneOut:
    """Hold back each device's last item by time; among items of the same time the one that was named first.

    All of a device's rows of that item are held back, so none of them can be learned from.
    """
    order = np.lexsort((-np.arange(len(owners)), times, owners))
    ordered = owners[order]
    last = order[np.append(ordered[1:] != ordered[:-1], True)] if len(order) else order
    held_out = np.full(devices, -1, np.int64)
    several = by_device(owners, items, devices, catalogue).counts > 1
    last = last[several[owners[last]]]
    held_out[owners[last]] = items[last]
    kept = items != held_out[owners]
    return LeaveOneOut(by_device(owners[kept], items[kept], devices, catalogue), held_out)


def draw_negatives(known: Liked, count: int, generator: np.random.Generator) -> Numbers:
    """``count`` distinct items for each device [C, count] that are not among its ``known`` ones.

    Draw them once and keep them: figures on other draws cannot be compared. Raises ValueError where too few are left.
    """
    drawn = np.empty((known.devices, count), np.int64)
    for device, row in enumerate(drawn):
        others = np.setdiff1d(np.arange(known.catalogue), known.of(device), assume_unique=True)
        if len(others) < count:
            raise ValueError(f"device {device} knows all but {len(others)} items: no {count} negatives")
        row[:] = generator.choice(others, count, replace=False)
    return drawn
