"""What an adversary sees of a client's update under each mechanism.

=============== ===================================================== ==============================================
view            the adversary sees                                    and judges a candidate by
=============== ===================================================== ==============================================
``Sent``        a client's body, decoded                              its distance, or direction where it is coded
``LocalNoise``  a client's report: clipped, with noise                the likelihood of the noise that is left over
``SignsView``   a client's SignDS report (module ``signs``)           its exact probability
``Masked``      one client's masked words of secure aggregation       their distance, as good as anything
``Summed``      the sum of n clients, perhaps with noise              the likelihood of what is left over: noise, and
                                                                      clients that it does not know
=============== ===================================================== ==============================================

The adversary knows the mechanism with all its numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from federated.attacks.likelihoods import Clip, Laplace, Likelihood, Normal, Pointing, unchanged
from federated.attacks.spread import Floats, spread_of
from federated.compression import Scheme
from federated.layout import Layout
from federated.privacy.protection import Protection
from federated.privacy.randomness import Randomness, SeededRandomness
from federated.secagg.ring import Ring
from federated.weights import Array

Places = npt.NDArray[np.int64]


class View(Protocol):
    """What one adversary sees, and what it can make of it."""

    def observe(self, updates: Array, others: Array, generator: np.random.Generator) -> Any:
        """What is seen of clients with ``updates`` [R, D], in cohorts with ``others`` [R, n − 1, D]: R rows."""
        ...

    def explain(self, companions: Array | None, alike: Array, others: int) -> Likelihood:
        """How to judge what was seen. ``companions`` [Q, D]: updates as far as the attacked client's other records
        decide them, where those are not known; ``alike`` [Q, D]: updates like those of the ``others`` clients."""
        ...


class Reports(View, Protocol):
    """A view of single reports, out of which the server makes its mean."""

    def mean(self, seen: Any, clients: int) -> Array:
        """The steps [K, D] of K cohorts of ``clients``, whose reports were seen one after the other."""
        ...

    def at(self, seen: Any, places: Places) -> Any:
        """Some of the rows that were seen."""
        ...


@dataclass(frozen=True)
class Sent:
    """A client's ``clipped`` update as the server reads it from the body, compressed by ``scheme`` or not."""

    scheme: Scheme | None = None
    clipped: Clip = unchanged
    shared: int = 0

    def observe(self, updates: Array, others: Array, generator: np.random.Generator) -> Array:
        """Decoded bodies [R, D]."""
        if self.scheme is None:
            return self.clipped(updates)
        return self.scheme.encode_batch(
            self.clipped(updates), generator.spawn(len(updates)), None, self.shared
        ).decoded

    def explain(self, companions: Array | None, alike: Array, others: int) -> Likelihood:
        """Distances from what is expected; of coded updates directions, unless the client's other records, not known,
        blur what it would code."""
        if companions is None and self.scheme is not None:
            return Pointing(self._coded)
        samples = [] if companions is None else [(self._coded(companions), 1.0)]
        return Normal(spread_of(samples, 0.0, alike.shape[1]), self.clipped)

    def mean(self, seen: Array, clients: int) -> Array:
        """Means of ``clients`` reports."""
        return _means(seen, clients)

    def at(self, seen: Array, places: Places) -> Array:
        """Some of the reports."""
        return seen[places]

    def _coded(self, updates: Array) -> Array:
        return self.observe(updates, updates[:, None], np.random.Generator(np.random.Philox(0)))


