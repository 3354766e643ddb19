"""What a kind of joint job is: its roles, its options, how a role is made, and how its model answers later.

Each package of models declares one ``Kind``; ``services.vertical.jobs`` names them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from federated.vertical.parties import Alone, Make, PartResult, Role, Workers
from federated.vertical.tables import Table

Options = TypeVar("Options")
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Setup:
    """Where a role stands. ``parties``: every party's role by name, this one's (``me``) too, in the job's order.

    ``table``: this party's rows; aligned (row i is the same person at every party) where the kind says so; None at a
    party that has none, such as a coordinator. ``seed``: public, the same at all parties. ``rows``: how many rows are
    aligned, known at every party (0 where the kind aligns nothing). ``rest``: this party's rows that the others have
    not, in its own order; None where there are none. ``columns``: of ``table``, which the kind's own role is to see
    alone (None: all); ``pipeline`` sees to that.
    """

    me: str
    parties: Mapping[str, str]
    table: Table | None
    seed: int
    rows: int = 0
    workers: Workers = field(default_factory=Alone)
    rest: Table | None = None
    columns: tuple[str, ...] | None = None

    def named(self, role: str) -> tuple[str, ...]:
        """The parties with this role, in the job's order."""
        return tuple(name for name, has in self.parties.items() if has == role)

    def one(self, role: str) -> str:
        """The only party with this role. Raises ValueError."""
        names = self.named(role)
        if len(names) != 1:
            raise ValueError(f"{len(names)} parties are {role}, one is needed")
        return names[0]


def by_role(
    options: Options,
    setup: Setup,
    roles: Mapping[str, Callable[[Options, Setup, bytes | None], Role[PartResult]]],
) -> Make:
    """The function that makes this party's own of ``roles``, by role's name, from a checkpoint's state."""
    role = roles[setup.parties[setup.me]]
    return lambda state: role(options, setup, state)


class HostPart(Protocol):
    """A host's part of a trained model."""

    def partial(self, rows: npt.NDArray[np.float64]) -> Array:
        """This party's share of the answer for ``rows`` [N, F] (its own features): [N] or [N, ...], of a type that
        ``wire`` carries."""
        ...


class GuestPart(Protocol):
    """The label party's part of a trained model."""

    def combine(
        self, rows: npt.NDArray[np.float64], partials: Mapping[str, Array]
    ) -> npt.NDArray[np.float64]:
        """Scores [N] or [N, C] of ``rows`` [N, F] with every host's share. Raises PeerFault for a share that no
        honest host has (shape, type, not finite)."""
        ...

    def alone(self, rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Scores without the hosts, for an answer that may not wait: [N] or [N, C]."""
        ...


@dataclass(frozen=True, slots=True)
class Count:
    """How many parties may have a role."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least} to {self.most}"


@dataclass(frozen=True, slots=True)
class Kind(Generic[Options]):
    """A kind of joint job.

    ``options``: a frozen dataclass with defaults, simple fields. ``make(options, setup)`` gives the function that
    makes this party's role (checkpoint's state or None -> role with a PartResult); it raises ValueError for options or
    tables that do not fit. ``aligned``: tables are aligned before. ``seen``: for each kind of message, what its
    receiver learns from it, in plain words. ``load``: the part that ``PartResult.model`` holds; without it there is
    none that answers. ``findings``: what ``PartResult.model`` says, as JSON; its ``tables`` (rows as objects, by title)
    are for people, its ``columns`` those that are kept.
    """

    name: str
    summary: str
    roles: Mapping[str, Count]
    options: type[Options]
    make: Callable[[Options, Setup], Make]
    seen: Mapping[str, str]
    aligned: bool = True
    load: Callable[[bytes], HostPart | GuestPart] | None = None
    findings: Callable[[bytes], Mapping[str, Any]] | None = None
