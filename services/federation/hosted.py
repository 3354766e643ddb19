"""A job as a server holds it: everything that its file says, made into the objects that do it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from federated.compression import BodyRefused, Grid, Scheme
from federated.device import INITIAL, LocalTraining, Update, device_generator
from federated.job_sections import IntoSection
from federated.layout import Layout
from federated.models import Model
from federated.payload import decode_update, most_payload, shared_seed, split_bit
from federated.privacy.accounting_statement import Exposure
from federated.privacy.clipping import NotFinite
from federated.privacy.protection import Protection, Unprotected
from federated.privacy.section import SecureAggregationSection
from federated.privacy.server import first_state
from federated.rounds import Keys, Rounds, RoundSettings, Slot, Tickets
from federated.secagg.ring import RingRefused
from federated.secagg.updates import MaskedUpdates
from federated.selection import Selection
from federated.strategies import ServerState, Strategy
from federated.sums import Bounds, Contribution, ContributionRefused, Sum, check
from federated.weights import Array


@dataclass(frozen=True)
class HostedJob:
    """``scheme`` None: uploads are float32. ``grid`` None: downloads are whole models in float32.

    ``key`` is the job's secret: it signs tickets and enrolments. Updates above ``part_bytes`` travel in parts. What is
    learned about ``items`` goes on ``into`` a stack. ``masked`` None: updates travel without masks.
    ``exposure`` is what its protection costs.
    """

    name: str
    model: Model
    strategy: Strategy
    training: LocalTraining
    settings: RoundSettings
    selection: Selection
    seed: int
    key: bytes = field(repr=False)
    scheme: Scheme | None = None
    grid: Grid | None = None
    part_bytes: int = 2**20
    into: IntoSection = field(default_factory=IntoSection)
    items: tuple[str, ...] = ()
    protection: Protection = field(default_factory=Unprotected)
    secure: SecureAggregationSection = field(default_factory=SecureAggregationSection)
    masked: MaskedUpdates | None = None
    exposure: Exposure | None = None

    @cached_property
    def layout(self) -> Layout:
        """How the model's arrays lie in its vector."""
        return self.model.layout()

    @cached_property
    def keys(self) -> Keys:
        """Where it is kept in the store."""
        return Keys(self.name)

    @cached_property
    def rounds(self) -> Rounds:
        """Its rules."""
        return Rounds(self.settings, Tickets(self.name, self.key), self.selection)

    @cached_property
    def bounds(self) -> Bounds:
        """Of every sum. An iteration holds at most as many uploads as starts: an edge's sum may pass the threshold."""
        thresholds = self.settings.thresholds
        return Bounds(max(thresholds.starts_close, thresholds.uploads_close), self.strategy.largest_weight)

    @property
    def vectors(self) -> tuple[str, ...]:
        """The vectors of an update."""
        return tuple(sorted(self.strategy.summed))

    @cached_property
    def most_payload(self) -> int:
        """The longest body of an update."""
        if self.masked is not None:
            return self.masked.plan.masked_bytes
        return most_payload(self.scheme, len(self.vectors), self.layout.size, self.protection.answers)

    def first_state(self, weights: Array | None = None) -> ServerState:
        """The state before the first iteration, from ``weights`` [D]; else a function of the job alone."""
        if weights is None:
            weights = self.model.initial(device_generator(self.seed, 0, 0, INITIAL))
        return first_state(self.strategy, self.protection, self.layout, weights)

    def empty_sum(self) -> Sum:
        """For an iteration's contributions, or a part of them."""
        return Sum(self.layout.size, self.bounds, self.vectors)

    def contribution(
        self, body: bytes, started: int, examples: int, steps: int, loss: float, staleness: int = 0
    ) -> Contribution:
        """What an upload adds. Raises BodyRefused for bytes that the scheme cannot have made, ContributionRefused for
        numbers that break a rule of sums."""
        shared = shared_seed(self.seed, started)
        bit, body = split_bit(body, self.protection.answers)
        decoded = decode_update(self.scheme, body, self.vectors, self.layout.size, shared)
        update = Update(decoded, examples, steps, loss, bit)
        if self.protection.section.mechanism != "none":
            update = self._admitted(decoded, bit)
        whole = self.strategy.contribution(self.layout, update)
        contribution = whole.scaled(self.settings.weight(1, staleness)) if staleness else whole
        check(contribution, self.layout.size, self.bounds, self.vectors)
        return contribution

    def require_body(self, body: bytes, started: int, examples: int, steps: int, loss: float) -> None:
        """Raise BodyRefused or ContributionRefused unless ``body`` can be summed. Of a masked one nothing but its
        length can be said: a sum that its client has spoilt is seen once the masks are off."""
        if self.masked is None:
            self.contribution(body, started, examples, steps, loss)
            return
        if (examples, steps, loss) != (1, 1, 0.0):
            raise ContributionRefused(
                "examples", "a masked update counts as one example, its numbers are in the sum"
            )
        try:
            self.masked.plan.ring.unpack(body, self.masked.plan.length)
        except RingRefused as error:
            raise BodyRefused(str(error)) from error

    def _admitted(self, decoded: Mapping[str, Array], bit: int | None) -> Update:
        """A private report: what it counts as is fixed, whatever the client claims."""
        rows = {name: vector[None] for name, vector in decoded.items()}
        try:
            admitted = self.protection.admit(rows, self.layout)
        except NotFinite as error:
            raise ContributionRefused("not_finite", str(error)) from error
        return Update({name: vector[0] for name, vector in admitted.items()}, 1, 1, 0.0, bit)

    def contribution_of(self, slot: Slot, body: bytes) -> Contribution:
        """What a counted upload adds."""
        return self.contribution(body, slot.started, slot.examples, slot.steps, slot.loss, slot.staleness)