@dataclass(frozen=True)
class LocalNoise:
    """A report under local_gaussian or local_laplace, from the weights ``start`` [D]: the ``clipped`` update with noise
    of standard deviation, or of Laplace's, ``scale``."""

    protection: Protection
    layout: Layout
    start: Array
    clipped: Clip
    scale: float

    def observe(self, updates: Array, others: Array, generator: np.random.Generator) -> Array:
        """Reports [R, D] as devices make them."""
        sources: list[Randomness] = [SeededRandomness(generator)] * len(updates)
        reported = self.protection.report({"difference": updates}, self.layout, sources, self.start)
        return reported.vectors["difference"]

    def explain(self, companions: Array | None, alike: Array, others: int) -> Likelihood:
        """The noise, and with Gaussian noise also what is not known of the client's other records."""
        if self.protection.section.mechanism == "local_laplace":
            return Laplace(self.scale, self.clipped)
        samples = [] if companions is None else [(self.clipped(companions), 1.0)]
        return Normal(spread_of(samples, self.scale**2, alike.shape[1]), self.clipped)

    def mean(self, seen: Array, clients: int) -> Array:
        """Means of ``clients`` reports."""
        return _means(seen, clients)

    def at(self, seen: Array, places: Places) -> Array:
        """Some of the reports."""
        return seen[places]


@dataclass(frozen=True)
class Masked:
    """The masked words that one of ``clients`` clients sends, read as numbers: quantised to multiples of
    2**-``step_bits``, at most ``clip`` each, plus masks whose seeds the adversary does not have."""

    clients: int
    clip: float
    step_bits: int

    @cached_property
    def ring(self) -> Ring:
        """Where masks are added."""
        return Ring.holding(self.clients, 1, int(self.clip * 2**self.step_bits))

    def observe(self, updates: Array, others: Array, generator: np.random.Generator) -> Floats:
        """The words' numbers [R, D]. A mask for each pair with another client and one of its own, as in the protocol;
        with the seeds of all other clients the last one is left."""
        from federated.secagg.masks import add_masks

        steps = np.rint(np.clip(updates, -self.clip, self.clip) * 2.0**self.step_bits).astype(np.int64)
        seen = np.empty(updates.shape, np.float64)
        for row, values in zip(seen, steps, strict=True):
            words = self.ring.of(values)
            signs = [1, *(1 if coin else -1 for coin in generator.random(self.clients - 1) < 0.5)]
            add_masks(words, [(generator.bytes(32), sign) for sign in signs], self.ring)
            row[:] = self.ring.signed(words) * 2.0**-self.step_bits
        return seen

    def explain(self, companions: Array | None, alike: Array, others: int) -> Likelihood:
        """Distances: every candidate makes uniform words equally likely, so that no score does better."""
        return Normal(spread_of([], 0.0, alike.shape[1]), unchanged)


Release = Callable[[Array, np.random.Generator], Floats]
"""What becomes of a cohort's updates [n, D]: the sum [D] that is seen."""


@dataclass(frozen=True)
class Summed:
    """The sum of a cohort as ``release`` gives it: ``clipped`` is what a device sends of its update, ``sigma`` the
    standard deviation of the noise in the sum. The adversary ``knows`` the other clients' updates (they all work with
    it), or only how such are spread."""

    release: Release
    clipped: Clip
    sigma: float
    knows: bool

    def observe(self, updates: Array, others: Array, generator: np.random.Generator) -> Floats:
        """Sums [R, D], less what the adversary knows."""
        seen = np.empty(updates.shape, np.float64)
        for row, own, rest in zip(seen, updates, others, strict=True):
            row[:] = self.release(np.concatenate([own[None], rest]), generator)
            if self.knows:
                row -= self.clipped(rest).sum(axis=0, dtype=np.float64)
        return seen

    def explain(self, companions: Array | None, alike: Array, others: int) -> Likelihood:
        """Noise, the clients that are not known, and the client's other records if they are not."""
        unknown, sent = 0 if self.knows else others, self.clipped(alike)
        samples = [(sent, float(unknown))]
        if companions is not None:
            samples.append((self.clipped(companions), 1.0))
        spread = spread_of(samples, self.sigma**2, alike.shape[1])
        return Normal(spread, self.clipped, unknown * sent.mean(axis=0, dtype=np.float64))


def _means(seen: Array, clients: int) -> Array:
    means: Array = seen.reshape(-1, clients, seen.shape[1]).mean(axis=1)
    return means
