from featurestore.encoded import Encoded, Ragged
from featurestore.encoder import Encoder
from featurestore.feature import Feature
from featurestore.online import (
    Cell,
    Claim,
    EntityKey,
    OnlineStore,
    Status,
    StoreError,
    StoreUnavailable,
    Value,
    read_status,
)
from featurestore.open import open_store
from featurestore.schema import FieldError, Schema, SchemaError, SchemaMismatch, default_schema

__all__ = [
    "Cell",
    "Claim",
    "Encoded",
    "Encoder",
    "EntityKey",
    "Feature",
    "FieldError",
    "OnlineStore",
    "Ragged",
    "Schema",
    "SchemaError",
    "SchemaMismatch",
    "Status",
    "StoreError",
    "StoreUnavailable",
    "Value",
    "default_schema",
    "open_store",
    "read_status",
]
