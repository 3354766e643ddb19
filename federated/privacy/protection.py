"""What protects a job's clients, as two hooks: ``report`` at the device, ``release`` at the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from federated.device import Update
from federated.layout import Layout
from federated.privacy.randomness import Randomness
from federated.privacy.section import PrivacySection
from federated.sums import Sum
from federated.weights import Array


@dataclass(frozen=True, slots=True)
class Reported:
    """What B devices may send: ``vectors`` [B, D] by name, and their ``bits`` [B], where they answer by one."""

    vectors: dict[str, Array]
    bits: npt.NDArray[np.int8] | None = None


class Protection(Protocol):
    """The mechanism of a job. Every method is pure but for the ``randomness`` that it is given."""

    @property
    def section(self) -> PrivacySection:
        """The table that it was made of."""
        ...

    @property
    def answers(self) -> bool:
        """Whether devices answer the strategy's threshold by a bit, which is then part of every report."""
        ...

    def report(
        self,
        vectors: Mapping[str, Array],
        layout: Layout,
        randomness: Sequence[Randomness],
        start: Array,
        threshold: float | None = None,
    ) -> Reported:
        """What B devices may send of what they learned from the weights ``start`` [D]: ``vectors`` [B, D] by name,
        each row with a randomness of its own, the same bits as one by one; ``threshold`` is what they compare with.
        Raises ValueError for what is not finite."""
        ...

    def release(self, total: Sum, layout: Layout, randomness: Randomness) -> Sum:
        """The sum that the strategy may see; ``total`` is not changed."""
        ...


class Unprotected:
    """No mechanism: everything passes."""

    section = PrivacySection()
    answers = False

    def report(
        self,
        vectors: Mapping[str, Array],
        layout: Layout,
        randomness: Sequence[Randomness],
        start: Array,
        threshold: float | None = None,
    ) -> Reported:
        """``vectors`` as they are."""
        return Reported(dict(vectors))

    def release(self, total: Sum, layout: Layout, randomness: Randomness) -> Sum:
        """``total`` as it is."""
        return total


def report_update(
    protection: Protection,
    update: Update,
    layout: Layout,
    randomness: Randomness,
    start: Array,
    threshold: float | None = None,
) -> Update:
    """What one device may send of ``update``, trained from the weights ``start`` [D]. Under a mechanism how many
    examples it has, how many steps it took and its loss are data, too: it counts as one of each, at loss 0."""
    if protection.section.mechanism == "none":
        return update
    rows = {name: vector[None] for name, vector in update.vectors.items()}
    reported = protection.report(rows, layout, [randomness], start, threshold)
    bit = None if reported.bits is None else int(reported.bits[0])
    return Update({name: vector[0] for name, vector in reported.vectors.items()}, 1, 1, 0.0, bit)


def make_protection(section: PrivacySection) -> Protection:
    """The mechanism that ``section`` names. Raises ValueError."""
    if section.mechanism == "none":
        return Unprotected()
    raise ValueError(f"mechanism {section.mechanism} is not here")
