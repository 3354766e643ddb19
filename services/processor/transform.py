"""The heart of the processor: a batch of events in; cells to write and micro-batches of samples out.

No I/O. In and out are plain values; what is changed in place is the catalogue (new items, counts ahead of the
store) and the samplers of negatives, both of which a restarted processor builds anew.

Rules:

- Events of one user are applied in the order of the log, and a sample sees its user as before its event.
- A sample sees the item counters as of before the batch; they move on after it.
- Event time drives counters and expiry, and late events are as good as any; acceptance drives freshness.
- A probe makes a sample that counts for nothing, so that it costs each stage what a like costs. It writes no
  cell: neither users nor items nor counters nor samplers know of it.
- An event at or below what a user or counter has applied is not applied again; its sample is made all the
  same, without the event itself. The log decides whether that sample is the first (``transact``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from featurestore.online import Cell, EntityKey
from featurestore.schema import Schema
from models.negatives import NegativeSampler
from models.samples import MicroBatch, Watermark
from services.catalogue import Catalogue
from services.events import Event, Impression, Interaction, ItemEvent, Probe, UserEvent
from services.processor.items import ItemUpdates, Likes, count_likes, merge_attributes
from services.processor.records import Incoming
from services.processor.sampling import Recipe, Sample, micro_batches
from services.processor.users import Bounds, User

WATERMARK: Final = "watermark"
"""The entity that says how far the online store is: id ``incarnation/partition``, cells ``offset`` and
``accepted_at_ms``."""
NEGATIVE_ACTIONS: Final = frozenset({"dislike", "hide"})
"""Actions that make a sample which was not liked."""
RATING: Final = "rating"

Cells = Mapping[str, Cell]
Stored = Mapping[EntityKey, Cells]


@dataclass(frozen=True, slots=True)
class Labels:
    """Which interactions say what."""

    positive_actions: frozenset[str]
    rating_threshold: float

    def of(self, event: Interaction) -> bool | None:
        """Liked or not; None if the interaction makes no sample (it only marks the item as seen)."""
        if event.action == RATING:
            return event.value is not None and event.value >= self.rating_threshold
        if event.action in self.positive_actions:
            return True
        return False if event.action in NEGATIVE_ACTIONS else None


@dataclass(frozen=True, slots=True)
class Context:
    """What stays the same from batch to batch."""

    recipe: Recipe
    labels: Labels
    bounds: Bounds
    tag: int
    """The incarnation of the events log as 64 bits (``counters.log_tag``)."""

    @property
    def schema(self) -> Schema:
        return self.recipe.encoder.schema


@dataclass(slots=True)
class Outcome:
    """What a batch comes to. ``deletes`` go before ``writes``."""

    deletes: list[EntityKey] = field(default_factory=list)
    writes: dict[EntityKey, dict[str, Cell]] = field(default_factory=dict)
    batches: list[MicroBatch] = field(default_factory=list)


def wanted(events: Sequence[Incoming], catalogue: Catalogue, labels: Labels) -> list[EntityKey]:
    """The rows of the online store that ``transform`` needs, each once."""
    keys: dict[EntityKey, None] = {}
    for incoming in events:
        event = incoming.event
        if isinstance(event, Interaction):
            keys[EntityKey("user", event.user_id)] = None
            if labels.of(event) or catalogue.row(event.item_id) is None:
                keys[EntityKey("item", event.item_id)] = None
        elif isinstance(event, ItemEvent):
            keys[EntityKey("item", event.item_id)] = None
        elif isinstance(event, Probe):
            keys[EntityKey("user", _stranger(event))] = None  # nobody; but a like reads a user, too
        else:
            keys[EntityKey("user", event.user_id)] = None
            if isinstance(event, Impression):
                new = (item for item in event.item_ids if catalogue.row(item) is None)
                keys.update((EntityKey("item", item), None) for item in new)
    return list(keys)


def transform(
    events: Sequence[Incoming],
    ends: Sequence[Watermark],
    stored: Stored,
    catalogue: Catalogue,
    samplers: Mapping[int, NegativeSampler],
    context: Context,
) -> Outcome:
    """Work a batch through.

    ``events``: usable and not seen before, in the order of the log per partition. ``ends``: per partition of
    the batch, its last record, usable or not. ``stored``: the cells of ``wanted`` (keys may be missing).
    ``samplers``: one per partition of ``ends``.
    """
    batch = _Batch(stored, catalogue, context)
    batch.introduce(events)
    for incoming in events:
        batch.apply(incoming)
    outcome = Outcome()
    batch.settle(outcome)
    for end in ends:
        samples = batch.samples.get(end.partition, ())
        sampler = samplers[end.partition]
        marked = end.partition in batch.unsampled
        outcome.batches.extend(micro_batches(samples, end, catalogue, sampler, context.recipe, marked=marked))
        outcome.writes[watermark_key(end.log, end.partition)] = {
            "offset": Cell(end.offset, end.accepted_at_ms),
            "accepted_at_ms": Cell(end.accepted_at_ms, end.accepted_at_ms),
        }
    batch.count_ahead()
    return outcome


def watermark_key(log: str, partition: int) -> EntityKey:
    """Where the online store says how far it has applied a partition of the events log."""
    return EntityKey(WATERMARK, f"{log}/{partition}")


class _Batch:
    """The state of one run of ``transform``."""

    def __init__(self, stored: Stored, catalogue: Catalogue, context: Context) -> None:
        self._stored, self._catalogue, self._context = stored, catalogue, context
        items = {key.id: cells for key, cells in stored.items() if key.entity == "item"}
        self._items = ItemUpdates(context.schema, items)
        self._changed_items: dict[str, None] = {}
        self._users: dict[str, User] = {}
        self._likes: dict[int, Likes] = {}
        self._now_ms = 0
        self.samples: dict[int, list[Sample]] = {}
        self.unsampled: set[int] = set()
        """Partitions with a probe that has no sample, since there is no item yet."""

    def introduce(self, events: Sequence[Incoming]) -> None:
        """Make sure that every item of the events exists, in the store and in the catalogue."""
        new: dict[str, int] = {}
        for incoming in events:
            for item_id in _items_of(incoming.event):
                if self._catalogue.row(item_id) is None:
                    new.setdefault(item_id, incoming.accepted_at_ms)
        for item_id, accepted_at_ms in new.items():
            self._items.see(item_id, accepted_at_ms)
        self._now_ms = max((incoming.time_ms for incoming in events), default=0)
        self._refresh(list(new))

    def apply(self, incoming: Incoming) -> None:
        """One event, in its turn."""
        event = incoming.event
        if isinstance(event, Interaction):
            self._interaction(event, incoming)
        elif isinstance(event, Impression):
            self._impression(event, incoming)
        elif isinstance(event, UserEvent):
            self._user_event(event, incoming)
        elif isinstance(event, Probe):
            self._probe(event, incoming)
        else:
            self._items.apply(event, incoming.time_ms, incoming.accepted_at_ms)
            self._changed_items[event.item_id] = None

    def settle(self, outcome: Outcome) -> None:
        """Everything that has to be written, and the catalogue with all items that samples may name."""
        half_lives = self._context.schema.half_lives("item")
        self._refresh(list(self._changed_items))
        for partition, likes in self._likes.items():
            count_likes(self._items, partition, likes, self._context.tag, half_lives)
        for user_id, user in self._users.items():
            key = EntityKey("user", user_id)
            if user.deleted:
                outcome.deletes.append(key)
            if written := user.writes():
                outcome.writes[key] = written
        for item_id, written in self._items.written.items():
            if written:
                outcome.writes[EntityKey("item", item_id)] = written

    def count_ahead(self) -> None:
        """Let the catalogue's counters include the batch."""
        for likes in self._likes.values():
            times_ms = np.array(likes.times_ms, np.int64)
            self._catalogue.count(self._catalogue.rows(likes.items), times_ms, np.ones(len(times_ms)))

    def _refresh(self, item_ids: Sequence[str]) -> None:
        if item_ids:
            self._catalogue.apply(item_ids, [self._items.cells(item) for item in item_ids], self._now_ms)

    def _user(self, user_id: str, partition: int) -> User:
        user = self._users.get(user_id)
        if user is None:
            cells = self._stored.get(EntityKey("user", user_id), {})
            user = User(cells, self._context.tag, partition, self._context.bounds)
            self._users[user_id] = user
        return user

    def _interaction(self, event: Interaction, incoming: Incoming) -> None:
        item_id, offset = event.item_id, incoming.offset
        user = self._user(event.user_id, incoming.partition)
        liked = self._context.labels.of(event)
        if liked is not None:
            recent, likes = user.before(offset)
            passed_over: tuple[str, ...] = ()
            if liked and event.recommendation_id is not None:
                passed_over = tuple(self._passed_over(user, event.recommendation_id, item_id))
            self.samples.setdefault(incoming.partition, []).append(
                Sample(
                    offset,
                    incoming.accepted_at_ms,
                    incoming.time_ms,
                    event.user_id,
                    user.cells,
                    recent,
                    likes,
                    item_id,
                    liked,
                    passed_over,
                )
            )
        if liked:
            # The counters keep their own account of what was counted, apart from the user's.
            self._likes.setdefault(incoming.partition, Likes()).add(item_id, incoming.time_ms, offset)
        if user.advance(offset, incoming.accepted_at_ms, incoming.time_ms, event.event_id):
            user.see(self._catalogue.key_of(item_id), incoming.time_ms)
            if liked:
                user.like(item_id, offset, incoming.time_ms)

    def _probe(self, event: Probe, incoming: Incoming) -> None:
        if not len(self._catalogue):
            self.unsampled.add(incoming.partition)
            return
        item_id = self._catalogue.ids[incoming.offset % len(self._catalogue)]
        self.samples.setdefault(incoming.partition, []).append(
            Sample(
                incoming.offset,
                incoming.accepted_at_ms,
                incoming.time_ms,
                _stranger(event),
                {},
                [],
                0,
                item_id,
                liked=False,
                counts=False,
            )
        )

    def _passed_over(self, user: User, recommendation_id: str, taken: str) -> Iterable[str]:
        for item_id in user.shown(recommendation_id):
            known = self._catalogue.row(item_id) is not None
            if item_id != taken and known and not user.has_seen(self._catalogue.key_of(item_id)):
                yield item_id

    def _impression(self, event: Impression, incoming: Incoming) -> None:
        user = self._user(event.user_id, incoming.partition)
        fresh = user.advance(incoming.offset, incoming.accepted_at_ms, incoming.time_ms, event.event_id)
        if fresh and event.recommendation_id is not None:
            user.show(event.recommendation_id, event.item_ids)

    def _user_event(self, event: UserEvent, incoming: Incoming) -> None:
        user = self._user(event.user_id, incoming.partition)
        if not user.advance(incoming.offset, incoming.accepted_at_ms, incoming.time_ms, event.event_id):
            return
        if event.deleted:
            user.forget()
            return
        user.set(
            merge_attributes(
                self._context.schema,
                "user",
                user.cells,
                event.attributes,
                incoming.time_ms,
                replace=event.replace,
            )
        )


def _items_of(event: Event) -> Sequence[str]:
    if isinstance(event, Impression):
        return event.item_ids
    return () if isinstance(event, UserEvent | Probe) else (event.item_id,)


def _stranger(event: Probe) -> str:
    """Whom a probe's sample is of: somebody without history, whose rows nobody ever pushed."""
    return f"probe:{event.event_id}"
