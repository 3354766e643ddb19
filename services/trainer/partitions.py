"""How far every shard has come with the partitions that this trainer reads.

The identity of a push is (incarnation of the samples log, partition, offset). Each shard says how far it has
come; a trainer starts behind the shard that is furthest behind, and shards that are ahead answer "duplicate".
So it does not matter who pushed what before, or whether the answer arrived: each shard applies each offset
once, in order. What is pushed again to a shard that was behind was computed on newer rows of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from services.messagelog.contract import Record
from services.parameter_server.types import Applied
from sync.pushes import Source

NOTHING: Final = -1


class Progress(Protocol):
    """Who tells how far the shards are (``ParameterClient`` does)."""

    def applied(self, model: str, source: Source) -> dict[int, Applied]: ...


class Reply(Protocol):
    """What a shard's answer to a push says of its progress."""

    @property
    def applied(self) -> int: ...
    @property
    def durable(self) -> int: ...
    @property
    def incarnation(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Rewind:
    """The step was not done: go on from ``offset``."""

    offset: int


class Partitions:
    """The open partitions of one samples log. One thread."""

    def __init__(self, parameters: Progress, model: str, log: str) -> None:
        """``model`` by its name, ``log``: the incarnation of the samples topic."""
        self._parameters, self._model, self._log = parameters, model, log
        self._shards: dict[int, dict[int, Applied]] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._shards))

    def open(self, partition: int) -> int:
        """Take over a partition, or look at it anew: the offset to read it from. Raises ParameterError."""
        self._shards[partition] = self._parameters.applied(self._model, self.source(partition))
        return self._least_applied(partition) + 1

    def drop(self, partition: int) -> None:
        """The partition belongs to another now."""
        del self._shards[partition]

    def source(self, partition: int) -> Source:
        """Whose pushes those of the partition are."""
        return Source(self._log, partition)

    def applied(self, partition: int, shard: int) -> int:
        """The last offset that ``shard`` is known to have applied."""
        return self._shards[partition][shard].applied

    def predecessors(self, record: Record) -> dict[int, int]:
        """By shard, the offset before ``record``'s: what it has to be at to take it, or it is ahead."""
        before = self._shards[record.partition]
        return {shard: min(state.applied, record.offset - 1) for shard, state in before.items()}

    def incarnations(self, partition: int) -> dict[int, int]:
        """By shard, the process that said how far it is."""
        return {shard: state.incarnation for shard, state in self._shards[partition].items()}

    def update(self, partition: int, replies: Mapping[int, Reply]) -> None:
        """Note what shards answered."""
        known = self._shards[partition]
        for shard, reply in replies.items():
            known[shard] = Applied(reply.applied, reply.durable, reply.incarnation)

    def check(self, partition: int) -> Rewind | None:
        """Ask the servers how far they are (also when there is nothing to push): Rewind if one restarted and
        lost pushes, else None. Raises ParameterError."""
        before = dict(self._shards[partition])
        offset = self.open(partition)
        now = self._shards[partition]
        lost = any(shard not in now or now[shard].applied < state.applied for shard, state in before.items())
        return Rewind(offset) if lost else None

    def durable(self) -> dict[int, int]:
        """Per open partition the next offset that no restored snapshot would need again."""
        return {
            partition: min((state.durable for state in shards.values()), default=NOTHING) + 1
            for partition, shards in self._shards.items()
        }

    def _least_applied(self, partition: int) -> int:
        return min((state.applied for state in self._shards[partition].values()), default=NOTHING)
