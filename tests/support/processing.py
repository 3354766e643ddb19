"""Runs the processor's transform over a dictionary, for tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from featurestore import counters
from featurestore.encoder import Encoder
from featurestore.online import Cell, EntityKey
from featurestore.schema import default_schema
from models.negatives import NegativeSampler
from models.samples import MicroBatch, Watermark
from services.catalogue import Catalogue
from services.events import Event, encode_event, partition_key
from services.messagelog.contract import Record, partition_of
from services.processor.records import Incoming, Rules, sort_records
from services.processor.sampling import Recipe
from services.processor.transform import Context, Labels, transform, wanted
from services.processor.users import Bounds

LOG = "log-incarnation"
NOW = 1_700_000_000_000
NEGATIVES = 5
RULES = Rules(default_schema(), 300_000)


def context(recent_items: int = 30, seen_items: int = 2_000) -> Context:
    labels = Labels(frozenset({"like", "click"}), 4.0)
    recipe = Recipe(Encoder(default_schema()), LOG, "main", NEGATIVES)
    return Context(recipe, labels, Bounds(recent_items, seen_items), counters.log_tag(LOG))


def records_of(events: Iterable[Event], partitions: int = 2) -> list[Record]:
    """The events as they stand in a log, accepted a second apart."""
    ends = [0] * partitions
    records = []
    for n, event in enumerate(events):
        key = partition_key(event)
        partition = partition_of(key, partitions)
        records.append(
            Record("events", partition, ends[partition], key, encode_event(event), NOW + 1_000 * n)
        )
        ends[partition] += 1
    return records


class World:
    """A store in memory, and a processor that can be started anew on it."""

    def __init__(self, of: Context | None = None) -> None:
        self.context = of or context()
        self.store: dict[EntityKey, dict[str, Cell]] = {}
        self.batches: list[MicroBatch] = []
        self.restart()

    def restart(self) -> None:
        self.catalogue = Catalogue(self.context.recipe.encoder)
        ids = [key.id for key in self.store if key.entity == "item"]
        if ids:
            self.catalogue.apply(ids, [self.store[EntityKey("item", item)] for item in ids], NOW)
        self.samplers = {partition: NegativeSampler() for partition in range(8)}

    def step(self, records: Sequence[Record]) -> list[MicroBatch]:
        """One batch, up to and with its write."""
        usable, _ = sort_records(records, RULES)
        return self.step_events(usable, records)

    def step_events(self, usable: Sequence[Incoming], records: Sequence[Record]) -> list[MicroBatch]:
        stored = {
            key: dict(self.store.get(key, {})) for key in wanted(usable, self.catalogue, self.context.labels)
        }
        ends = {r.partition: Watermark(LOG, r.partition, r.offset, r.accepted_at_ms) for r in records}
        outcome = transform(usable, list(ends.values()), stored, self.catalogue, self.samplers, self.context)
        for key in outcome.deletes:
            self.store.pop(key, None)
        for key, cells in outcome.writes.items():
            self.store[key] = {**self.store.get(key, {}), **cells}
        return outcome.batches

    def run(self, records: Sequence[Record], size: int) -> list[MicroBatch]:
        """All records in batches of ``size``."""
        made = []
        for start in range(0, len(records), size):
            made += self.step(records[start : start + size])
        return made

    def user(self, user_id: str) -> dict[str, Cell]:
        return self.store.get(EntityKey("user", user_id), {})

    def item(self, item_id: str) -> dict[str, Cell]:
        return self.store.get(EntityKey("item", item_id), {})

    def value(self, entity: str, entity_id: str, name: str) -> object:
        cell = self.store.get(EntityKey(entity, entity_id), {}).get(name)
        return None if cell is None else cell.value

    def likes(self, item_id: str) -> float:
        """The plain total of an item's likes over all partitions."""
        half_lives = default_schema().half_lives("item")
        cells = [c.value for name, c in self.item(item_id).items() if name.startswith(counters.PREFIX)]
        return float(counters.decode(cells, half_lives).decayed.values[:, -1].sum())
