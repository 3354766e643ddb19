"""Updates under secure aggregation: what a device puts into the ring, and the sum that servers read from it.

One module for devices, servers and the simulator, so that all three mean the same by a masked vector. What is quantised
is what a server would read of an unmasked upload: after compression to the round's shared coordinates, of which alone
the ring holds values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from federated.compression import Scheme
from federated.device import Instructions, Update
from federated.layout import Layout
from federated.payload import shared_seed
from federated.privacy.calibration import DistributedNoise, noise_bound
from federated.privacy.section import PrivacySection, SecureAggregationSection
from federated.rounds.settings import RoundSettings
from federated.secagg.quantise import Integers, Perturb, Quantiser, RingLayout
from federated.secagg.settings import Plan, PlanRefused, bound_of, make_plan
from federated.strategies import Strategy
from federated.sums import Bounds, Contribution, Sum
from federated.weights import Array

_BLOCK: Final = 8192  # coordinates worked on at once, which stay in the cache


@dataclass(frozen=True, slots=True)
class RingUpdate:
    """One client's ``values`` int64 [L] for the ring; how many coordinates were ``clipped``; and ``read`` [D] by name:
    what servers read of it in the sum, which error feedback and SCAFFOLD's control go by."""

    values: Integers
    clipped: int
    read: dict[str, Array]


@dataclass(frozen=True)
class MaskedUpdates:
    """Of one job. ``quantiser`` works on the W coordinates that are sent: all D without a ``scheme``."""

    quantiser: Quantiser
    strategy: Strategy
    layout: Layout
    scheme: Scheme | None
    seed: int

    @property
    def plan(self) -> Plan:
        """What was proved at the job's start."""
        return self.quantiser.plan

    @cached_property
    def bounds(self) -> Bounds:
        """Of sums."""
        return self.quantiser.layout.bounds

    def ring_update(self, update: Update, iteration: int, perturb: Perturb | None = None) -> RingUpdate:
        """What a client sends of ``update``, whose vectors [D] are as a server would read them without masks.
        ``perturb`` adds noise to all D coordinates of the difference. Raises ValuesRefused."""
        contribution = self.strategy.contribution(self.layout, update)
        places = self._places(iteration)
        sent = contribution if places is None else _at(contribution, places)
        quantised = self.quantiser.values(sent, None if perturb is None else self._perturbed(perturb, places))
        plain = self.quantiser.plain(sent).vectors
        read = {name: self._lifted(vector, places) for name, vector in plain.items()}
        return RingUpdate(quantised.values, quantised.clipped, read)

    def to_sum(self, total: Integers, clients: int, iteration: int) -> Sum:
        """The Sum [D] that ``total`` int64 [L], the values of ``clients`` added up, stands for. Raises ValuesRefused
        for one that honest clients cannot have made."""
        found = self.quantiser.to_sum(total, clients)
        places = self._places(iteration)
        if places is None:
            return found
        whole = Sum(self.layout.size, found.bounds, list(found.vectors))
        for name, vector in found.vectors.items():
            whole.vectors[name][places] = vector
        whole.scalars, whole.clients, whole.most_steps = dict(found.scalars), clients, found.most_steps
        return whole

    @property
    def quick(self) -> bool:
        """Whether float32 holds every quantised value: then ``rounded`` may stand for the ring's integers."""
        return self.plan.clip_steps <= 2**24

    def rounded(self, update: Update) -> Contribution:
        """``plain``, of a finite update whose vectors are zero where nothing is sent, quickly: all steps are exact in
        float32, since a step is a power of two and no quantised value has more than 24 bits (``quick``)."""
        contribution = self.strategy.contribution(self.layout, update)
        limit, steps = np.float32(self.plan.clip_steps), np.float32(2.0**self.plan.step_bits)
        vectors = {}
        for name, vector in contribution.vectors.items():
            vectors[name] = np.empty_like(vector)
            for start in range(0, len(vector), _BLOCK):
                q = vectors[name][start : start + _BLOCK]
                np.multiply(vector[start : start + _BLOCK], steps, out=q)
                np.rint(q, out=q)
                np.minimum(q, limit, out=q)
                np.maximum(q, -limit, out=q)
                q *= 1 / steps
        return replace(contribution, vectors=vectors)

    def plain(self, update: Update, iteration: int) -> Contribution:
        """What a client of a plain job would have to contribute [D] for the same bits."""
        contribution = self.strategy.contribution(self.layout, update)
        places = self._places(iteration)
        if places is None:
            return self.quantiser.plain(contribution)
        sent = self.quantiser.plain(_at(contribution, places))
        return replace(sent, vectors={n: self._lifted(v, places) for n, v in sent.vectors.items()})

    def _places(self, iteration: int) -> Integers | None:
        if self.scheme is None:
            return None
        return self.scheme.shared_places(self.layout.size, shared_seed(self.seed, iteration))

    def _lifted(self, vector: Array, places: Integers | None) -> Array:
        if places is None:
            return vector
        whole = np.zeros(self.layout.size, np.float32)
        whole[places] = vector
        return whole

    def _perturbed(self, perturb: Perturb, places: Integers | None) -> Perturb:
        """Noise on D coordinates as noise on those that are sent."""
        if places is None:
            return perturb

        def on_sent(q: Integers) -> Integers:
            whole = np.zeros(self.layout.size, np.int64)
            whole[places] = q
            return perturb(whole)[places]

        return on_sent


