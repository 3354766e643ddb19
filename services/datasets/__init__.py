from services.datasets.dataset import Dataset, Entities, Interactions
from services.datasets.errors import BadRows, DatasetDamaged, DatasetError, DatasetUnavailable, RowError
from services.datasets.importer import (
    Imported,
    NotProcessed,
    append_events,
    entity_events,
    interaction_events,
    wait_processed,
)
from services.datasets.open import open_dataset

__all__ = [
    "BadRows",
    "Dataset",
    "DatasetDamaged",
    "DatasetError",
    "DatasetUnavailable",
    "Entities",
    "Imported",
    "Interactions",
    "NotProcessed",
    "RowError",
    "append_events",
    "entity_events",
    "interaction_events",
    "open_dataset",
    "wait_processed",
]
