"""The recommender trained the ordinary way: one process, ``nn.Embedding`` over a fixed vocabulary, ``torch.optim``.

The same losses on the same micro-batches as ``models.training``; only where parameters live and who steps them
differs. A test holds that both have the same gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from featurestore.encoded import MISSING, Encoded
from models.dlrm import dlrm_logits
from models.gather import unique_keys
from models.losses import binary_cross_entropy, sampled_softmax
from models.parameters import RANKING, RETRIEVAL, DenseLayout
from models.samples import MicroBatch
from models.training import ModelConfig, RecommenderModel
from models.two_tower import item_vectors, user_vectors

Floats = npt.NDArray[np.float32]
Keys = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Entities:
    """N encoded entities as rows of the vocabulary: categorical ``[N, C]``, a (values, offsets) pair for each list,
    numeric ``[N, D]``."""

    categorical: Tensor
    lists: tuple[tuple[Tensor, Tensor], ...]
    numeric: Tensor


@dataclass(frozen=True, slots=True)
class Ready:
    """A micro-batch as tensors; candidates ``[B, K + 1]``, the positive first, the rest as in ``MicroBatch``."""

    users: Entities
    items: Entities
    candidates: Tensor
    log_q: Tensor
    label: Tensor
    weight: Tensor


class Vocabulary:
    """All keys of some micro-batches, ascending; the row after the last stands for MISSING."""

    def __init__(self, batches: Sequence[MicroBatch]) -> None:
        self.keys: Keys = unique_keys(part for batch in batches for part in (batch.users, batch.items))

    def __len__(self) -> int:
        return len(self.keys)

    def ready(self, batch: MicroBatch) -> Ready:
        """``batch`` as tensors, every key looked up."""
        candidates = np.concatenate([batch.positive[:, None], batch.negatives], axis=1)
        return Ready(
            self._entities(batch.users),
            self._entities(batch.items),
            torch.from_numpy(candidates.astype(np.int64)),
            torch.from_numpy(batch.log_q),
            torch.from_numpy(batch.label),
            torch.from_numpy(batch.weight),
        )

    def _entities(self, encoded: Encoded) -> Entities:
        lists = ((self._rows(ragged.values), torch.from_numpy(ragged.offsets)) for ragged in encoded.lists)
        return Entities(self._rows(encoded.categorical), tuple(lists), torch.from_numpy(encoded.numeric))

    def _rows(self, keys: Keys) -> Tensor:
        rows = np.where(keys == MISSING, len(self.keys), np.searchsorted(self.keys, keys))
        return torch.from_numpy(rows)


class OneProcess(nn.Module):
    """Two embedding tables and the dense weights, as parameters of one module.

    ``rows``: initial values ``[V, d]`` of each table in the order of the vocabulary; ``dense``: those of the dense
    weights ``[chunks, chunk]``.
    """

    def __init__(self, model: RecommenderModel, rows: Mapping[str, Floats], dense: Floats) -> None:
        super().__init__()
        self._config: Final[ModelConfig] = model.config
        layout: DenseLayout = model.needs.dense
        self.tables = nn.ModuleDict({name: _table(values) for name, values in rows.items()})
        self._names: Final = [tensor.name for tensor in layout.tensors]
        views = layout.unpack(dense)
        self.weights = nn.ParameterList([torch.from_numpy(views[name].copy()) for name in self._names])

    def dense(self) -> dict[str, Tensor]:
        """The dense weights by their names."""
        return dict(zip(self._names, self.weights, strict=True))

    def forward(self, batch: Ready) -> Tensor:
        """The sum over samples of both losses."""
        dense = self.dense()
        return self._retrieval(batch, dense) + self._ranking(batch, dense)

    def _embed(self, table: str, entities: Entities) -> Tensor:
        """Vectors of all features ``[N, C + L, d]``."""
        weight = self.tables[table].weight
        assert isinstance(weight, Tensor)
        missing = len(weight) - 1
        vectors = [functional.embedding(entities.categorical, weight, padding_idx=missing)]
        for values, offsets in entities.lists:
            pooled = functional.embedding_bag(
                values, weight, offsets, mode="mean", include_last_offset=True, padding_idx=missing
            )
            vectors.append(pooled.unsqueeze(1))
        return torch.cat(vectors, dim=1)

    def _retrieval(self, batch: Ready, dense: Mapping[str, Tensor]) -> Tensor:
        user = user_vectors(self._embed(RETRIEVAL, batch.users), batch.users.numeric, dense)
        item = item_vectors(self._embed(RETRIEVAL, batch.items), batch.items.numeric, dense)
        scores = torch.gather((user @ item.T) / self._config.temperature, 1, batch.candidates)
        return sampled_softmax(scores, batch.log_q, batch.weight * batch.label)

    def _ranking(self, batch: Ready, dense: Mapping[str, Tensor]) -> Tensor:
        config, users, items = self._config, batch.users, batch.items
        seen = 1 + min(config.ranking_negatives, batch.candidates.shape[1] - 1)
        chosen = batch.candidates[:, :seen].reshape(-1)
        vectors = torch.cat(
            [
                self._embed(RANKING, users).repeat_interleave(seen, 0),
                self._embed(RANKING, items)[chosen],
            ],
            dim=1,
        )
        numeric = torch.cat([users.numeric.repeat_interleave(seen, 0), items.numeric[chosen]], dim=1)
        logits = dlrm_logits(vectors, numeric, dense).reshape(-1, seen)
        log_q = batch.log_q[:, :seen]
        kept = torch.isfinite(log_q)
        label = torch.zeros_like(log_q)
        label[:, 0] = batch.label
        weight = torch.full_like(log_q, config.negative_weight)
        weight[:, 0] = torch.where(batch.label > 0, 1.0, config.dislike_weight)
        weight[:, 1:] *= batch.label[:, None]
        weight = weight * batch.weight[:, None] * kept
        corrected = logits - torch.where(kept, log_q, 0.0) - float(np.log(max(seen - 1, 1)))
        return binary_cross_entropy(corrected, label, weight)


def optimiser(module: OneProcess, model: RecommenderModel) -> torch.optim.Adagrad:
    """Adagrad over all parameters, at the rates of ``model``'s tables and dense weights."""
    rates = {table.name: table.rate for table in model.needs.tables}
    groups: list[dict[str, object]] = [
        {"params": list(table.parameters()), "lr": rates[name]} for name, table in module.tables.items()
    ]
    groups.append({"params": list(module.weights), "lr": model.needs.dense_rate})
    return torch.optim.Adagrad(groups)


def _table(values: Floats) -> nn.Embedding:
    """An embedding with ``values`` and one more row of zeros that stays zero."""
    padded = np.concatenate([values, np.zeros((1, values.shape[1]), np.float32)])
    table = nn.Embedding(len(padded), padded.shape[1], padding_idx=len(values))
    with torch.no_grad():
        table.weight.copy_(torch.from_numpy(padded))
    return table
