"""Training samples recorded once from MovieLens-100K by our own processor, to be learned from again and again."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from models.metrics import auc
from models.parameters import DENSE
from models.samples import MicroBatch, decode_batch
from models.training import RecommenderModel
from services.backends import open_log, open_store
from services.datasets import append_events, entity_events, interaction_events, open_dataset
from services.datasets.download import user_cache
from services.messagelog.contract import MessageLog, TopicPartition
from services.modelling import open_schema
from services.parameter_server.client import ParameterClient
from services.processor.main import make_plan
from services.processor.metrics import ProcessorMetrics
from services.processor.processor import Processor
from services.settings.model import DataSettings, FeatureSettings, LogSettings, Settings
from services.topics import EVENTS, PROCESSOR_GROUP, SAMPLES

HELD_OUT = 0.15
"""The newest share of each partition's micro-batches, for measuring."""
MEASURED = 32
"""Micro-batches of them that are measured on: to look must not cost the trainers their cores."""


@dataclass(frozen=True, slots=True)
class Recording:
    """Encoded micro-batches by partition for training, decoded ones for measuring; what the user must be told."""

    training: tuple[tuple[bytes, ...], ...]
    held_out: tuple[MicroBatch, ...]
    notes: tuple[str, ...]

    @property
    def samples(self) -> int:
        """How many are trained on."""
        return sum(len(decode_batch(value)) for some in self.training for value in some)


def record(folder: Path, partitions: int, interactions: int) -> Recording:
    """Process the first ``interactions`` of MovieLens-100K, in the order of their time."""
    found, notes = processed(folder, partitions, interactions)
    kept = [round(len(some) * (1 - HELD_OUT)) for some in found]
    held_out = [
        decode_batch(value) for some, first in zip(found, kept, strict=True) for value in some[first:]
    ]
    return Recording(
        tuple(tuple(some[:first]) for some, first in zip(found, kept, strict=True)),
        tuple(held_out[:: -(-len(held_out) // MEASURED)]),
        notes,
    )


def processed(folder: Path, partitions: int, interactions: int) -> tuple[list[list[bytes]], tuple[str, ...]]:
    """All micro-batches of the first ``interactions``, encoded, by partition; and what the user must be told."""
    settings = Settings(
        data=DataSettings(dir=folder),
        log=LogSettings(partitions=partitions),
        features=FeatureSettings(offline=False),
    )
    dataset, notes = open_dataset("ml-100k", user_cache(os.environ))
    dataset = dataset.in_time_order()
    events = chain(entity_events(dataset), islice(interaction_events(dataset), interactions))
    with closing(open_log(settings)) as log:
        with closing(log.producer()) as producer:
            append_events(events, producer, topic=EVENTS, partitions=partitions, now_ms=_now_ms)
        _process(settings, log)
        return [_read(log, partition) for partition in range(partitions)], notes


def _process(settings: Settings, log: MessageLog) -> None:
    plan = make_plan(settings, open_schema(settings), log.incarnation(EVENTS))
    with (
        closing(open_store(settings)) as store,
        closing(log.consumer(PROCESSOR_GROUP, [EVENTS], member="recorder")) as consumer,
    ):
        processor = Processor(consumer, store, plan, ProcessorMetrics())
        while sum(lag.messages for lag in log.lag(PROCESSOR_GROUP, EVENTS)):
            processor.step(0.05)


def _read(log: MessageLog, partition: int) -> list[bytes]:
    """The micro-batches with samples of one partition."""
    found: list[bytes] = []
    offset = 0
    while records := log.read(TopicPartition(SAMPLES, partition), offset, 1_000):
        found += [record.value for record in records if len(decode_batch(record.value))]
        offset = records[-1].offset + 1
    return found


def quality(model: RecommenderModel, client: ParameterClient, batches: Sequence[MicroBatch]) -> float:
    """AUC of the two-tower's scores on the parameters of now: liked items against the sampled negatives."""
    wanted: dict[str, npt.NDArray[np.uint64]] = {
        table.name: np.unique(np.concatenate([model.keys(batch)[table.name] for batch in batches]))
        for table in model.needs.tables
    }
    rows = client.pull("main", {**wanted, DENSE: model.needs.dense.keys}).rows
    labels: list[npt.NDArray[np.float32]] = []
    scores: list[npt.NDArray[np.float32]] = []

    def some(keys: dict[str, npt.NDArray[np.uint64]]) -> dict[str, npt.NDArray[np.float32]]:
        return {table: rows[table][np.searchsorted(wanted[table], own)] for table, own in keys.items()}

    for batch in batches:
        users = model.encode_users(batch.users, some(model.user_keys(batch.users)), rows[DENSE])
        items = model.encode_items(batch.items, some(model.item_keys(batch.items)), rows[DENSE])
        liked = batch.label > 0
        candidates = np.concatenate([batch.positive[:, None], batch.negatives], axis=1)[liked]
        found = np.einsum("bd,bkd->bk", users[liked], items[candidates])
        labels.append(np.broadcast_to(np.arange(found.shape[1]) == 0, found.shape).astype(np.float32).ravel())
        scores.append(found.ravel())
    return auc(np.concatenate(labels), np.concatenate(scores))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
