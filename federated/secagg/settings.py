"""The plan of a job's secure aggregation: thresholds, neighbours and ring, each proved before the job starts.

Threshold t of a client's k share holders (its neighbours), of whom c work with the server:
  semi-honest: t > c, else they open everything on their own;
  malicious: 2t > k + c, since whoever works with the server gives both of a client's secrets away and an honest holder
    one: both need 2t of k + c shares.
What a malicious server can still do: refuse service, and in secagg+, where a client asks its own neighbours alone who
survived, tell parts of the clients different survivors: it then learns the sum of each part, none of which holds fewer
than a third of the honest clients (``graph.smallest_group``). In secagg two sets of survivors cannot both have t
signatures.

Ring: 2**bits >= 2 n W B + 1, so that the sum of n vectors of weight up to W and values up to B never wraps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import Final

from federated.privacy.section import SecureAggregationSection
from federated.secagg.graph import Degree, DegreeRefused, choose, holds_together
from federated.secagg.messages import SEALED_BYTES
from federated.secagg.ring import Ring, RingRefused
from federated.secagg.stages import Stage

MOST_CLIENTS: Final = 10_000
FEWEST_CLIENTS: Final = 3
MOST_LENGTH: Final = 2**31
MOST_SHARES_BYTES: Final = 2**30
"""Of the sealed shares of an iteration, all of which every server holds while it hands them on."""
_FAILURE: Final = 2.0**-40


class PlanRefused(ValueError):
    """Settings under which the protocol would be unsound, or could not end; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What every party of a job knows beforehand. ``make_plan`` proves it.

    ``most`` clients at most in an iteration; a stage that ends with fewer than ``least`` fails, since the sum would be
    one of fewer. Once the sum stands, ``opening`` are enough to take the masks off. ``degree`` neighbours hold a
    client's shares, ``threshold`` of which give a secret back, ``colluding`` of which may work with the server. A
    vector has ``length`` elements: whole weights up to ``max_weight`` times integers up to ``bound`` in magnitude, in
    steps of 2**-``step_bits``; values are clipped to ``clip_steps`` steps, the rest of the bound is for noise.
    """

    protocol: str
    malicious: bool
    most: int
    least: int
    opening: int
    degree: int
    threshold: int
    colluding: int
    length: int
    clip_steps: int
    bound: int
    max_weight: int
    step_bits: int
    ring: Ring
    stage_window_s: float

    @property
    def complete(self) -> bool:
        """Whether everybody is everybody's neighbour."""
        return self.protocol == "secagg"

    @property
    def choosing(self) -> bool:
        """Whether clients choose their neighbours themselves: a server that is not trusted may not."""
        return self.malicious and not self.complete

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages that clients answer, in order."""
        return _stages(self.malicious, self.choosing)

    @property
    def masked_bytes(self) -> int:
        """The size of a masked vector's body."""
        return self.ring.packed_bytes(self.length)

    def degree_of(self, clients: int) -> int:
        """The neighbours of each of ``clients`` clients: all others when they are few."""
        return clients - 1 if self.complete else min(self.degree, clients - 1)

    def describe(self) -> list[str]:
        """What was proved, a line each."""
        who = "a server that may do anything" if self.malicious else "a server that keeps to the protocol"
        need = (
            f"2 x {self.threshold} > {self.degree} + {self.colluding}"
            if self.malicious
            else f"{self.threshold} > {self.colluding}"
        )
        return [
            f"{self.protocol} against {who}: {self.least} to {self.most} clients",
            f"threshold {self.threshold} of {self.degree} share holders, {self.colluding} of whom may work with the "
            f"server: {need}",
            f"ring of {self.ring.bits} bits: 2 x {self.most} clients x weight {self.max_weight} x {self.bound} steps "
            f"of 2**-{self.step_bits} + 1 <= 2**{self.ring.bits}; {self.masked_bytes} bytes a masked vector",
        ]


@cache
def _stages(malicious: bool, choosing: bool) -> tuple[Stage, ...]:
    stages = [Stage.ADVERTISE, Stage.SHARE, Stage.MASKED, Stage.UNMASK]
    if choosing:
        stages.insert(1, Stage.CHOOSE)
    if malicious:
        stages.insert(-1, Stage.CONSISTENT)
    return tuple(stages)


def bound_of(section: SecureAggregationSection) -> int:
    """B: the largest magnitude of a clipped value, in steps."""
    return math.ceil(Decimal(str(section.clip)) * (1 << section.step_bits))


