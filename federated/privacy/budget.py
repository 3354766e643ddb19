"""What one client's own reports have cost, and how many its budget affords: what a device keeps account of, without
having to believe a server: not even that the terms are still those of yesterday."""

from __future__ import annotations

import hashlib
from functools import lru_cache

from federated.privacy.composition import gaussian_epsilon, most_within, pure_epsilon
from federated.privacy.gaussian import sigma_of
from federated.privacy.section import LOCAL, PrivacySection


@lru_cache(4096)
def report_epsilon(section: PrivacySection, reports: int) -> float:
    """ε at δ = ``budget_delta`` that so many ``reports`` of one client spend together. Exact for Gaussian noise and for
    SignDS; Laplace noise counts as any ε-private report. Raises ValueError for a mechanism whose reports are not
    private by themselves."""
    if section.mechanism not in LOCAL:
        raise ValueError(f"{section.mechanism} protects the sum of reports, not each of them")
    if section.mechanism == "local_gaussian":
        return gaussian_epsilon(sigma_of(section.epsilon, section.delta), reports, section.budget_delta)
    one = pure_epsilon_of(section)
    return min(reports * one, pure_epsilon(one, reports, section.budget_delta))


@lru_cache(64)
def affordable_reports(section: PrivacySection) -> int | None:
    """The most reports of one client within (``budget_epsilon``, ``budget_delta``); None: no limit, since there is no
    budget, or none of each client."""
    if section.mechanism not in LOCAL or not section.budget_epsilon:
        return None
    return most_within(lambda reports: report_epsilon(section, reports), section.budget_epsilon)


def terms_of(section: PrivacySection) -> bytes:
    """A mark [16] of what one report costs and what may be spent. Reports under other terms are not to be added up as
    if they had cost the same, and a budget that grows once it is spent is none."""
    price = (section.mechanism, section.epsilon, section.delta, section.sign_eps, section.magnitude_epsilon)
    budget = (section.budget_epsilon, section.budget_delta)
    return hashlib.blake2b(repr((price, budget)).encode(), digest_size=16).digest()


def pure_epsilon_of(section: PrivacySection) -> float:
    """ε of one report of Laplace noise, or of SignDS: its choice of coordinates and its magnitude."""
    return (
        section.epsilon
        if section.mechanism == "local_laplace"
        else section.sign_eps + section.magnitude_epsilon
    )
