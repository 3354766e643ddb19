"""What to say of SignDS's options before a job begins, as far as its numbers tell."""

from __future__ import annotations

from typing import Final

from federated.privacy.section import PrivacySection
from federated.privacy.signds.mechanism import reports_of

LARGEST_STEP: Final = 10.0
"""Of a coordinate, in r_est: beyond it jobs were seen to diverge."""
GOOD_STEP: Final = 3.0
"""Jobs that were tuned took 1 to 3."""


def largest_step(section: PrivacySection, dimension: int, clients: int) -> float:
    """The step of a coordinate, in multiples of r_est, when all N ``clients`` have the same D = ``dimension``
    differences: half of them draw the coordinate's sign, of whom E[ν] / k name it, so that it is sign_global_lr · 2 ·
    N · E[ν] / 2k. Raises ValueError for what has no plan."""
    plan = reports_of(section).plan(dimension)
    return section.sign_global_lr * clients * plan.expected / plan.top


def step_warning(section: PrivacySection, dimension: int, clients: int) -> str | None:
    """What to change where steps would be far larger than what devices learned, None where they are not. Raises
    ValueError."""
    step = largest_step(section, dimension, clients)
    if step <= LARGEST_STEP:
        return None
    better = section.sign_global_lr * GOOD_STEP / step
    return (
        f"SignDS steps are up to {step:.3g} times what devices learned, with {clients} of one mind, and training may "
        f"diverge: sign_global_lr {better:.2g} makes it {GOOD_STEP:g}"
    )
