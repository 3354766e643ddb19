"""Who masks with whom: regular graphs, and how many neighbours and shares are enough (Bell et al., CCS 2020).

Each of n clients exchanges masks and shares with its k neighbours alone. A share ``colluding`` of the clients works
with the server, a share ``dropouts`` vanishes; with c and d of them, three things must not go wrong:

1. **A secret leaks.** Fewer colluding neighbours than the threshold t, for every client: the number among k
   neighbours is hypergeometric. Against a malicious server, which may ask honest neighbours for different kinds of
   shares, at most one kind may reach t: 2t > k + colluding neighbours.
2. **A part of the sum leaks.** If the honest survivors fall apart, the server learns the sum of each part. A Harary
   graph falls apart only where k/2 clients in a row are gone, in two places.
3. **The sum is lost.** At least t neighbours of every client survive.

1 and 2 together happen with a probability of at most 2**-40, and 3 of at most 2**-30, by union bounds over exact
hypergeometric tails (the sources' values of the parameters; the bound of 2 is that of Google's implementation of the
paper). They hold for clients that collude and vanish independently of the graph. A malicious server must therefore not
draw it: there each client draws its own k neighbours, 1 and 3 are the same, and for 2 see ``smallest_group``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from math import floor, inf, log
from typing import Final

import numpy as np
import numpy.typing as npt

MOST_CLIENTS: Final = 2**20
FEWEST_CLIENTS: Final = 3
SECURITY_BITS: Final = 40
CORRECTNESS_BITS: Final = 30
SMALLEST_GROUP: Final = 1 / 3
"""The least share of the honest clients that a sum learnt by a malicious server must hold."""

_PER_EVENT = -(SECURITY_BITS + 1) * log(2)  # two events share the probability
_LOST = -CORRECTNESS_BITS * log(2)
_ROUNDING = 1e-9  # .1 · 30 is 3 clients, whatever floats say

Floats = npt.NDArray[np.float64]


class DegreeRefused(ValueError):
    """So few clients, or so many that collude or vanish, that nothing is safe and lives; or no such graph exists."""


@dataclass(frozen=True, slots=True)
class Degree:
    """``k`` neighbours hold one share each of a client's secrets, and ``threshold`` of these give a secret back."""

    k: int
    threshold: int


