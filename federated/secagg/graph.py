"""Who masks with whom: regular graphs, and how many neighbours and shares are enough."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


class DegreeRefused(ValueError):
    """No graph on so few clients is safe and lives through the assumed dropouts, or no graph of this degree exists."""


@dataclass(frozen=True, slots=True)
class Degree:
    """``k`` neighbours per client, and how many of their shares give a secret back."""

    k: int
    threshold: int


def regular_graph(n: int, k: int, seed: bytes) -> npt.NDArray[np.int32]:
    """The ``k`` neighbours of each of ``n`` clients, int32 [n, k], ascending: a Harary graph on a permutation drawn from
    the public ``seed``. Raises DegreeRefused where none exists."""
    raise NotImplementedError


def choose(n: int, colluding: float, dropouts: float, malicious: bool) -> Degree:
    """The fewest neighbours, and their threshold, that are enough for ``n`` clients of whom a share ``colluding`` works
    with the server and a share ``dropouts`` vanishes. Raises DegreeRefused."""
    raise NotImplementedError
