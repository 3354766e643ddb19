"""The recommender as stateless functions: (micro-batch, rows, dense weights) → gradients, and serving.

Gradients are SUMS over samples of per-sample losses: the gradients of a micro-batch are the sum of those of
its samples, however a stream is cut into micro-batches. The one exception is asked for by ``in_batch``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from featurestore.encoded import Encoded, Keys
from featurestore.schema import Schema
from models.dlrm import dlrm_logits, dlrm_tensors
from models.gather import Index, embed, tensor, unique_keys
from models.losses import binary_cross_entropy, sampled_softmax
from models.parameters import RANKING, RETRIEVAL, DenseLayout, EmbeddingTable, Floats, ModelNeeds
from models.samples import MicroBatch
from models.two_tower import item_vectors, two_tower_tensors, user_vectors

Rows = Mapping[str, Floats]

_CHUNK: Final = 4_096


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape, rates and loss weights of both models.

    ``ranking_negatives``: of a sample's negatives, how many (the first ones) the ranking model sees, each at
    ``negative_weight``; ``dislike_weight``: weight of a sample that was not liked.
    """

    retrieval_dim: int = 32
    ranking_dim: int = 16
    temperature: float = 0.3
    embedding_rate: float = 0.1
    dense_rate: float = 0.02
    embedding_scale: float = 0.05
    hidden: int = 64
    bottom: tuple[int, ...] = (32,)
    top: tuple[int, ...] = (32,)
    ranking_negatives: int = 8
    negative_weight: float = 1.0
    dislike_weight: float = 0.1
    ranking_bias: float = -7.0
    chunk: int = 256


@dataclass(frozen=True, slots=True)
class Gradients:
    """Sums over samples of the gradients of their losses.

    Shapes: per table ``[U, d]`` in the order of its keys; dense ``[chunks, chunk]``. ``losses``: by name, the
    weighted mean per sample.
    """

    tables: dict[str, Floats]
    dense: Floats
    losses: dict[str, float]


