"""The schema and the model that settings describe: the same in every process that trains or serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from featurestore.schema import Schema, default_schema
from services.settings.model import ModelSettings, Settings

if TYPE_CHECKING:
    from models.training import RecommenderModel


def open_schema(settings: Settings) -> Schema:
    """The schema in the file that the settings name, else the built-in one. Raises SchemaError."""
    path = settings.features.schema_file
    return default_schema() if path is None else Schema.load(path)


def build_model(schema: Schema, settings: ModelSettings) -> RecommenderModel:
    """The model over ``schema`` in the shape that the settings give it. Loads torch."""
    from models.training import ModelConfig, RecommenderModel

    config = ModelConfig(
        retrieval_dim=settings.retrieval_dim,
        ranking_dim=settings.ranking_dim,
        temperature=settings.temperature,
        embedding_rate=settings.embedding_rate,
        dense_rate=settings.dense_rate,
    )
    return RecommenderModel(schema, config)
