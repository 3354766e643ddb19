"""What a transfer is worth by how many users are common, against the host's own models of its labelled common rows."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from federated.vertical.evaluation import measures
from federated.vertical.kinds import Setup
from federated.vertical.linear.solver import Scaling
from federated.vertical.tables import Table
from federated.vertical.transfer.model import inputs_of
from federated.vertical.transfer.options import TransferOptions
from federated.vertical.transfer.sides import GuestSide, HostSide, first_weights
from federated.vertical.transfer.stack import Stack
from federated.vertical.transfer.twin import train_plain

Values = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

FOLDS: Final = 4
GAMMAS: Final = (0.003, 0.03, 0.1, 0.3, 1.0)
_PARTIES: Final = {"guest": "guest", "host": "host"}


@dataclass(frozen=True, slots=True)
class Point:
    """AUC over the host's held-out customers. ``alone``: of models that the host could train on the ``rows`` common
    ones with their labels, by name. ``gamma``: chosen by validation on common rows. ``stacked``: of all these models
    and the transfer as one, weighted by the same validation; only for a host that is told the common rows' labels."""

    share: float
    rows: int
    gamma: float
    transfer: float
    alone: dict[str, float]
    stacked: float

    @property
    def best_alone(self) -> float:
        """Of the model that turns out best on held-out customers: who has to choose one beforehand has less."""
        return max(self.alone.values())


@dataclass(frozen=True, slots=True)
class Validated:
    """``parts``: the common rows, in folds; ``scores``: the transfer's with ``gamma`` [n], each row's by a training
    without its fold."""

    gamma: float
    parts: tuple[Integers, ...]
    scores: Values


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
    labels = guest.labels
    assert labels is not None
    order = np.random.default_rng(seed).permutation(len(guest)).astype(np.int64)
    held, known = np.split(order, [round(test * len(order))])
    found = []
    for share in shares:
        common, rest = np.split(known, [max(round(share * len(known)), 2)])
        valid = validate(guest, host, common, rest, options, seed, gammas)
        scores = transferred(guest, host, common, rest, held, replace(options, gamma=valid.gamma), seed)
        alone = host_alone(host, labels, common, held, seed)
        auc = {name: measures(labels[held], one)["auc"] for name, one in alone.items()}
        both = stack_of(host, labels, valid, seed).apply(np.stack([scores, *alone.values()], axis=1))
        ours, stacked = (measures(labels[held], one)["auc"] for one in (scores, both))
        found.append(Point(share, len(common), valid.gamma, ours, auc, stacked))
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


def validate(
    guest: Table,
    host: Table,
    common: Integers,
    rest: Integers,
    options: TransferOptions,
    seed: int,
    gammas: Sequence[float],
) -> Validated:
    """The one of ``gammas`` with the best AUC over common rows held out in turn."""
    labels = guest.labels
    assert labels is not None
    parts = tuple(np.array_split(np.random.default_rng([seed, 1]).permutation(common), FOLDS))
    rows = np.concatenate(parts)
    found = [
        np.concatenate(
            [
                transferred(
                    guest, host, _others(parts, part), rest, part, replace(options, gamma=gamma), seed
                )
                for part in parts
            ]
        )
        for gamma in gammas
    ]
    best = int(np.argmax([measures(labels[rows], scores).get("auc", 0.5) for scores in found]))
    return Validated(gammas[best], parts, found[best])


def stack_of(host: Table, labels: Values, valid: Validated, seed: int) -> Stack:
    """Of the transfer and the host's own models, by scores of common rows held out in turn."""
    folds = [host_alone(host, labels, _others(valid.parts, part), part, seed) for part in valid.parts]
    own = [np.concatenate([fold[name] for fold in folds]) for name in folds[0]]
    known = labels[np.concatenate(valid.parts)]
    return Stack.of(np.stack([valid.scores, *own], axis=1), np.where(known == labels.max(), 1.0, -1.0))


def host_alone(
    host: Table, labels: Values, common: Integers, asked: Integers, seed: int
) -> dict[str, Values]:
    """Log odds of rows ``asked`` by logistic regression, boosting and a network that see the common rows' labels
    only."""
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.neural_network import MLPClassifier

    scaling = Scaling.of(host.features[common], 1e9)
    scaled = scaling.apply(host.features[common]), scaling.apply(host.features[asked])
    models: dict[str, tuple[Any, tuple[Values, Values]]] = {
        "logistic": (LogisticRegression(max_iter=1_000), scaled),
        "boosting": (
            HistGradientBoostingClassifier(random_state=seed),
            (host.features[common], host.features[asked]),
        ),
        "network": (MLPClassifier((8,), max_iter=500, random_state=seed), scaled),
    }
    found = {}
    for name, (model, (seen, wanted)) in models.items():
        with warnings.catch_warnings():
            # Not converged within its iterations: the baseline is what it is.
            warnings.simplefilter("ignore")
            chances = model.fit(seen, labels[common]).predict_proba(wanted)[:, 1]
        chances = np.clip(np.asarray(chances, np.float64), 1e-4, 1 - 1e-4)
        found[name] = np.log(chances / (1 - chances))
    return found


def latent_tables(
    rows: int, seed: int, *, factors: int = 10, columns: tuple[int, int] = (20, 40), label_noise: float = 3.0
) -> tuple[Table, Table]:
    """A generated set of common causes: the guest's table with labels and the host's, aligned.

    For each user z ~ N(0, I) of ``factors``; the guest's columns are zA + N(0, 0.5²), the host's zB + N(0, 1), and the
    label is 1 where z·w + N(0, label_noise²) > 0; A, B and w are N(0, 1), once for the set.

    Why so: a transfer can only pay where either side's columns tell of the same causes (both tables have more columns
    than there are factors), where labels are noisy (at 3, noise is about half of what a label is made of: who knew z
    and w would reach an AUC of .84), and where a host's labelled rows are few beside its columns: 98 rows for 40
    columns at 1 %. These numbers were chosen so that this is the case; with much less noise, regression on the host's
    98 rows is as good, and there is nothing to win. A transfer that loses here is broken; one that wins here says
    nothing of other data.
    """
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


def _others(parts: Sequence[Integers], part: Integers) -> Integers:
    return np.concatenate([one for one in parts if one is not part])
