"""Sums under secure aggregation in the simulator: the servers' integers, with or without the masks around them.

``sums`` adds the very vectors that devices would mask, so the bits are those of the protocol at the cost of adding them
up. ``protocol`` makes every message of every stage, in one process: clients who started and brought nothing count as
dropped once they had shared, which is what costs the servers most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from federated.device import NOISE, Update, device_generator
from federated.layout import Layout
from federated.privacy.protection import Protection, Whole
from federated.privacy.randomness import SeededRandomness
from federated.privacy.section import DISTRIBUTED
from federated.secagg.quantise import ValuesRefused
from federated.secagg.stages import Stage
from federated.secagg.updates import MaskedUpdates
from federated.sums import Sum, add_all
from federated.weights import Array


class MasksStay(RuntimeError):
    """The masks of an iteration do not come off: it has no sum."""


class MaskedSum:
    """One iteration's. ``messages``: whether every message is made. ``started`` clients began."""

    def __init__(
        self,
        masked: MaskedUpdates,
        protection: Protection,
        seed: int,
        iteration: int,
        *,
        messages: bool,
        started: int,
    ) -> None:
        self._masked, self._protection, self._seed = masked, protection, seed
        self._iteration, self._started = iteration, started
        self._noisy = protection.section.mechanism in DISTRIBUTED
        # Noise may leave float32, and every message needs every vector.
        self._quick = masked.quick and not messages and not self._noisy
        self._messages = messages
        self._sum = Sum(masked.layout.size, masked.bounds, masked.strategy.summed)
        self._total = np.zeros(0 if self._quick else masked.plan.length, np.int64)
        self._inputs: dict[str, Whole] = {}
        self.clients = 0

    def add(self, clients: Sequence[int], updates: Sequence[Update]) -> list[Mapping[str, Array] | None]:
        """Take clients' updates [D]; gives what servers read of each in the sum, None for one that cannot be masked."""
        if not self._quick:
            return [self._add(*pair) for pair in zip(clients, updates, strict=True)]
        contributions = [self._masked.rounded(update) for update in updates]
        add_all(self._sum, contributions)
        self.clients += len(contributions)
        return [contribution.vectors for contribution in contributions]

    def _add(self, client: int, update: Update) -> Mapping[str, Array] | None:
        try:
            ring = self._masked.ring_update(update, self._iteration, self._noise(client))
        except ValuesRefused:
            return None
        self.clients += 1
        if self._messages:
            self._inputs[str(client)] = ring.values
        else:
            self._total += ring.values
        return ring.read

    def total(self) -> Sum:
        """The sum of all that was taken. Raises MasksStay."""
        if self.clients < self._masked.plan.least:
            raise MasksStay(f"{self.clients} masked vectors, {self._masked.plan.least} are needed")
        if self._quick:
            self._sum.most_steps = -(-self._sum.scalars["steps"] // self.clients)  # as the protocol tells it
            return self._sum
        total = self._unmasked() if self._messages else self._total
        try:
            return self._masked.to_sum(total, self.clients, self._iteration)
        except ValuesRefused as error:
            raise MasksStay(str(error)) from error

    def _unmasked(self) -> Whole:
        from federated.secagg.local import run
        from federated.secagg.roster import Context

        lost = {f"lost-{number}": Stage.MASKED for number in range(self._started - self.clients)}
        nothing = np.zeros(self._masked.plan.length, np.int64)
        inputs = self._inputs | dict.fromkeys(lost, nothing)
        outcome = run(self._masked.plan, inputs, lost, context=Context("simulated", self._iteration))
        if outcome.total is None:
            raise MasksStay(outcome.reason)
        return outcome.total

    def _noise(self, client: int) -> Callable[[Whole], Whole] | None:
        if not self._noisy:
            return None
        layout: Layout = self._masked.layout
        source = SeededRandomness(device_generator(self._seed, client, self._iteration, NOISE))
        return lambda whole: self._protection.perturb(whole, layout, source)
