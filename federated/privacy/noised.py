"""Mechanisms of clipping and noise: at each device, at the server, or a share of it at every device.

=================== =========================================== =============================================
mechanism           a device sends                              the server
=================== =========================================== =============================================
local_gaussian      clipped to L2 norm C, plus N(0, σ²),        adds nothing
                    σ for two clipped vectors: Δ = 2C
local_laplace       clipped to L1 norm C, plus Laplace 2C/ε     adds nothing
central_gaussian    clipped to L2 norm C                        adds N(0, (z·C)²) to the sum, divides it by a
                                                                fixed number
distributed_*       clipped, rounded at random to whole steps;  divides the sum by a fixed number
                    whole noise is added inside the ring
=================== =========================================== =============================================

Only what is trained is sent: BatchNorm statistics and counters are data that no clip bounds. A job either refuses a
model that has them, or sends zeros for them, and the server keeps what it began with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from federated.layout import Layout
from federated.privacy.adaptive import next_clip, noise_left
from federated.privacy.budget import affordable_reports
from federated.privacy.calibration import DistributedNoise as DevicesNoise
from federated.privacy.clipping import Flags, Norm, clip_rows, parts_of
from federated.privacy.discrete import discrete_gaussian, round_within, skellam
from federated.privacy.gaussian import add_gaussian, sigma_of
from federated.privacy.laplace import add_laplace, scale_of
from federated.privacy.protection import Reported, Unprotected, Whole, require_trained, trained_only
from federated.privacy.randomness import Randomness, normal
from federated.privacy.section import PrivacySection
from federated.sums import SCALE, SCALE_BITS, Sum
from federated.weights import Array

VECTOR: Final = "difference"
BIT: Final = "bit"
CLIP: Final = "clip"
"""The scalar of a server's state that an adaptive clip is kept in."""
LARGEST_STEPS: Final = 2.0**24
"""Whole numbers of steps that float32 holds exactly: a clip must have fewer."""
LARGEST_SIGMA: Final = 2.0**16
"""Of central noise. A float64 tells integers of 2**49 from each other by sixteenths; larger noise would leave out odd
integers more and more, and the low bits of a sum would show through (and, much later, it would pass 63 bits)."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What of a job a mechanism needs beside its table.

    ``divisor`` is the fixed number that sums are divided by: how many clients are expected, whoever comes. ``honest``
    is the fewest devices whose noise a sum can count on. A sum rounds its values to steps of 2**-``step_bits``.
    """

    divisor: float = 1.0
    honest: int = 1
    step_bits: int = SCALE_BITS

    def __post_init__(self) -> None:
        if not 0.0 < self.divisor < math.inf or self.honest < 1:
            raise ValueError(f"a sum needs a divisor and an honest device, not {self}")


class _Clipping(Unprotected):
    """What the mechanisms have in common: what is clipped, and how a sum is told from its clients' numbers."""

    norm: Norm = "l2"

    def __init__(self, section: PrivacySection) -> None:
        self.section = section

    def require_layout(self, layout: Layout) -> None:
        """Refuse fields that no clip bounds, unless the job says what becomes of them."""
        require_trained(layout, self.section, "clipping does not bound")

    def _trained(self, layout: Layout, rows: Array) -> Array:
        """``rows`` [B, D] with zeros where a field is not trained, which must be allowed."""
        self.require_layout(layout)
        return trained_only(layout, rows)

    def release(
        self, total: Sum, layout: Layout, randomness: Randomness, threshold: float | None = None
    ) -> Sum:
        """``total`` as if no step had been taken: counters are the server's own."""
        released = Sum(total.size, total.bounds, tuple(total.vectors))
        released.merge(total)
        released.most_steps = 0
        return released

    def _clipped(self, layout: Layout, vectors: Array, clip: float) -> tuple[Array, Flags]:
        """What is trained of ``vectors`` [B, D], clipped, and which were longer."""
        rows = self._trained(layout, vectors)
        return clip_rows(rows, parts_of(layout, clip, self.norm, self.section.per_layer), self.norm)


