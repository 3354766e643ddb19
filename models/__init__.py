"""Two-tower retrieval, DLRM ranking, and the way from candidates to a list.

Names are loaded when first used, since some need torch and the processes that only handle samples do not.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.index import VectorIndex
    from models.negatives import FrequencyEstimator, NegativeSampler
    from models.parameters import DenseLayout, EmbeddingTable, ModelNeeds
    from models.samples import MicroBatch, SampleFormatError, Watermark, decode_batch, encode_batch
    from models.taste import Taste
    from models.training import Gradients, ModelConfig, RecommenderModel

__all__ = [
    "DenseLayout",
    "EmbeddingTable",
    "FrequencyEstimator",
    "Gradients",
    "MicroBatch",
    "ModelConfig",
    "ModelNeeds",
    "NegativeSampler",
    "RecommenderModel",
    "SampleFormatError",
    "Taste",
    "VectorIndex",
    "Watermark",
    "decode_batch",
    "encode_batch",
]

_MODULES = {
    "index": ("VectorIndex",),
    "negatives": ("FrequencyEstimator", "NegativeSampler"),
    "parameters": ("DenseLayout", "EmbeddingTable", "ModelNeeds"),
    "samples": ("MicroBatch", "SampleFormatError", "Watermark", "decode_batch", "encode_batch"),
    "taste": ("Taste",),
    "training": ("Gradients", "ModelConfig", "RecommenderModel"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'models' has no attribute {name!r}")
    return getattr(import_module(f"models.{_MODULE_OF[name]}"), name)
