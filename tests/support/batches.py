"""Random encoded entities, micro-batches and parameters of the default schema, from a seed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from featurestore.encoded import Encoded, Keys, Ragged
from featurestore.schema import Schema, default_schema
from models.samples import MicroBatch, Watermark
from models.training import ModelConfig, RecommenderModel

SCHEMA = default_schema()
SMALL = ModelConfig(
    retrieval_dim=8, ranking_dim=4, hidden=6, bottom=(5,), top=(7,), ranking_negatives=3, chunk=16
)


def ragged(generator: np.random.Generator, rows: int, vocabulary: Keys, most: int = 4) -> Ragged:
    """Lists of 0 to ``most`` keys of ``vocabulary``."""
    offsets = np.zeros(rows + 1, np.int64)
    np.cumsum(generator.integers(0, most + 1, rows), out=offsets[1:])
    return Ragged(generator.choice(vocabulary, offsets[-1]), offsets)


def encoded(generator: np.random.Generator, entity: str, rows: int, schema: Schema = SCHEMA) -> Encoded:
    """``rows`` random entities; their keys repeat."""
    categorical, numeric, lists = schema.columns(entity).width
    vocabulary = np.random.default_rng(1).integers(0, 2**64, 40, dtype=np.uint64)
    return Encoded(
        generator.choice(vocabulary, (rows, categorical)),
        generator.normal(size=(rows, numeric)).astype(np.float32),
        tuple(ragged(generator, rows, vocabulary) for _ in range(lists)),
    )


def micro_batch(seed: int, samples: int = 6, items: int = 9, negatives: int = 4) -> MicroBatch:
    """A micro-batch with likes and dislikes, weights, and some negatives left out."""
    generator = np.random.default_rng(seed)
    log_q = generator.uniform(-8, -1, (samples, negatives + 1)).astype(np.float32)
    log_q[:, 1:][generator.random((samples, negatives)) < 0.2] = np.inf
    return MicroBatch(
        users=encoded(generator, "user", samples),
        items=encoded(generator, "item", items),
        positive=generator.integers(0, items, samples).astype(np.int32),
        negatives=generator.integers(0, items, (samples, negatives)).astype(np.int32),
        log_q=log_q,
        label=(generator.random(samples) < 0.7).astype(np.float32),
        weight=generator.uniform(0.5, 2, samples).astype(np.float32),
        event_time_ms=generator.integers(0, 2**40, samples),
        watermark=Watermark("log-1", 2, 41, 1_700_000_000_000),
        model="main",
        fingerprint=SCHEMA.fingerprint,
    )


def values_of(model: RecommenderModel, keys: Mapping[str, Keys]) -> dict[str, npt.NDArray[np.float32]]:
    """Row values as a function of the key alone, as a parameter store has them."""
    rows = {}
    for table in model.needs.tables:
        columns = np.arange(1, table.dim + 1)
        phase = (keys[table.name] % np.uint64(10_007)).astype(np.float64)[:, None] * columns
        rows[table.name] = (0.4 * np.sin(phase)).astype(np.float32)
    return rows


def dense_of(model: RecommenderModel, seed: int = 0) -> npt.NDArray[np.float32]:
    """Dense weights that are nowhere zero, so that every gradient can be told from none."""
    generator = np.random.default_rng(seed)
    layout = model.needs.dense
    return generator.uniform(-0.3, 0.3, (layout.chunks, layout.chunk)).astype(np.float32)