class LocalNoise(_Clipping):
    """Every report is private by itself, whoever reads it: neighbours are any two clipped vectors, so Δ = 2C."""

    def __init__(self, section: PrivacySection) -> None:
        super().__init__(section)
        self.most_reports = affordable_reports(section)
        self.sensitivity = 2.0 * section.clip
        if section.mechanism == "local_laplace":
            self.norm = "l1"
            self.scale = scale_of(section.epsilon, self.sensitivity)
        else:
            self.scale = sigma_of(section.epsilon, section.delta, self.sensitivity)

    def report(
        self,
        vectors: Mapping[str, Array],
        layout: Layout,
        randomness: Sequence[Randomness],
        start: Array,
        threshold: float | None = None,
    ) -> Reported:
        """The clipped and noised differences; of "weights" what is clipped is ``start`` + difference, and the server,
        which knows ``start``, gets the noised weights less it."""
        whole = self.section.protects == "weights"
        rows = start + vectors[VECTOR] if whole else vectors[VECTOR]
        clipped, beyond = self._clipped(layout, rows, self.section.clip)
        add = add_laplace if self.norm == "l1" else add_gaussian
        noised = np.stack(
            [add(row, self.scale, source) for row, source in zip(clipped, randomness, strict=True)]
        )
        return Reported({VECTOR: self._trained(layout, noised - start if whole else noised)}, None, beyond)


class _FixedDivisor(_Clipping):
    """Sums are divided by a number that was fixed before anybody came: how many came would tell of one client."""

    def __init__(self, section: PrivacySection, around: Circumstances) -> None:
        super().__init__(section)
        self.around = around

    def release(
        self, total: Sum, layout: Layout, randomness: Randomness, threshold: float | None = None
    ) -> Sum:
        """``total`` with the divisor as its weight."""
        released = super().release(total, layout, randomness)
        released.scalars["weight"] = round(self.around.divisor * SCALE)
        return released


class CentralNoise(_FixedDivisor):
    """The server sees every clipped vector, and whoever sees models sees noise of z · C on their sum.

    The sum is of integers, so noise that is rounded to an integer and added is the Gaussian mechanism, rounded: no
    floating-point number of value plus noise exists whose low bits could tell.
    """

    def __init__(self, section: PrivacySection, around: Circumstances) -> None:
        super().__init__(section, around)
        self.multiplier = section.noise_multiplier
        self.answers = section.clipping == "adaptive"
        if self.answers:
            self.multiplier = noise_left(section.noise_multiplier, section.clip_count_noise)
        largest = max(self.multiplier * section.clip, section.clip_count_noise if self.answers else 0.0)
        if largest > LARGEST_SIGMA:
            raise ValueError(
                f"noise of {largest:g} on a sum is beyond {LARGEST_SIGMA:g}, which float64 draws well: lower the clip, "
                "noise_multiplier or clip_count_noise"
            )

    def report(
        self,
        vectors: Mapping[str, Array],
        layout: Layout,
        randomness: Sequence[Randomness],
        start: Array,
        threshold: float | None = None,
    ) -> Reported:
        """The clipped differences; with an adaptive clip, which is the ``threshold``, a bit: whether it was within."""
        clipped, beyond = self._clipped(layout, vectors[VECTOR], self._inner(layout, threshold))
        bits = (~beyond).astype(np.int8) if self.answers else None
        return Reported({VECTOR: clipped}, bits, beyond)

    def admit(self, vectors: Mapping[str, Array], layout: Layout) -> dict[str, Array]:
        """Clipped again, since compression lengthens vectors, and not every client is honest. An adaptive clip is not
        known here: whoever exceeds that one harms the model, nobody's privacy but its own."""
        if self.answers:
            return {VECTOR: self._trained(layout, vectors[VECTOR])}
        return {VECTOR: self._clipped(layout, vectors[VECTOR], self._inner(layout, None))[0]}

    def require_layout(self, layout: Layout) -> None:
        """Refuse a clip that rounding may exceed, too."""
        super().require_layout(layout)
        if self._rounding(layout) > self.section.clip / 2.0:
            raise ValueError(
                f"rounding {layout.size} values to steps of 2**-{self.around.step_bits} may add "
                f"{self._rounding(layout):.3g} to a norm, and the clip is {self.section.clip:g}: raise "
                "secure_aggregation.step_bits, or the clip"
            )

    def _rounding(self, layout: Layout) -> float:
        """What rounding to the steps of the sum may add to a vector's norm."""
        return math.ldexp(math.sqrt(layout.size), -self.around.step_bits - 1)

    def _inner(self, layout: Layout, threshold: float | None) -> float:
        """C less what rounding may add: one client moves the sum of integers by at most C."""
        clip = self.section.clip if threshold is None else threshold
        return max(clip - self._rounding(layout), clip / 2.0)

    def first_scalars(self) -> dict[str, float]:
        """The first clip, if it adapts."""
        return {CLIP: self.section.clip} if self.answers else {}

    def threshold(self, scalars: Mapping[str, float]) -> float | None:
        """The clip, if it adapts."""
        return scalars[CLIP] if self.answers else None

    def release(
        self, total: Sum, layout: Layout, randomness: Randomness, threshold: float | None = None
    ) -> Sum:
        """The sum with noise on all that is trained, and on the number of bits, taken as ±½."""
        released = super().release(total, layout, randomness)
        clip = self.section.clip if threshold is None else threshold
        trained = np.flatnonzero(layout.mask("weight"))
        noise = np.rint(normal(randomness, len(trained)) * (self.multiplier * clip * SCALE))
        released.vectors[VECTOR][trained] += noise.astype(np.int64)
        if self.answers:
            noise_of_bits = float(normal(randomness, 1)[0]) * self.section.clip_count_noise
            centred = total.scalars.get(BIT, 0) - round(total.clients * SCALE / 2.0)
            half = round(self.around.divisor * SCALE / 2.0)
            released.scalars[BIT] = half + centred + round(noise_of_bits * SCALE)
        return released

    def follow(self, scalars: Mapping[str, float], released: Sum) -> dict[str, float]:
        """The next clip, by the noised share of those within this one."""
        if not self.answers:
            return {}
        section, within = self.section, released.mean_scalar(BIT)
        clip = next_clip(scalars[CLIP], within, section.clip_quantile, section.clip_rate)
        return {CLIP: min(clip, LARGEST_SIGMA / self.multiplier)}