def regular_graph(n: int, k: int, seed: bytes) -> npt.NDArray[np.int32]:
    """The ``k`` neighbours of each of ``n`` clients, int32 [n, k], in ascending order: a Harary graph on a uniform
    permutation made of ``seed``, which may be public. The same everywhere for the same seed.

    Clients stand in a circle, and each is joined to the k/2 on either side, and to the one opposite if k is odd. The
    graph is connected. Raises DegreeRefused unless 2 <= k < n, and where n and k are both odd.
    """
    if not 2 <= k < n <= MOST_CLIENTS or n * k % 2:
        raise DegreeRefused(f"no graph joins each of {n} clients to {k} others")
    circle = _permutation(n, seed)
    places = np.arange(n, dtype=np.int64)[:, np.newaxis]
    steps = np.arange(1, k // 2 + 1, dtype=np.int64)
    columns = [places + steps, places - steps]
    if k % 2:
        columns.append(places + n // 2)
    neighbours = np.empty((n, k), np.int32)
    neighbours[circle] = circle[np.concatenate(columns, axis=1) % n]
    neighbours.sort(axis=1)
    return neighbours


def complete(n: int, colluding: float, dropouts: float, malicious: bool) -> Degree:
    """All n - 1 others as neighbours and the smallest sound threshold: nothing is left to chance.

    Raises DegreeRefused when the survivors cannot reach it.
    """
    _check(n, colluding, dropouts)
    c, d = _count(n, colluding), _count(n, dropouts)
    threshold = _sound(n - 1, c, malicious)
    if threshold > n - 1 - d:
        raise DegreeRefused(
            f"{n} clients of whom {c} collude and {d} vanish: {threshold} shares are needed, {n - 1 - d} remain"
        )
    return Degree(n - 1, threshold)


def choose(n: int, colluding: float, dropouts: float, malicious: bool) -> Degree:
    """The fewest neighbours, an even number, and their smallest threshold that are enough; all n - 1 others where no
    fewer are. Raises DegreeRefused where not even these are, and for fewer than 3 clients."""
    _check(n, colluding, dropouts)
    c, d = _count(n, colluding), _count(n, dropouts)
    for k in range(2, n - 1, 2):
        degree = _enough(n, k, c, d, malicious)
        if degree:
            return degree
    return complete(n, colluding, dropouts, malicious)


def smallest_group(n: int, colluding: float, degree: Degree) -> int:
    """How many honest clients every sum holds that a malicious server can learn, but for a probability of 2**-41, when
    each client drew its own ``degree.k`` neighbours and answers only if ``degree.threshold`` of them vouch for the same
    survivors: a server may tell different groups of clients different survivors.

    Such a group of s clients needs, for each of its members, ``threshold`` of the member's neighbours inside the group
    or colluding. Members draw independently, so a given group is one with the s-th power of a hypergeometric tail, and
    there are as many groups as binomials say.
    """
    _check(n, colluding, 0.0)
    c = _count(n, colluding)
    total = 0.0
    for size in range(1, n - c + 1):
        tail = float(_log_tails(n - 1, min(size - 1 + c, n - 1), degree.k)[degree.threshold])
        if tail > -inf:
            groups = _log_binomial(n - c, size)
            total += float(np.exp(min(0.0, groups + size * tail)))
        if total > np.exp(_PER_EVENT):
            return size
    return n - c


def holds_together(n: int, colluding: float, dropouts: float, degree: Degree, malicious: bool) -> bool:
    """Whether no sum of a few survivors alone can be learnt, but for a probability of 2**-41: event 2 above."""
    _check(n, colluding, dropouts)
    c, d = _count(n, colluding), _count(n, dropouts)
    if malicious:
        return smallest_group(n, c / n, degree) >= SMALLEST_GROUP * (n - c)
    return _log_disconnected(n, degree.k, c + d) <= _PER_EVENT


def _enough(n: int, k: int, c: int, d: int, malicious: bool) -> Degree | None:
    """The degree with ``k`` neighbours and the smallest threshold that is safe, if the sum then survives."""
    if not malicious and _log_disconnected(n, k, c + d) > _PER_EVENT:
        return None
    per_client = log(n)
    colluding = _log_tails(n - 1, c, k)  # of an honest client: c of the n - 1 others collude
    most = int(np.argmax(colluding + per_client <= _PER_EVENT)) - 1
    threshold = _sound(k, most, malicious)
    # Fewer than t of k survive: more than k - t of the at most d that vanish are among them.
    if threshold > k or float(_log_tails(n - 1, d, k)[k - threshold + 1]) + per_client > _LOST:
        return None
    degree = Degree(k, threshold)
    if malicious and smallest_group(n, c / n, degree) < SMALLEST_GROUP * (n - c):
        return None
    return degree


def _sound(holders: int, colluding: int, malicious: bool) -> int:
    """The smallest threshold at which so many colluding of the holders are harmless; never one share alone."""
    return max(2, (holders + colluding) // 2 + 1 if malicious else colluding + 1)


def _log_disconnected(n: int, k: int, bad: int) -> float:
    """Log of a bound on the probability that a Harary graph falls apart when ``bad`` of the clients are gone.

    Whatever parts it has k/2 missing clients in a row in two places of the circle: n (n - k - 1) / 2 pairs of places,
    and k given clients are gone with the ratio of two binomials.
    """
    if k > bad:
        return -inf
    return log(n) + log(n - k - 1) - log(2) + _log_binomial(n - k, bad - k) - _log_binomial(n, bad)


def _log_tails(population: int, marked: int, drawn: int) -> Floats:
    """log P[X >= x] for x = 0 ... drawn + 1, float64 [drawn + 2], of the number X of marked ones among ``drawn``."""
    x = np.arange(max(0, drawn + marked - population), min(drawn, marked) + 1)
    factorials = _log_factorials(_table_size(population))
    logs = (
        factorials[marked] - factorials[x] - factorials[marked - x]
        + factorials[population - marked] - factorials[drawn - x] - factorials[population - marked - drawn + x]
        - factorials[population] + factorials[drawn] + factorials[population - drawn]
    )  # fmt: skip
    tails = np.full(drawn + 2, -inf)
    tails[x[0] : x[-1] + 1] = np.logaddexp.accumulate(logs[::-1])[::-1]
    tails[: x[0] + 1] = 0.0
    np.minimum(tails, 0.0, out=tails)
    return tails


def _log_binomial(n: int, k: int) -> float:
    factorials = _log_factorials(_table_size(n))
    return float(factorials[n] - factorials[k] - factorials[n - k])


def _table_size(n: int) -> int:
    return max(1024, 1 << n.bit_length())


@lru_cache(maxsize=4)
def _log_factorials(size: int) -> Floats:
    """log i! for i = 0 ... size - 1."""
    logs = np.log(np.maximum(np.arange(size), 1))
    factorials: Floats = np.cumsum(logs)
    factorials.setflags(write=False)
    return factorials


def _permutation(n: int, seed: bytes) -> npt.NDArray[np.int64]:
    """The order of n 64-bit numbers made of the seed by SHAKE-256: two are equal with probability below 2**-24."""
    drawn = hashlib.shake_256(b"headwater-graph-1" + seed).digest(8 * n)
    return np.argsort(np.frombuffer(drawn, "<u8"), kind="stable")


def _count(n: int, share: float) -> int:
    return floor(share * n + _ROUNDING)


def _check(n: int, colluding: float, dropouts: float) -> None:
    if not FEWEST_CLIENTS <= n <= MOST_CLIENTS:
        raise DegreeRefused(
            f"{n} clients: from {FEWEST_CLIENTS} on a sum hides anything, at most {MOST_CLIENTS}"
        )
    if not (0 <= colluding < 1 and 0 <= dropouts < 1):
        raise DegreeRefused(f"shares of {colluding} and {dropouts} clients: each is from 0 to below 1")
