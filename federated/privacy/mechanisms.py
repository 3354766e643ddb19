"""From the table [privacy] of a job to the mechanism that it names."""

from __future__ import annotations

from federated.privacy.noised import CentralNoise, Circumstances, DistributedNoise, LocalNoise
from federated.privacy.protection import Protection, Unprotected
from federated.privacy.section import DISTRIBUTED, PrivacySection
from federated.privacy.signds import SignDS


def make_protection(section: PrivacySection, around: Circumstances | None = None) -> Protection:
    """The mechanism that ``section`` names, in a job with the circumstances ``around``. Raises ValueError."""
    around = around or Circumstances()
    if section.mechanism == "none":
        return Unprotected()
    if section.mechanism in ("local_gaussian", "local_laplace"):
        return LocalNoise(section)
    if section.mechanism == "central_gaussian":
        return CentralNoise(section, around)
    if section.mechanism in DISTRIBUTED:
        return DistributedNoise(section, around)
    if section.mechanism == "signds":
        return SignDS(section)
    raise ValueError(f"mechanism {section.mechanism} is not here")