def make_plan(
    section: SecureAggregationSection,
    clients: int,
    length: int,
    *,
    least: int = 0,
    bound: int = 0,
    weight: int = 0,
) -> Plan:
    """The plan for iterations of at most ``clients`` clients with vectors of ``length`` elements.

    ``least``: the fewest clients that may be in the sum (0: as few as the threshold allows); devices refuse fewer.
    ``bound``: the largest magnitude of a value in steps, with the noise that is added before masking (0: that of the
    clip). ``weight``: the largest (0: the section's). Raises PlanRefused.
    """
    if section.protocol == "none":
        raise PlanRefused("secure aggregation is off: protocol is secagg or secagg+")
    if not FEWEST_CLIENTS <= clients <= MOST_CLIENTS:
        raise PlanRefused(
            f"an iteration of {clients} clients: secure aggregation takes {FEWEST_CLIENTS} to {MOST_CLIENTS}; "
            "of two, each would know the other's values from the sum"
        )
    if not 1 <= length <= MOST_LENGTH:
        raise PlanRefused(f"a vector of {length} elements: 1 to {MOST_LENGTH} are possible")
    clip_steps, weight = bound_of(section), weight or section.max_weight
    bound = bound or clip_steps
    if bound < clip_steps:
        raise PlanRefused(f"a bound of {bound} steps is below the clip's {clip_steps}")
    try:
        ring = Ring.holding(clients, weight, bound)
    except RingRefused as error:
        raise PlanRefused(str(error)) from None
    degree, threshold, colluding = _holders(section, clients)
    shares_bytes = clients * degree * SEALED_BYTES
    if shares_bytes > MOST_SHARES_BYTES:
        raise PlanRefused(
            f"{clients} clients with {degree} holders each seal {shares_bytes / 2**30:.1f} GiB of shares, and servers "
            "hold 1 GiB: use protocol secagg+, lower dropouts or colluding, or admit fewer clients"
        )
    floor = threshold + 1
    if section.protocol == "secagg+":
        # Fewer, spread evenly, would leave a client without the shares it needs.
        floor = max(floor, -(-clients * threshold // degree))
    least = max(least, floor)
    if least > clients:
        raise PlanRefused(f"{least} clients must remain of {clients}: lower the least or admit more clients")
    surviving = clients - _share(section.dropouts, clients)
    if surviving < least:
        raise PlanRefused(
            f"{surviving} of {clients} clients remain at dropouts {section.dropouts:g}, but {least} are needed: lower "
            + ("dropouts or the round's ratio" if least > floor else "threshold, colluding or dropouts")
            + ", or admit more clients"
        )
    return Plan(
        section.protocol, section.malicious, clients, least, floor, degree, threshold, colluding, length,
        clip_steps, bound, weight, section.step_bits, ring, section.stage_window_s,
    )  # fmt: skip


def _holders(section: SecureAggregationSection, clients: int) -> tuple[int, int, int]:
    """(degree, threshold, colluding holders)."""
    if section.protocol == "secagg":
        if section.neighbours:
            raise PlanRefused(
                "neighbours are for protocol secagg+: in secagg everybody is everybody's neighbour"
            )
        degree = clients - 1
        colluding = min(_share(section.colluding, clients), degree)
    else:
        chosen = _degree(section, clients)
        degree = chosen.k
        colluding = most_colluding(clients, degree, section.colluding)
        if not section.threshold:
            sound = _smallest(degree, colluding, section.malicious)
            return degree, max(chosen.threshold, sound), colluding
    smallest = _smallest(degree, colluding, section.malicious)
    threshold = section.threshold or smallest
    if threshold < smallest:
        rule = "2t > holders + colluding" if section.malicious else "t > colluding"
        raise PlanRefused(
            f"threshold {threshold} of {degree} holders with {colluding} colluding breaks {rule}: "
            f"use {smallest} or more"
        )
    if threshold > degree:
        raise PlanRefused(
            f"threshold {threshold} is above the {degree} holders of a client's shares"
            + ("" if section.threshold else ": lower colluding or admit more clients")
        )
    return degree, threshold, colluding


def _degree(section: SecureAggregationSection, clients: int) -> Degree:
    if section.neighbours:
        degree = section.neighbours
        if degree >= clients:
            raise PlanRefused(f"{degree} neighbours among {clients} clients: use secagg, or fewer neighbours")
        if degree % 2:
            raise PlanRefused(
                f"neighbours must be even, so that a regular graph exists: {degree + 1}, not {degree}"
            )
        colluding = most_colluding(clients, degree, section.colluding)
        threshold = _smallest(degree, colluding, section.malicious)
        if threshold > degree:
            raise PlanRefused(
                f"of {degree} neighbours {colluding} may work with the server: none of their thresholds is sound; "
                "use more neighbours"
            )
        asked = Degree(degree, max(threshold, section.threshold))
        if not holds_together(clients, section.colluding, section.dropouts, asked, section.malicious):
            raise PlanRefused(
                f"with {degree} neighbours of {clients} clients the survivors may fall apart, and the server learn the "
                "sum of each part: use more neighbours, or leave the setting out"
            )
        return asked
    try:
        found = choose(clients, section.colluding, section.dropouts, section.malicious)
    except DegreeRefused as error:
        raise PlanRefused(f"{error}; or use protocol secagg, whose graph is complete") from None
    return found


def _smallest(holders: int, colluding: int, malicious: bool) -> int:
    """The smallest sound threshold; one share alone must never be enough."""
    return max(2, (holders + colluding) // 2 + 1 if malicious else colluding + 1)


def most_colluding(clients: int, degree: int, share: float) -> int:
    """The colluding neighbours that some client has at most, but for a chance of 2**-40 over all ``clients``: the tail
    of the hypergeometric distribution, summed as it stands."""
    bad, others = min(_share(share, clients), clients - 1), clients - 1
    allowed, tail = _FAILURE / clients, 0.0
    for count in range(min(bad, degree), 0, -1):
        if degree - count > others - bad:
            return count
        tail += math.exp(
            _log_choose(bad, count) + _log_choose(others - bad, degree - count) - _log_choose(others, degree)
        )
        if tail > allowed:
            return count
    return 0


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _share(share: float, clients: int) -> int:
    """The most clients that are at most a ``share`` of ``clients``, in decimals."""
    return math.floor(Decimal(str(share)) * clients)
