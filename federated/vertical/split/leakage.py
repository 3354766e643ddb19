"""What a curious party makes of what it is sent: labels from gradients, features from activations or from what a layer
makes of them.

Attacks: Li et al. 2022, "Label leakage and protection in two-party split learning" (norm and cosine of gradients);
inversion of activations by a regression that was fitted on rows whose features the attacker knows otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from federated.vertical.parties import Transcript
from federated.vertical.split.exchange import read_rows
from federated.vertical.split.network import Integers, batches
from federated.vertical.split.options import SplitOptions
from federated.vertical.split.twin import Singles, train_plain
from federated.vertical.tables import Table
from models.metrics import auc

Floats = npt.NDArray[np.float64]


def rows_sent(
    transcript: Transcript,
    options: SplitOptions,
    rows: int,
    seed: int,
    *,
    sender: str,
    receiver: str,
    epoch: int,
) -> Floats:
    """The activations or gradients [N, width] that ``receiver`` was sent in ``epoch``, in the joint order. The
    transcript must hold bodies, from the first epoch on."""
    kind = "activations" if receiver == "guest" else "gradients"
    sent = transcript.of(sender=sender, receiver=receiver, kind=kind)
    found, per_epoch = np.empty((rows, options.width)), len(sent) // options.epochs
    parts: list[Integers] = list(batches(rows, options, seed, epoch))
    for message, part in zip(sent[epoch * per_epoch : (epoch + 1) * per_epoch], parts, strict=True):
        assert message.body is not None
        found[part] = read_rows(message.body, sender, len(part), options.width)
    return found


@dataclass(frozen=True, slots=True)
class Seen:
    """Of one host, in the joint order. ``shares``: what the guest sees [E, N, options.share]; ``gradients``: what the
    host gets [E, N, width]."""

    shares: Floats
    gradients: Floats

    def of_epoch(self, epoch: int) -> Floats:
        """What the guest saw in ``epoch`` [N, options.share]."""
        found: Floats = self.shares[epoch]
        return found

    def of_all_epochs(self) -> Floats:
        """Everything that the guest saw [N, E * options.share]."""
        found: Floats = self.shares.transpose(1, 0, 2).reshape(self.shares.shape[1], -1)
        return found


def watched(
    guest: Table, hosts: Mapping[str, Table], options: SplitOptions, seed: int, weights: Mapping[str, int]
) -> dict[str, Seen]:
    """What both sides see of each host in a whole training without noise, by the twin, which computes the same; with
    ``layer`` encrypted without the blur, which is too small to matter here."""
    epochs, rows = options.epochs, len(guest)
    found = {
        name: Seen(np.zeros((epochs, rows, options.share)), np.zeros((epochs, rows, options.width)))
        for name in hosts
    }

    def watch(epoch: int, batch: Integers, shares: list[Singles], gradients: list[Singles]) -> None:
        for seen, share, gradient in zip(found.values(), shares, gradients, strict=True):
            seen.shares[epoch, batch], seen.gradients[epoch, batch] = share, gradient

    train_plain(guest, hosts, options, seed, weights, watch=watch)
    return found


def labels_by_norm(gradients: Floats, labels: Floats) -> float:
    """How well gradients' norms tell labels of 0 and 1, as AUC; .5 is nothing. The rarer label has the longer ones."""
    found = auc(labels, np.linalg.norm(gradients, axis=1))
    return max(found, 1 - found)


def labels_by_direction(gradients: Floats, labels: Floats, known: int) -> float:
    """The same of the cosine with the gradient of row ``known``, whose label is 1 and which the attacker knows."""
    lengths = np.maximum(np.linalg.norm(gradients, axis=1), 1e-30)
    cosine = gradients @ gradients[known] / lengths / lengths[known]
    others = np.arange(len(labels)) != known
    return auc(labels[others], cosine[others])


def labels_over_epochs(gradients: Floats, labels: Floats) -> float:
    """The same of the gradients of all epochs [E, N, width] by who knows no label at all.

    Of one row they lie along one direction in each epoch, for one label on one side of 0 and for the other on the
    other side. So all epochs beside each other are of rank 1 but for the noise, which is another in each epoch: the
    first singular vector adds them up.
    """
    found = np.linalg.svd(np.hstack(list(gradients)), full_matrices=False)[0][:, 0]
    told = auc(labels, found)
    return max(told, 1 - told)


def layer_by_rank(gradients: Floats, weights: Floats, share: int) -> float:
    """How much of a layer's weights [d, k] lies in the span of ``share`` directions that one batch's gradients [B, d]
    have, as a part of their squared length: for a random span about share / d."""
    _, _, directions = np.linalg.svd(gradients, full_matrices=False)
    inside = directions[:share] @ weights
    return float((inside**2).sum() / (weights**2).sum())


def features_by_inversion(activations: Floats, features: Floats, known: int, ridge: float = 1e-3) -> float:
    """R² over the other rows, mean of columns, of features [N, F] that a ridge regression fitted on the first ``known``
    rows tells from ``activations``; at least 0. Features are finite; columns that are constant do not count."""
    live = features[:known].std(axis=0) > 0
    inputs = np.hstack([activations, np.ones((len(activations), 1))])
    moments = inputs[:known].T @ inputs[:known] / known + ridge * np.eye(inputs.shape[1])
    weights = np.linalg.solve(moments, inputs[:known].T @ features[:known][:, live] / known)
    truth = features[known:][:, live]
    left = ((truth - inputs[known:] @ weights) ** 2).mean(axis=0) / np.maximum(truth.var(axis=0), 1e-30)
    return float(np.maximum(1 - left, 0.0).mean())
