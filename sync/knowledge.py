"""What a replica knows: version vectors, what of them was forgotten, and which rows they do not cover. Pure.

A version is (time, writer), a hybrid time and the id of one incarnation of a writer. Knowledge K maps writers to
times: K[w] = t says that every update by w up to t was applied here, or lost to a newer version. A writer that is
not named is known up to 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from sync.clock import MAX_TIME
from sync.kernel import i32, i64, inp, kernel, out, place_of, u8, u32, u64, void

Knowledge = Mapping[int, int]
Times = npt.NDArray[np.uint64]
Writers = npt.NDArray[np.uint32]
Slots = npt.NDArray[np.int32]

NOTHING: Final[Knowledge] = {}
MAX_WRITERS: Final = 65_536
"""Writers in the knowledge of one shard: far more than any has before they are retired."""


def joined(*vectors: Knowledge) -> dict[int, int]:
    """What all ``vectors`` together know: the larger time of each writer."""
    found: dict[int, int] = {}
    for vector in vectors:
        for writer, time in vector.items():
            if time > found.get(writer, 0):
                found[writer] = time
    return found


def met(vectors: Iterable[Knowledge]) -> dict[int, int]:
    """What each of ``vectors`` knows: the least time of each writer. Of no vectors: nothing."""
    first, *rest = list(vectors) or [NOTHING]
    least = {writer: min([time, *(one.get(writer, 0) for one in rest)]) for writer, time in first.items()}
    return {writer: time for writer, time in least.items() if time}


def covers(knowledge: Knowledge, other: Knowledge) -> bool:
    """Whether ``knowledge`` contains all of ``other``."""
    return all(knowledge.get(writer, 0) >= time for writer, time in other.items())


@dataclass(frozen=True, slots=True)
class Horizon:
    """What a replica has forgotten, so that it cannot tell it to others any more.

    ``graves``: the floor G, the join of the versions of all collected tombstones. ``retired``: incarnations of writers
    whose fencing epoch is below it count as covered, and are in no vector any more; ``last`` holds, for those that
    were retired at the last time, of epochs from ``retired_before`` on, up to which time they had written.
    """

    graves: Knowledge = field(default_factory=dict)
    retired: int = 0
    retired_before: int = 0
    last: Knowledge = field(default_factory=dict)

    def passed_by(self, knowledge: Knowledge, retired: int, epochs: Mapping[int, int] | None = None) -> bool:
        """Whether who has ``knowledge``, and has heard of retirements below epoch ``retired``, lacks nothing that was
        forgotten here, and has nothing of a retired writer that is known to nobody else. Everybody else needs a full
        replacement. ``epochs``: of the writers, as far as they are known."""
        known = epochs or {}
        if retired < self.retired:
            # Another retirement than the one before this: by an owner that did not know of it.
            # Who says that it knows nothing may hold anything.
            if not knowledge or retired != self.retired_before or not covers(knowledge, self.last):
                return False
            if any(
                time > self.last.get(writer, 0) and known.get(writer, 0) < self.retired
                for writer, time in knowledge.items()
            ):
                return False
        return all(
            knowledge.get(writer, 0) >= time or known.get(writer, retired) < retired
            for writer, time in self.graves.items()
        )

    def joined(self, other: Horizon, epochs: Mapping[int, int] | None = None) -> Horizon:
        """Both together. The floor need not name writers that are retired, if their ``epochs`` are known: whoever has
        not heard of the retirement must cover their last versions in any case."""
        newer = self if self.retired >= other.retired else other
        known = epochs or {}
        graves = {
            writer: time
            for writer, time in joined(self.graves, other.graves).items()
            if not known.get(writer, newer.retired) < newer.retired
        }
        return Horizon(graves, newer.retired, newer.retired_before, newer.last)


NO_HORIZON: Final = Horizon()
"""Of a replica that has forgotten nothing."""


@dataclass(frozen=True, slots=True)
class Known:
    """A vector as it is compared with versions: ``epochs`` names the writers, those below ``retired`` are covered.
    ``writers`` ascend."""

    writers: Writers
    times: Times

    @staticmethod
    def of(knowledge: Knowledge, retired: int = 0, epochs: Mapping[int, int] | None = None) -> Known:
        whole = dict(knowledge)
        for writer, epoch in (epochs or {}).items():
            if epoch < retired:
                whole[writer] = MAX_TIME
        return Known(*_ascending(whole))

    def covers(self, other: Knowledge) -> bool:
        """Whether it contains all of ``other``."""
        own = dict(zip(self.writers.tolist(), self.times.tolist(), strict=True))
        return covers(own, other)

    def above(self, time: Times, writer: Writers) -> npt.NDArray[np.bool_]:
        """Which versions [N] it does not cover."""
        found = np.empty(len(time), np.uint8)
        _above(time, writer, self.writers, self.times, found)
        return found.view(np.bool_)

    def is_below(self, time: int, writer: int) -> bool:
        """Whether it does not cover one version."""
        return bool(self.above(np.array([time], np.uint64), np.array([writer], np.uint32))[0])

    def scan(self, time: Times, writer: Writers) -> Slots:
        """The places of the versions [N] that it does not cover; where the time is 0 there is none."""
        found = np.empty(len(time), np.int32)
        return found[: _scan(time, writer, self.writers, self.times, found)].copy()


def _ascending(by_writer: Mapping[int, int]) -> tuple[Writers, Times]:
    """The writers in ascending order, and the number of each."""
    pairs = sorted(by_writer.items())
    writers = np.fromiter((writer for writer, _ in pairs), np.uint32, len(pairs))
    return writers, np.fromiter((number for _, number in pairs), np.uint64, len(pairs))


@kernel(void(inp(u64), inp(u32), inp(u32), inp(u64), out(u8)))
def _above(
    time: Times, writer: Writers, writers: Writers, times: Times, found: npt.NDArray[np.uint8]
) -> None:
    count = writers.shape[0]
    at = 0
    for i in range(time.shape[0]):
        if at >= count or writers[at] != writer[i]:
            at = place_of(writers, writer[i])
        found[i] = 1 if at == count or time[i] > times[at] else 0


@kernel(i64(inp(u64), inp(u32), inp(u32), inp(u64), out(i32)))
def _scan(time: Times, writer: Writers, writers: Writers, times: Times, found: Slots) -> int:
    count = writers.shape[0]
    at = 0
    total = 0
    for i in range(time.shape[0]):
        if time[i] == 0:
            continue
        if at >= count or writers[at] != writer[i]:
            at = place_of(writers, writer[i])
        if at == count or time[i] > times[at]:
            found[total] = i
            total += 1
    return total


@kernel(i64(inp(u64), inp(u32), out(u64), out(u32)))
def _runs(time: Times, writer: Writers, times: Times, writers: Writers) -> int:
    """The largest time of every run of one writer; returns how many runs there are."""
    count = 0
    for i in range(time.shape[0]):
        if count > 0 and writers[count - 1] == writer[i]:
            times[count - 1] = max(times[count - 1], time[i])
        else:
            times[count] = time[i]
            writers[count] = writer[i]
            count += 1
    return count


def vector_of(time: Times, writer: Writers) -> dict[int, int]:
    """The least knowledge that covers the versions [N]."""
    times, writers = np.empty(len(time), np.uint64), np.empty(len(time), np.uint32)
    count = _runs(np.ascontiguousarray(time), np.ascontiguousarray(writer), times, writers)
    found: dict[int, int] = {}
    for one, at in zip(writers[:count].tolist(), times[:count].tolist(), strict=True):
        if at > found.get(one, 0):
            found[one] = at
    return found


@kernel(void(inp(u64), inp(u32), inp(u64), inp(u32), inp(u32), inp(u64), out(u8)))
def _newer(
    time: Times, writer: Writers, other_time: Times, other_writer: Writers, writers: Writers, epochs: Times,
    found: npt.NDArray[np.uint8],
) -> None:  # fmt: skip
    count = writers.shape[0]
    for i in range(time.shape[0]):
        epoch = np.uint64(0)
        other = np.uint64(0)
        at = place_of(writers, writer[i])
        if at < count:
            epoch = epochs[at]
        at = place_of(writers, other_writer[i])
        if at < count:
            other = epochs[at]
        if epoch != other:
            newer = epoch > other
        elif time[i] != other_time[i]:
            newer = time[i] > other_time[i]
        else:
            newer = writer[i] > other_writer[i]
        found[i] = 1 if newer or other_time[i] == 0 else 0


def newer(
    versions: tuple[Times, Writers], others: tuple[Times, Writers], epochs: Mapping[int, int]
) -> npt.NDArray[np.bool_]:
    """Which of ``versions`` [N] win over ``others`` [N]: the later by (fencing epoch of the writer, time, writer). A
    time of 0 is no version, and loses. A writer without an epoch has 0, the oldest."""
    found = np.empty(len(versions[0]), np.uint8)
    _newer(*versions, *others, *_ascending(epochs), found)
    return found.view(np.bool_)
