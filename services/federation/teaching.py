"""From what devices teach to what a region serves: their summed gradient is one more push to the parameter servers.

The devices see the vectors of the items that are served, which is public, and answer with the gradient of their own
loss at them (``federated.recommendation``). Summed over a cohort, it goes on through the item tower to each item's own
embedding row, exactly as a trainer's gradient does, and is pushed like one: numbered, applied once by the table's own
optimiser (so the parameter servers are the server side of federated optimisation), replicated to every region. The
dense weights and rows that items share stand still; they are the trainers'.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from federated.recommendation import Liked, Softmax, sum_of
from federated.strategies import Strategy, make_strategy
from federated.sums import Sum
from models.parameters import RETRIEVAL
from models.samples import Watermark
from services.catalogue import Catalogue
from services.parameter_server.types import Keys, Mark, ParameterError, PushReply, Rows
from sync.pushes import Source

if TYPE_CHECKING:
    from models.training import RecommenderModel
    from services.parameter_server.client import ParameterClient

LOG: Final = "federated"
SLOTS: Final = 64
"""Sources that writers share: servers remember each source for ever, so there must not be more and more."""
TRIES: Final = 8
MOST_ITEMS: Final = 50_000
"""Every device's gradient has all items; beyond this, one device's is larger than a phone would send."""

RowNumbers = npt.NDArray[np.int64]


class NotTaught(ParameterError):
    """A push was refused, or its slot is another writer's: what the devices of a round found was not learned."""


@dataclass(frozen=True, slots=True)
class Taught:
    """One push: its number, when it was sent and when the last leader had it (Unix ms), the items' rows in the
    catalogue and how far each one's embedding was asked to move ``strength`` [N] (the norm of its gradient)."""

    number: int
    sent_at_ms: float
    applied_at_ms: float
    items: RowNumbers
    strength: npt.NDArray[np.float64]