class DistributedNoise(_FixedDivisor):
    """Each device adds a share of whole-numbered noise; the sum, all that anybody sees, has enough.

    A report is rounded at random to whole steps within a norm (Kairouz et al. 2021); ``perturb`` adds the share, where
    the steps are taken modulo the ring. Shares are sized so that the ``honest`` fewest make z times that norm.
    """

    def __init__(self, section: PrivacySection, around: Circumstances) -> None:
        super().__init__(section, around)
        self.steps = math.ldexp(1.0, around.step_bits)
        if section.clip * self.steps >= LARGEST_STEPS:
            raise ValueError(
                f"a clip of {section.clip:g} has {section.clip * self.steps:g} steps of 2**-{around.step_bits}: "
                "float32 holds fewer than 2**24; lower secure_aggregation.step_bits"
            )

    def noise(self, layout: Layout) -> DevicesNoise:
        """How much noise a device adds, and the norm that no rounded report exceeds, in steps. Raises ValueError."""
        around = self.around
        return DevicesNoise.of(
            self.section, dimension=layout.trained, step_bits=around.step_bits, honest=around.honest
        )

    def require_layout(self, layout: Layout) -> None:
        """Refuse what cannot be calibrated, too."""
        super().require_layout(layout)
        self.noise(layout)

    def report(
        self,
        vectors: Mapping[str, Array],
        layout: Layout,
        randomness: Sequence[Randomness],
        start: Array,
        threshold: float | None = None,
    ) -> Reported:
        """The clipped differences, each a whole number of steps."""
        clipped, beyond = self._clipped(layout, vectors[VECTOR], self.section.clip)
        bound, places = self.noise(layout).norm, np.flatnonzero(layout.mask("weight"))
        rounded = np.zeros_like(clipped)
        for row, into, source in zip(clipped, rounded, randomness, strict=True):
            steps = row[places].astype(np.float64) * self.steps
            into[places] = round_within(steps, bound, source) / self.steps
        return Reported({VECTOR: rounded}, None, beyond)

    def perturb(self, whole: Whole, layout: Layout, randomness: Randomness) -> Whole:
        """``whole`` [D] with this device's share of noise on what is trained."""
        draw = skellam if self.section.mechanism == "distributed_skellam" else discrete_gaussian
        places = np.flatnonzero(layout.mask("weight"))
        noised = whole.copy()
        noised[places] += draw(randomness, self.noise(layout).local_sigma, len(places))
        return noised