class RecommenderModel:
    """Two-tower and DLRM over one schema. Immutable: all parameters are arguments; any thread may call it."""

    def __init__(self, schema: Schema, config: ModelConfig) -> None:
        self.schema = schema
        self.config = config
        user_c, user_d, user_l = schema.columns("user").width
        item_c, item_d, item_l = schema.columns("item").width
        tables = (
            EmbeddingTable(RETRIEVAL, config.retrieval_dim, config.embedding_scale, config.embedding_rate),
            EmbeddingTable(RANKING, config.ranking_dim, config.embedding_scale, config.embedding_rate),
        )
        layout = DenseLayout(
            (
                *two_tower_tensors(
                    (user_c + user_l, user_d),
                    (item_c + item_l, item_d),
                    config.retrieval_dim,
                    config.hidden,
                ),
                *dlrm_tensors(
                    user_c + user_l + item_c + item_l,
                    user_d + item_d,
                    config.ranking_dim,
                    config.bottom,
                    config.top,
                    config.ranking_bias,
                ),
            ),
            config.chunk,
        )
        self._needs = ModelNeeds(tables, layout, config.dense_rate)
        self._item_id_column = schema.columns("item").id_column

    @property
    def needs(self) -> ModelNeeds:
        """Tables and dense layout that the parameter store must hold."""
        return self._needs

    def keys(self, batch: MicroBatch) -> dict[str, Keys]:
        """The rows that ``gradients`` wants: per table, unique ascending keys ``[U]``."""
        return self._per_table(unique_keys((batch.users, batch.items)))

    def user_keys(self, users: Encoded) -> dict[str, Keys]:
        """The rows that serving wants for ``users``: per table, unique ascending keys."""
        return self._per_table(unique_keys((users,)))

    def item_keys(self, items: Encoded) -> dict[str, Keys]:
        """The rows that serving wants for ``items``: per table, unique ascending keys."""
        return self._per_table(unique_keys((items,)))

    def pair_keys(self, users: Encoded, items: Encoded) -> dict[str, Keys]:
        """The rows that ``rank`` wants: per table, unique ascending keys of users and items together."""
        return self._per_table(unique_keys((users, items)))

    def item_own_keys(self, items: Encoded) -> Keys:
        """The key ``[N]`` whose row belongs to that one item alone; its change re-encodes the item.

        Raises ValueError where the schema encodes no item id.
        """
        if self._item_id_column is None:
            raise ValueError("the schema has no item feature whose source is the id")
        return items.categorical[:, self._item_id_column]

    def _per_table(self, keys: Keys) -> dict[str, Keys]:
        return {table.name: keys for table in self._needs.tables}

    def _dense(self, dense: Floats, *, train: bool) -> tuple[Tensor, dict[str, Tensor]]:
        flat = tensor(dense).reshape(-1)
        if train:
            flat = flat.detach().requires_grad_()
        layout, views = self._needs.dense, {}
        for each in layout.tensors:
            start = layout.first_keys[each.name] * layout.chunk
            views[each.name] = flat[start : start + each.size].reshape(each.shape)
        return flat, views

    def gradients(self, batch: MicroBatch, rows: Rows, dense: Floats, *, in_batch: bool = False) -> Gradients:
        """Gradients of both losses in one pass.

        rows: per table ``[U, d]`` in the order of ``keys(batch)``; dense ``[chunks, chunk]``. ``in_batch``
        adds the positives of all other samples to each sample's candidates (offline training only: the
        gradients of a batch are then no longer the sum of those of its samples).
        """
        if len(batch) == 0:
            zeros = {name: np.zeros_like(values) for name, values in rows.items()}
            return Gradients(zeros, np.zeros_like(dense), {})
        keys = unique_keys((batch.users, batch.items))
        users, items = Index.into(keys, batch.users), Index.into(keys, batch.items)
        leaves = {name: tensor(values).detach().requires_grad_() for name, values in rows.items()}
        flat, weights = self._dense(dense, train=True)
        candidates = torch.from_numpy(np.concatenate([batch.positive[:, None], batch.negatives], axis=1))
        retrieval = self._retrieval_loss(
            batch, users, items, leaves[RETRIEVAL], weights, candidates, in_batch
        )
        ranking = self._ranking_loss(batch, users, items, leaves[RANKING], weights, candidates)
        torch.autograd.backward(retrieval + ranking)
        return Gradients(
            {name: _gradient(leaf) for name, leaf in leaves.items()},
            _gradient(flat).reshape(dense.shape),
            {
                "retrieval": retrieval.item() / max(float((batch.weight * batch.label).sum()), 1e-9),
                "ranking": ranking.item() / max(float(batch.weight.sum()), 1e-9),
            },
        )

    def _retrieval_loss(
        self,
        batch: MicroBatch,
        users: Index,
        items: Index,
        rows: Tensor,
        weights: Mapping[str, Tensor],
        candidates: Tensor,
        in_batch: bool,
    ) -> Tensor:
        user = user_vectors(embed(users, rows), users.numeric, weights)
        item = item_vectors(embed(items, rows), items.numeric, weights)
        scores = (user @ item.T) / self.config.temperature
        log_q = tensor(batch.log_q)
        chosen = torch.gather(scores, 1, candidates.long())
        if in_batch:
            positives = candidates[:, 0].long()
            others = log_q[:, 0].expand(len(batch), -1)
            others = others.masked_fill(positives[:, None] == positives[None, :], torch.inf)
            chosen = torch.cat([chosen, scores[:, positives]], dim=1)
            log_q = torch.cat([log_q, others], dim=1)
        return sampled_softmax(chosen, log_q, tensor(batch.weight * batch.label))

    def _ranking_loss(
        self,
        batch: MicroBatch,
        users: Index,
        items: Index,
        rows: Tensor,
        weights: Mapping[str, Tensor],
        candidates: Tensor,
    ) -> Tensor:
        config = self.config
        seen = 1 + min(config.ranking_negatives, batch.negatives.shape[1])
        chosen = candidates[:, :seen].long()
        user, item = embed(users, rows), embed(items, rows)
        logits = _pair_logits(
            user.repeat_interleave(seen, 0),
            users.numeric.repeat_interleave(seen, 0),
            item[chosen.reshape(-1)],
            items.numeric[chosen.reshape(-1)],
            weights,
        ).reshape(-1, seen)
        log_q = tensor(batch.log_q)[:, :seen]
        kept = torch.isfinite(log_q)
        label = torch.zeros_like(log_q)
        label[:, 0] = tensor(batch.label)
        weight = torch.full_like(log_q, config.negative_weight)
        weight[:, 0] = torch.where(label[:, 0] > 0, 1.0, config.dislike_weight)
        weight[:, 1:] *= label[:, :1]
        weight = weight * tensor(batch.weight)[:, None] * kept
        corrected = logits - torch.where(kept, log_q, 0.0) - float(np.log(max(seen - 1, 1)))
        return binary_cross_entropy(corrected, label, weight)

    def encode_users(self, users: Encoded, rows: Rows, dense: Floats) -> Floats:
        """Retrieval vectors ``[B, d]``; rows in the order of ``user_keys(users)``."""
        with torch.inference_mode():
            index = Index.into(unique_keys((users,)), users)
            _, weights = self._dense(dense, train=False)
            vectors = user_vectors(embed(index, tensor(rows[RETRIEVAL])), index.numeric, weights)
            return _floats(vectors)

    def encode_items(self, items: Encoded, rows: Rows, dense: Floats) -> Floats:
        """Retrieval vectors ``[N, d]``; rows in the order of ``item_keys(items)``."""
        with torch.inference_mode():
            index = Index.into(unique_keys((items,)), items)
            _, weights = self._dense(dense, train=False)
            vectors = embed(index, tensor(rows[RETRIEVAL]))
            # By parts that stay in the processor's cache: twice as fast at 100,000 items.
            parts = zip(torch.split(vectors, _CHUNK), torch.split(index.numeric, _CHUNK), strict=True)
            return _floats(torch.cat([item_vectors(*part, weights) for part in parts]))

    def item_row_gradients(self, items: Encoded, rows: Rows, dense: Floats, at_vectors: Floats) -> Floats:
        """The gradient at the retrieval rows ``[U, d]``, in the order of ``item_keys(items)``, of a loss whose gradient
        at the items' vectors is ``at_vectors`` ``[N, d]``: whoever has a loss over item vectors learns through the
        item tower. The dense weights stand still."""
        keys = unique_keys((items,))
        leaf = tensor(rows[RETRIEVAL]).detach().requires_grad_()
        index = Index.into(keys, items)
        _, weights = self._dense(dense, train=False)
        vectors = item_vectors(embed(index, leaf), index.numeric, weights)
        torch.autograd.backward((vectors,), (tensor(at_vectors),))
        return _gradient(leaf)

    def rank(self, user: Encoded, items: Encoded, rows: Rows, dense: Floats) -> Floats:
        """Logits ``[N]`` of one user with N items; rows in the order of ``pair_keys(user, items)``."""
        with torch.inference_mode():
            keys = unique_keys((user, items))
            one, many = Index.into(keys, user), Index.into(keys, items)
            _, weights = self._dense(dense, train=False)
            table = tensor(rows[RANKING])
            count = len(items)
            return _floats(
                _pair_logits(
                    embed(one, table).expand(count, -1, -1),
                    one.numeric.expand(count, -1),
                    embed(many, table),
                    many.numeric,
                    weights,
                )
            )


def _pair_logits(
    user: Tensor, user_numeric: Tensor, item: Tensor, item_numeric: Tensor, weights: Mapping[str, Tensor]
) -> Tensor:
    embeddings = torch.cat([user, item], dim=1)
    return dlrm_logits(embeddings, torch.cat([user_numeric, item_numeric], dim=1), weights)


def _gradient(leaf: Tensor) -> Floats:
    if leaf.grad is None:
        return np.zeros(tuple(leaf.shape), np.float32)
    return _floats(leaf.grad)


def _floats(values: Tensor) -> Floats:
    return values.numpy().astype(np.float32, copy=False)
