"""SignDS as an adversary sees it: named coordinates, their sign, and a bit; and the exact probability of each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from federated.attacks.likelihoods import Likelihood
from federated.attacks.spread import Floats
from federated.layout import Layout
from federated.privacy.randomness import Randomness, SeededRandomness
from federated.privacy.section import PrivacySection
from federated.privacy.signds import Plan, SignDS, plan_for
from federated.weights import Array

Flags = npt.NDArray[np.bool_]

_LEAST_SPREAD: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Signs:
    """R reports: ``votes`` [R, D], 1 or −1 at the coordinates that each names, else 0; their ``bits`` [R]."""

    votes: Array
    bits: npt.NDArray[np.int8]


@dataclass(frozen=True)
class SignsView:
    """Reports of SignDS against a ``threshold``, on which devices answer by a bit. ``rate`` is what the server makes of
    a vote when it moves the model."""

    section: PrivacySection
    layout: Layout
    threshold: float
    rate: float

    @cached_property
    def plan(self) -> Plan:
        """The probabilities of choices."""
        section = self.section
        return plan_for(
            self.layout.size, section.sign_k, section.sign_eps, section.sign_thr_ratio, section.sign_dim_out
        )

    def observe(self, updates: Array, others: Array, generator: np.random.Generator) -> Signs:
        """Reports as devices make them."""
        sources: list[Randomness] = [SeededRandomness(generator)] * len(updates)
        start = np.zeros(self.layout.size, np.float32)
        reported = SignDS(self.section).report(
            {"difference": updates}, self.layout, sources, start, self.threshold
        )
        assert reported.bits is not None
        return Signs(reported.vectors["difference"], reported.bits)

    def explain(self, companions: Array | None, alike: Array, others: int) -> Likelihood:
        """The mechanism's own probabilities; where the client's other records are not known, and so neither is what is
        largest, how far the votes agree with what the record is likely to add."""
        if companions is not None:
            wide = np.asarray(companions, np.float64)
            return Agreement(wide.std(axis=0) + _LEAST_SPREAD)
        return SignLikelihood(self.plan, self.threshold, self.section.magnitude_epsilon)

    def mean(self, seen: Signs, clients: int) -> Array:
        """Mean votes of ``clients`` reports times the rate."""
        votes = seen.votes.reshape(-1, clients, seen.votes.shape[1])
        means: Array = votes.mean(axis=1) * np.float32(self.rate)
        return means

    def at(self, seen: Signs, places: npt.NDArray[np.int64]) -> Signs:
        """Some of the reports."""
        return Signs(seen.votes[places], seen.bits[places])


@dataclass(frozen=True, slots=True)
class Agreement:
    """Σ vote · expected / ``spread`` [D], the standard deviation of each coordinate over clients."""

    spread: Floats

    def pairs(self, seen: Signs, expected: Array) -> Floats:
        """See ``likelihoods.Likelihood``."""
        return np.asarray(seen.votes.astype(np.float64) @ (expected / self.spread).T)

    def rows(self, seen: Signs, expected: Array) -> Floats:
        """See ``likelihoods.Likelihood``."""
        return np.asarray((seen.votes * (expected / self.spread)).sum(axis=1))


@dataclass(frozen=True, slots=True)
class SignLikelihood:
    """log Pr(coordinates, sign, bit | update): the sign is even and says nothing by itself."""

    plan: Plan
    threshold: float
    epsilon: float

    def pairs(self, seen: Signs, expected: Array) -> Floats:
        """See ``likelihoods.Likelihood``."""
        found = np.empty((len(seen.votes), len(expected)), np.float64)
        signs = seen.votes.sum(axis=1)
        for sign in (1.0, -1.0):
            places = np.flatnonzero(signs * sign > 0.0)
            largest, means = self._largest(expected * np.float32(sign))
            named = (seen.votes[places] != 0.0).astype(np.float32)
            overlaps = np.rint(named @ largest.T.astype(np.float32)).astype(np.int64)
            found[places] = self._choice(overlaps) + self._bit(seen.bits[places][:, None], means[None])
        return found

    def rows(self, seen: Signs, expected: Array) -> Floats:
        """See ``likelihoods.Likelihood``."""
        signs = np.sign(seen.votes.sum(axis=1))
        largest, means = self._largest(expected * signs[:, None])
        overlaps = ((seen.votes != 0.0) & largest).sum(axis=1)
        return self._choice(overlaps) + self._bit(seen.bits, means)

    def _choice(self, overlaps: npt.NDArray[np.int64]) -> Floats:
        known = np.array([self._log_probability(overlap) for overlap in range(self.plan.named + 1)])
        return np.asarray(known[overlaps])

    def _log_probability(self, overlap: int) -> float:
        return -math.inf if math.isinf(self.plan.log_pmf[overlap]) else self.plan.log_probability(overlap)

    def _bit(self, bits: npt.NDArray[np.int8], means: Floats) -> Floats:
        """The chance that randomised response shows ``bits`` for devices with these ``means``."""
        kept = -math.log1p(math.exp(-self.epsilon))
        return np.where(bits == (means < self.threshold), kept, kept - self.epsilon)

    def _largest(self, signed: Array) -> tuple[Flags, Floats]:
        """Which coordinates [B, D] are a row's top k, of equal ones the first, and the mean of those [B]."""
        top = self.plan.top
        order = np.argsort(-signed, axis=1, kind="stable")[:, :top]
        largest = np.zeros(signed.shape, np.bool_)
        np.put_along_axis(largest, order, True, axis=1)
        return largest, np.take_along_axis(signed, order, axis=1).mean(axis=1, dtype=np.float64)
