"""From what a model needs (``models.parameters``) to what the parameter servers declare (``sync.spec``).

The two packages do not know each other; this is the one place that knows both.
"""

from __future__ import annotations

from featurestore.schema import SchemaMismatch
from models.parameters import DENSE, ModelNeeds
from models.samples import MicroBatch
from services.parameter_server.client import ParameterClient
from sync.spec import Initialiser, Optimiser, Segment, TableSpec


def table_specs(needs: ModelNeeds, seed: int) -> tuple[TableSpec, ...]:
    """The tables to declare: embeddings hashed over the shards, the dense weights in one of them.

    ``seed`` makes the initial values; every process of a model has to use the same.
    """
    embeddings = tuple(
        TableSpec(
            name=table.name,
            dim=table.dim,
            initialiser=Initialiser.uniform(table.scale, seed),
            optimiser=Optimiser("rowwise_adagrad", table.rate),
        )
        for table in needs.tables
    )
    segments = tuple(Segment(s.first_key, s.scale, s.constant) for s in needs.dense.segments)
    dense = TableSpec(
        name=DENSE,
        dim=needs.dense.chunk,
        initialiser=Initialiser(segments, seed),
        optimiser=Optimiser("adagrad", needs.dense_rate),
        placement="single",
        rows=needs.dense.chunks,
    )
    return (*embeddings, dense)


def declare(client: ParameterClient, model: str, needs: ModelNeeds, seed: int, fingerprint: str) -> None:
    """Declare ``model`` on all servers. Raises ModelMismatch, naming both sides, if it is known otherwise,
    and ParametersUnavailable."""
    client.declare(model, table_specs(needs, seed), fingerprint)


def require_same(batch: MicroBatch, fingerprint: str) -> None:
    """Raises SchemaMismatch, naming both fingerprints, if ``batch`` was encoded by another schema."""
    if batch.fingerprint != fingerprint:
        raise SchemaMismatch(fingerprint, batch.fingerprint)
