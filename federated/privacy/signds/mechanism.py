"""SignDS as the mechanism of a job: a report is ±1 at a few coordinates, and one bit on how large they are.

The bit says whether the mean r of the device's top-k signed differences is below the threshold that comes with a model.
It goes through randomised response (Warner 1965): kept with probability P = e^ε / (1 + e^ε). Choice and bit are drawn
independently, so one report is (``sign_eps`` + ``magnitude_epsilon``)-private, δ = 0, whatever the two vectors are that
are told apart: nothing is clipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from federated.layout import Layout
from federated.privacy.budget import affordable_reports
from federated.privacy.protection import Reported, Unprotected, require_trained, trained_only
from federated.privacy.randomness import Randomness
from federated.privacy.section import PrivacySection
from federated.privacy.signds.plan import LARGEST_DIMENSION
from federated.privacy.signds.report import SignReports
from federated.privacy.signds.selection import log_uniform, select
from federated.weights import Array

Bits = npt.NDArray[np.int8]


class SignDS(Unprotected):
    """``section`` is the job's table [privacy]. Raises ValueError for options out of the method's range."""

    answers = True

    def __init__(self, section: PrivacySection) -> None:
        self.section = section
        self.most_reports = affordable_reports(section)
        # With room for every share, what is wrong is the options' fault.
        reports_of(section).plan(LARGEST_DIMENSION)

    def require_layout(self, layout: Layout) -> None:
        """Raise ValueError for a model whose updates cannot be reported: it is too small, or has fields that are not
        trained and the job does not say what becomes of them."""
        require_trained(layout, self.section, "SignDS does not report")
        reports_of(self.section).plan(layout.size)

    @property
    def epsilon(self) -> float:
        """What one report costs; pure, δ = 0."""
        return self.section.sign_eps + self.section.magnitude_epsilon

    def report(
        self,
        vectors: Mapping[str, Array],
        layout: Layout,
        randomness: Sequence[Randomness],
        start: Array,
        threshold: float | None = None,
    ) -> Reported:
        """See ``Protection``: ``difference`` [B, D] becomes ±1 at h places a row. Where a field is not trained nothing
        is largest: its votes are noise, and the server leaves them out."""
        if set(vectors) != {"difference"} or threshold is None:
            raise ValueError(f"SignDS reports the difference against a threshold, not {sorted(vectors)}")
        self.require_layout(layout)
        differences = trained_only(layout, vectors["difference"])
        plan = reports_of(self.section).plan(layout.size)
        selected = select(plan, differences, randomness)
        reports = np.zeros_like(differences)
        np.put_along_axis(reports, selected.places, selected.signs[:, None].astype(np.float32), axis=1)
        below = (selected.magnitudes < threshold).astype(np.int8)
        return Reported(
            {"difference": reports}, randomised(below, self.section.magnitude_epsilon, randomness)
        )


def reports_of(section: PrivacySection) -> SignReports:
    """The scheme that a job's reports travel by."""
    return SignReports(
        (), False, False, section.sign_k, section.sign_eps, section.sign_thr_ratio, section.sign_dim_out
    )


def randomised(bits: Bits, epsilon: float, randomness: Sequence[Randomness]) -> Bits:
    """``bits`` [B], each flipped with probability 1 / (1 + e^``epsilon``)."""
    log_flip = -epsilon - math.log1p(math.exp(-epsilon))
    flips = np.array([log_uniform(one) < log_flip for one in randomness], np.int8)
    return bits ^ flips
