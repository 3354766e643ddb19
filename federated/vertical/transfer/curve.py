"""What a transfer is worth by how many users are common, against the host's own models of its labelled common rows."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from federated.vertical.evaluation import baselines, measures
from federated.vertical.kinds import Setup
from federated.vertical.linear.solver import Scaling
from federated.vertical.tables import Table
from federated.vertical.transfer.model import inputs_of
from federated.vertical.transfer.options import TransferOptions
from federated.vertical.transfer.sides import GuestSide, HostSide, first_weights
from federated.vertical.transfer.twin import train_plain

Values = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

FOLDS: Final = 4
GAMMAS: Final = (0.1, 0.3, 1.0, 3.0)
_PARTIES: Final = {"guest": "guest", "host": "host"}


@dataclass(frozen=True, slots=True)
class Point:
    """AUC over the host's held-out customers. ``alone``: of models that the host could train on the ``rows`` common
    ones with their labels, by name. ``gamma``: chosen by validation on common rows."""

    share: float
    rows: int
    gamma: float
    transfer: float
    alone: dict[str, float]

    @property
    def best_alone(self) -> float:
        return max(self.alone.values())


def curve(
    guest: Table,
    host: Table,
    options: TransferOptions,
    seed: int,
    *,
    shares: Sequence[float] = (0.01, 0.05, 0.2),
    test: float = 0.3,
    gammas: Sequence[float] = GAMMAS,
) -> list[Point]:
    """Of aligned tables, the guest's with labels: the part ``test`` of rows are customers of the host alone, to be
    scored; all others are the guest's, and the parts ``shares`` of them common. In the clear (``twin``)."""
    assert guest.labels is not None
    order = np.random.default_rng(seed).permutation(len(guest)).astype(np.int64)
    held, known = np.split(order, [round(test * len(order))])
    found = []
    for share in shares:
        common, rest = np.split(known, [max(round(share * len(known)), 2)])
        gamma = choose_gamma(guest, host, common, rest, options, seed, gammas)
        scores = transferred(guest, host, common, rest, held, replace(options, gamma=gamma), seed)
        alone = host_alone(host, guest.labels, common, held, seed)
        auc = measures(guest.labels[held], scores)["auc"]
        found.append(Point(share, len(common), gamma, auc, alone))
    return found


def transferred(
    guest: Table,
    host: Table,
    common: Integers,
    rest: Integers,
    asked: Integers,
    options: TransferOptions,
    seed: int,
) -> Values:
    """Scores of the rows ``asked`` at the host, learned from ``common`` rows and the guest's ``rest``."""
    from federated.vertical.transfer.roles import guest_side

    own = Setup("guest", _PARTIES, guest.take(common), seed, len(common), rest=guest.take(rest))
    _, side = guest_side(options, own, seed)
    features = host.features[common]
    scaling = Scaling.of(features, options.clip)
    weights = first_weights(features.shape[1], options, seed + 1)
    other = HostSide(inputs_of(scaling, features), len(common), weights, options)
    return _scores(side, other, inputs_of(scaling, host.features[asked]))


def choose_gamma(
    guest: Table,
    host: Table,
    common: Integers,
    rest: Integers,
    options: TransferOptions,
    seed: int,
    gammas: Sequence[float],
) -> float:
    """The one of ``gammas`` with the best AUC over common rows held out in turn."""
    labels = guest.labels
    assert labels is not None
    parts = np.array_split(np.random.default_rng([seed, 1]).permutation(common), FOLDS)
    reached = []
    for gamma in gammas:
        scores = [
            transferred(
                guest,
                host,
                np.concatenate([one for one in parts if one is not part]),
                rest,
                part,
                replace(options, gamma=gamma),
                seed,
            )
            for part in parts
        ]
        reached.append(measures(labels[np.concatenate(parts)], np.concatenate(scores)).get("auc", 0.5))
    return gammas[int(np.argmax(reached))]


def host_alone(host: Table, labels: Values, common: Integers, held: Integers, seed: int) -> dict[str, float]:
    """AUC of logistic regression, boosting and a network that see the common rows' labels only."""
    from sklearn.neural_network import MLPClassifier

    seen, asked = host.features[common], host.features[held]
    truth = labels[held]
    found = {
        name: one["auc"] for name, one in baselines((seen, labels[common]), (asked, truth), seed).items()
    }
    scaling = Scaling.of(seen, 1e9)
    with warnings.catch_warnings():
        # Not converged within its iterations: the baseline is what it is.
        warnings.simplefilter("ignore")
        network = MLPClassifier((8,), max_iter=500, random_state=seed).fit(
            scaling.apply(seen), labels[common]
        )
    scores = np.asarray(network.predict_proba(scaling.apply(asked))[:, 1], np.float64)
    return found | {"network": measures(truth, scores)["auc"]}


def latent_tables(
    rows: int, seed: int, *, factors: int = 10, columns: tuple[int, int] = (20, 40), label_noise: float = 3.0
) -> tuple[Table, Table]:
    """A generated set: both companies' columns are mixtures of the same latent factors with noise, and so is the label,
    with more noise. Few labels teach little, while the factors can be seen from either side."""
    rng = np.random.default_rng(seed)
    latent = rng.standard_normal((rows, factors))
    own, other = (
        latent @ rng.standard_normal((factors, count)) + noise * rng.standard_normal((rows, count))
        for count, noise in zip(columns, (0.5, 1.0), strict=True)
    )
    scores = latent @ rng.standard_normal(factors) + label_noise * rng.standard_normal(rows)
    ids = tuple(str(row) for row in range(rows))

    def names(count: int) -> tuple[str, ...]:
        return tuple(f"c{place}" for place in range(count))

    labels = (scores > 0).astype(np.float64)
    return Table(ids, own, names(columns[0]), labels), Table(ids, other, names(columns[1]))


def _scores(side: GuestSide, other: HostSide, asked: Values) -> Values:
    train_plain(side, other)
    return np.asarray(np.tanh(asked @ other.weights) @ side.phi())