class FederatedWriter:
    """Pushes gradients to the item rows of a model, one push at a time. One thread. Another writer that drew the same
    slot is noticed by the answers ``gap`` and ``duplicate``."""

    def __init__(
        self,
        client: ParameterClient,
        model: str,
        slot: int,
        now_ns: Callable[[], int] = time.time_ns,
        log: str = LOG,
    ) -> None:
        """``slot`` in [0, SLOTS): drawn at random, it is seldom another's. ``log``: whose pushes they are."""
        self._client, self._model, self._now_ns = client, model, now_ns
        self.source = Source(log, slot)
        self._before: dict[int, int] = {}
        self._last = 0
        self._looked = False

    def push(self, keys: Keys, gradients: Rows) -> tuple[int, float, float]:
        """Push gradients [N, d] of the retrieval rows ``keys`` [N], each once. Returns number, time sent and time
        applied (Unix ms). Raises NotTaught, and ParametersUnavailable where servers are away."""
        if not self._looked:
            self._look()
        sent_ns = self._now_ns()
        # The clock's microseconds, so that no number comes twice, not even after servers lost everything.
        self._last = max(sent_ns // 1_000, self._last + 1)
        return self._last, sent_ns / 1e6, self._send(self._last, sent_ns, keys, gradients)

    def repeat(self, number: int, sent_ns: int, keys: Keys, gradients: Rows) -> float:
        """Push what has its ``number`` and its time already, and which another process may have pushed, all or in
        part, before it ended: each shard takes it once. Returns the time applied (Unix ms). Raises as ``push``."""
        self._look()
        # A push follows an older one; who has this one already answers ``duplicate``, whatever it is said to follow.
        self._before = {shard: min(applied, number - 1) for shard, applied in self._before.items()}
        return self._send(number, sent_ns, keys, gradients)

    def _send(self, number: int, sent_ns: int, keys: Keys, gradients: Rows) -> float:
        for _ in range(TRIES):
            replies = self._try(number, sent_ns, keys, gradients)
            if refused := [reply for reply in replies.values() if reply.status == "refused"]:
                self._look()
                raise NotTaught(f"a federated update was refused: {refused[0].reason}")
            # A repeat of the same number is answered ``duplicate`` by the shards that have it already.
            if all(reply.applied == number for reply in replies.values()):
                self._before = dict.fromkeys(replies, number)
                return self._now_ns() / 1e6
            if any(reply.applied > number for reply in replies.values()):
                break
            # Who has it already answers ``duplicate``, whatever it is said to follow; a push follows an older one.
            self._before = {shard: min(of.applied, number - 1) for shard, of in replies.items()}
        self._look()
        raise NotTaught(
            f"slot {self.source.partition} of {self.source.log} among the federated updates is another writer's"
        )

    def _try(self, number: int, sent_ns: int, keys: Keys, gradients: Rows) -> dict[int, PushReply]:
        at_ms = sent_ns // 1_000_000
        mark = Watermark(self.source.log, self.source.partition, number, at_ms)
        parts = {RETRIEVAL: (keys, gradients)}
        return self._client.push(self._model, self.source, number, self._before, at_ms, mark, parts)

    def _look(self) -> None:
        applied = self._client.applied(self._model, self.source)
        self._before = {shard: of.applied for shard, of in applied.items()}
        self._last = max([self._last, *self._before.values()])
        self._looked = True


class Teacher:
    """Rounds of federated learning on the served items. One thread."""

    def __init__(
        self,
        client: ParameterClient,
        writer: FederatedWriter,
        model: RecommenderModel,
        name: str,
        catalogue: Catalogue,
        items: RowNumbers,
        now_ms: int,
    ) -> None:
        """``items``: the catalogue's rows that devices may see, in the order of their own numbering.

        Raises ValueError for no item or too many.
        """
        if not 1 <= len(items) <= MOST_ITEMS:
            raise ValueError(f"devices learn about 1 to {MOST_ITEMS:,} items, not {len(items):,}")
        self._client, self._writer, self._model, self._name = client, writer, model, name
        self._items = items
        self._encoded = catalogue.encoded(items, now_ms)
        self._keys = model.item_keys(self._encoded)[RETRIEVAL]
        self._own = np.searchsorted(self._keys, model.item_own_keys(self._encoded))
        self.objective = Softmax(model.config.retrieval_dim, model.config.temperature)
        # Devices count alike, as samples do in a trainer's push.
        self.strategy: Strategy = make_strategy("fedsgd", max_examples=1)

    def vectors(self) -> tuple[Rows, Rows, Rows]:
        """What devices download: the items' vectors [N, d]; with the rows [U, d] and dense weights they come from.
        Raises ParameterError."""
        rows = self._client.pull(self._name, {RETRIEVAL: self._keys}).rows[RETRIEVAL]
        dense = self._client.dense(self._name).values
        return self._model.encode_items(self._encoded, {RETRIEVAL: rows}, dense), rows, dense

    def gradients(self, at_vectors: Rows) -> tuple[Keys, Rows]:
        """What to push for a loss whose gradient at the served vectors is ``at_vectors`` [N, d]: keys [N] and gradients
        [N, d] of the items' own rows, through the item tower as it is now. Raises ParameterError."""
        _, rows, dense = self.vectors()
        return self._at_rows(at_vectors, rows, dense)

    def _at_rows(self, at_vectors: Rows, rows: Rows, dense: Rows) -> tuple[Keys, Rows]:
        found = self._model.item_row_gradients(self._encoded, {RETRIEVAL: rows}, dense, at_vectors)
        return self._keys[self._own], found[self._own]

    def others(self) -> Mapping[tuple[str, int], Mark]:
        """How far everybody else has taught the model: equal answers before and after a round say that only devices
        did in between. Raises ParameterError."""
        marks = self._client.pull(self._name, {RETRIEVAL: self._keys[:1]}, followers=False).watermarks
        own = (self._writer.source.log, self._writer.source.partition)
        return {source: mark for source, mark in marks.items() if source != own}

    def round(self, liked: Liked, devices: npt.NDArray[np.int64], weight: float) -> tuple[Taught, Sum]:
        """Let ``devices`` learn from the served vectors, and push the sum of what they found: each counts as ``weight``
        samples of a trainer. Raises ParameterError, and ContributionRefused where a vector broke the bounds."""
        vectors, rows, dense = self.vectors()
        total = sum_of(self.strategy, self.objective, vectors, liked, devices)
        mean = total.mean().reshape(vectors.shape)
        at_vectors = (-weight * len(devices) * mean).astype(np.float32)
        keys, gradients = self._at_rows(at_vectors, rows, dense)
        number, sent_at_ms, applied_at_ms = self._writer.push(keys, gradients)
        strength = np.sqrt(np.square(gradients, dtype=np.float64).sum(axis=1))
        return Taught(number, sent_at_ms, applied_at_ms, self._items, strength), total
