"""From what a model needs (``models.parameters``) to what the parameter servers declare (``sync.spec``).

The two packages do not know each other; this is the one place that knows both.
"""

from __future__ import annotations

import math

from featurestore.schema import SchemaMismatch
from models.parameters import DENSE, ModelNeeds
from models.samples import MicroBatch
from services.parameter_server.client import ParameterClient
from services.settings.model import ModelSettings
from sync.spec import Initialiser, Optimiser, Segment, TableSpec


def table_specs(needs: ModelNeeds, settings: ModelSettings) -> tuple[TableSpec, ...]:
    """The tables to declare: embeddings hashed over the shards, the dense weights in one of them.

    What is learned, and how fast, is the model's to say; ``settings`` say by which optimiser, what is kept, and make
    the initial values (``seed``). Every process of a model has to use the same. Raises BadSpec where they do not fit.
    """
    expiry_s = 0 if settings.expiry is None else math.ceil(settings.expiry)
    embeddings = tuple(
        TableSpec(
            name=table.name,
            dim=table.dim,
            initialiser=Initialiser.uniform(table.scale, settings.seed),
            optimiser=Optimiser(settings.embedding_optimiser, table.rate),
            l2=settings.embedding_l2,
            clip=settings.embedding_clip,
            guard=settings.guard,
            admission=settings.admission,
            expiry_s=expiry_s,
        )
        for table in needs.tables
    )
    segments = tuple(Segment(s.first_key, s.scale, s.constant) for s in needs.dense.segments)
    dense = TableSpec(
        name=DENSE,
        dim=needs.dense.chunk,
        initialiser=Initialiser(segments, settings.seed),
        optimiser=Optimiser(settings.dense_optimiser, needs.dense_rate),
        placement="single",
        rows=needs.dense.chunks,
        l2=settings.dense_l2,
        clip=settings.dense_clip,
        guard=settings.guard,
    )
    return (*embeddings, dense)


def declare(client: ParameterClient, needs: ModelNeeds, settings: ModelSettings, fingerprint: str) -> None:
    """Declare the model of ``settings`` on all servers. Raises ModelMismatch, naming both sides, if it is known
    otherwise, and ParametersUnavailable."""
    client.declare(settings.name, table_specs(needs, settings), fingerprint)


def require_same(batch: MicroBatch, fingerprint: str) -> None:
    """Raises SchemaMismatch, naming both fingerprints, if ``batch`` was encoded by another schema."""
    if batch.fingerprint != fingerprint:
        raise SchemaMismatch(fingerprint, batch.fingerprint)
