"""What protects a job's clients: hooks at the device (``report``, ``perturb``) and at the server (``admit``,
``release``, ``follow``).

``Unprotected`` leaves everything as it is; mechanisms derive from it and say what they change.
"""

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

Whole = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Reported:
    """What B devices may send: ``vectors`` [B, D] by name, and their ``bits`` [B], where they answer by one.
    ``clipped`` [B] says whose vector was too long, where there is a clip: it stays at the device."""

    vectors: dict[str, Array]
    bits: npt.NDArray[np.int8] | None = None
    clipped: npt.NDArray[np.bool_] | None = None


class Protection(Protocol):
    """The mechanism of a job. Every method is pure but for the ``randomness`` that it is given."""

    @property
    def section(self) -> PrivacySection:
        """The table that it was made of."""
        ...

    @property
    def answers(self) -> bool:
        """Whether devices answer a threshold by a bit, which is then part of every report."""
        ...

    @property
    def most_reports(self) -> int | None:
        """How many reports one device may send before its own budget is spent; None without such a budget."""
        ...

    def require_layout(self, layout: Layout) -> None:
        """Raise ValueError for a model whose fields the mechanism does not protect."""
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

    def perturb(self, whole: Whole, layout: Layout, randomness: Randomness) -> Whole:
        """``whole`` [D], a report in whole steps of the ring of secure aggregation, with this device's noise."""
        ...

    def admit(self, vectors: Mapping[str, Array], layout: Layout) -> dict[str, Array]:
        """What the server takes of uploads [B, D], whatever a device or its compression made of the clip."""
        ...

    def first_scalars(self) -> dict[str, float]:
        """What the server's state keeps for the mechanism, before the first iteration."""
        ...

    def threshold(self, scalars: Mapping[str, float]) -> float | None:
        """What devices compare with in the iteration that begins from a state of these scalars, if the mechanism, and
        not the strategy, says it."""
        ...

    def release(
        self, total: Sum, layout: Layout, randomness: Randomness, threshold: float | None = None
    ) -> Sum:
        """The sum that the strategy may see; ``total`` is not changed. ``threshold`` is that of its uploads."""
        ...

    def follow(self, scalars: Mapping[str, float], released: Sum) -> dict[str, float]:
        """What replaces ``scalars`` of the state once ``released`` is applied."""
        ...


class Unprotected:
    """No mechanism: everything passes."""

    section = PrivacySection()
    answers = False
    most_reports: int | None = None

    def require_layout(self, layout: Layout) -> None:
        """Any."""

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

    def perturb(self, whole: Whole, layout: Layout, randomness: Randomness) -> Whole:
        """``whole`` as it is."""
        return whole

    def admit(self, vectors: Mapping[str, Array], layout: Layout) -> dict[str, Array]:
        """``vectors`` as they are."""
        return dict(vectors)

    def first_scalars(self) -> dict[str, float]:
        """Nothing."""
        return {}

    def threshold(self, scalars: Mapping[str, float]) -> float | None:
        """The strategy's."""
        return None

    def release(
        self, total: Sum, layout: Layout, randomness: Randomness, threshold: float | None = None
    ) -> Sum:
        """``total`` as it is."""
        return total

    def follow(self, scalars: Mapping[str, float], released: Sum) -> dict[str, float]:
        """Nothing."""
        return {}


def without_diverged(vectors: Mapping[str, Array]) -> tuple[dict[str, Array], npt.NDArray[np.bool_]]:
    """``vectors`` [B, D] with zeros in every row of which something is not finite, and which those are [B]. Whether
    training diverged is data: a device that then sent nothing would tell it without noise."""
    rows = [np.isfinite(vector).all(axis=1) for vector in vectors.values()]
    diverged = ~np.logical_and.reduce(rows)
    if not diverged.any():
        return dict(vectors), diverged
    return {
        name: np.where(diverged[:, None], np.float32(0.0), vector) for name, vector in vectors.items()
    }, diverged


def report_update(
    protection: Protection,
    update: Update,
    layout: Layout,
    randomness: Randomness,
    start: Array,
    threshold: float | None = None,
) -> Update:
    """What one device may send of ``update``, trained from the weights ``start`` [D]. Under a mechanism how many
    examples it has, how many steps it took and its loss are data, too: it counts as one of each, at loss 0. One that
    is not finite is reported as if nothing had been learned."""
    if protection.section.mechanism == "none":
        return update
    rows, _ = without_diverged({name: vector[None] for name, vector in update.vectors.items()})
    reported = protection.report(rows, layout, [randomness], start, threshold)
    bit = None if reported.bits is None else int(reported.bits[0])
    return Update({name: vector[0] for name, vector in reported.vectors.items()}, 1, 1, 0.0, bit)


def require_trained(layout: Layout, section: PrivacySection, cannot: str) -> None:
    """Raise ValueError for a field that is not trained, unless the job says what becomes of it; ``cannot``: what the
    mechanism does not do to one."""
    other = [field for field in layout.fields if field.kind != "weight"]
    if other and section.statistics == "refuse":
        raise ValueError(
            f"{other[0].name} is a {other[0].kind}, which {cannot}: set privacy.statistics = "
            '"keep" (it is not sent, and the server keeps what it began with), or take a model without'
        )


def trained_only(layout: Layout, rows: Array) -> Array:
    """``rows`` [B, D] with zeros where a field is not trained."""
    if layout.only_weights:
        return rows
    return np.where(layout.mask("weight"), rows, np.float32(0.0))
