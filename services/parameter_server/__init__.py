"""Parameter servers: the process that holds shards, and its clients."""

from services.parameter_server.client import AsyncParameterClient, ParameterClient
from services.parameter_server.client.descriptions import ServerDescription
from services.parameter_server.types import (
    Applied,
    DenseSnapshot,
    IncarnationChanged,
    Mark,
    ModelMismatch,
    ModelUnknown,
    ParameterError,
    ParametersRefused,
    ParametersUnavailable,
    Pulled,
    PushReply,
    ShardChanges,
    Watermarks,
)

__all__ = [
    "Applied",
    "AsyncParameterClient",
    "DenseSnapshot",
    "IncarnationChanged",
    "Mark",
    "ModelMismatch",
    "ModelUnknown",
    "ParameterClient",
    "ParameterError",
    "ParametersRefused",
    "ParametersUnavailable",
    "Pulled",
    "PushReply",
    "ServerDescription",
    "ShardChanges",
    "Watermarks",
]