def masked_updates(
    section: SecureAggregationSection,
    privacy: PrivacySection,
    rounds: RoundSettings,
    strategy: Strategy,
    layout: Layout,
    scheme: Scheme | None,
    seed: int,
    *,
    noise: DistributedNoise | None = None,
    answers: bool = False,
) -> MaskedUpdates:
    """The job's, with its plan proved for as many clients as may start. ``noise``: what devices add before masking;
    ``answers``: whether reports carry a bit. Raises PlanRefused."""
    weight = 1 if privacy.mechanism != "none" else strategy.largest_weight
    bounds = Bounds(rounds.most_uploads, strategy.largest_weight)
    starts = rounds.thresholds.starts_close
    bound = bound_of(section)
    if noise is not None:
        # No noise of any client, in any coordinate, leaves it but for a probability of 2**-40.
        bound += noise_bound(noise, 1, starts * layout.size)
    zeros = {name: np.zeros(layout.size, np.float32) for name in strategy.summed}
    nothing = Update(zeros, 1, 1, 0.0, 0 if answers else None)
    names = tuple(strategy.contribution(layout, nothing).scalars)
    size = layout.size if scheme is None else len(scheme.shared_places(layout.size, 0))
    try:
        ring = RingLayout(size, strategy.summed, names, bounds, weight, bound, section.step_bits)
    except ValueError as error:
        raise PlanRefused(str(error)) from error
    # Noise is calibrated to the fewest that a sum may hold: devices refuse to unmask one of fewer.
    least = rounds.thresholds.uploads_floor if noise is not None else 0
    plan = make_plan(section, starts, ring.length, least=least, bound=bound, weight=weight)
    if rounds.thresholds.uploads_floor < plan.least:
        raise PlanRefused(
            f"an iteration may end with {rounds.thresholds.uploads_floor} uploads, and {plan.least} are needed to take "
            "the masks off: raise rounds.update_model_ratio, or lower secure_aggregation.threshold or colluding"
        )
    return MaskedUpdates(Quantiser(ring, plan), strategy, layout, scheme, seed)


def start_digest(weights: Array, instructions: Instructions, vectors: Mapping[str, Array]) -> bytes:
    """What devices train from in an iteration, in 32 bytes: the weights [D], what they are asked to do, and the
    server's vectors [D] by name. All devices of a sum must have been given the same."""
    digest = hashlib.blake2b(digest_size=32)
    for name, part in [("weights", weights), *sorted(vectors.items())]:
        digest.update(len(name).to_bytes(2, "little") + name.encode())
        digest.update(len(part).to_bytes(8, "little") + np.ascontiguousarray(part, "<f4").tobytes())
    digest.update(repr(sorted(asdict(instructions).items())).encode())
    return digest.digest()


def _at(contribution: Contribution, places: Integers) -> Contribution:
    vectors = {name: np.ascontiguousarray(vector[places]) for name, vector in contribution.vectors.items()}
    return replace(contribution, vectors=vectors)
