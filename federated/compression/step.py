"""What a step of compression is: a client's hook and a server's hook over a batch of vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from federated.compression.packing import Bytes
from federated.compression.sections import Section, SectionRule
from federated.compression.streams import SEED_BITS, Floats

T = TypeVar("T")
Kind = Literal["dense", "sparse", "codes", "bytes"]


@dataclass(frozen=True, slots=True)
class Dice:
    """Where randomness comes from: each body's own generator, and a seed that all clients of a round share.
    The server has no generators: a step that it must follow puts its seed into the body."""

    shared: int
    generators: Sequence[np.random.Generator] = ()
    _derived: dict[tuple[str, bytes, int], Any] = field(default_factory=dict)

    def once(self, what: str, seeds: Section, count: int, derive: Callable[[list[int]], T]) -> T:
        """What ``derive`` makes of the bodies' seeds: once a batch, though both hooks ask for it."""
        key = (what, seeds.body.tobytes(), count)
        if key not in self._derived:
            self._derived[key] = derive(read_seeds(seeds))
        found: T = self._derived[key]
        return found

    def seeds(self) -> Bytes:
        """A seed for each body, ``[B, 4]`` little-endian bytes."""
        drawn = [int(generator.integers(1 << SEED_BITS)) for generator in self.generators]
        return np.array(drawn, "<u4").view(np.uint8).reshape(-1, 4)

    def uniform(self, count: int) -> Floats:
        """Numbers in [0, 1), ``[B, count]``, a row from each body's generator."""
        out = np.empty((len(self.generators), count), np.float32)
        for row, generator in zip(out, self.generators, strict=True):
            generator.random(dtype=np.float32, out=row)
        return out


class Step(Protocol):
    """One step. N numbers of each vector come in, ``width(N)`` go to the next step, and what the server needs
    beside them goes into sections."""

    @property
    def name(self) -> str: ...
    @property
    def takes(self) -> frozenset[Kind]:
        """The kinds of signal it can work on."""
        ...

    @property
    def gives(self) -> Kind:
        """The kind of signal that leaves it."""
        ...

    @property
    def skews(self) -> bool:
        """True when the mean of what the server decodes is not what went in: it needs error feedback."""
        ...

    def grows(self) -> str | None:
        """Why the error may exceed what went in (so that error feedback would add it up), or None."""
        ...

    def width(self, count: int) -> int: ...

    def rules(self, count: int) -> tuple[SectionRule, ...]:
        """The sections that it writes for ``count`` numbers."""
        ...

    def encode(self, values: Floats, dice: Dice, feedback: bool) -> tuple[Floats, tuple[Section, ...]]:
        """Client's hook: ``[B, N]`` to ``[B, width(N)]`` and the sections."""
        ...

    def decode(
        self, values: Floats, sections: Sequence[Section], count: int, dice: Dice, feedback: bool
    ) -> Floats:
        """Server's hook: ``[B, width(N)]`` and the sections back to ``[B, N = count]``. Raises BodyRefused."""
        ...


def read_seeds(section: Section) -> list[int]:
    """The seeds that ``Dice.seeds`` drew."""
    return [int(seed) for seed in np.ascontiguousarray(section.rows()).view("<u4").reshape(-1)]
