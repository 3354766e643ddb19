"""How good the model is after a version: on nobody's test rows, and on the clients' own held-out rows.

Of an item table nobody asks how often its very first item is right: ``ranking`` has what is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from federated.data import Federation
from federated.device import LocalTraining
from federated.evaluation import compare, distribution, evaluate_global, train_alone
from federated.models import Model
from federated.recommendation import ItemTable
from federated.weights import Array
from services.simulation.ranking import final_ranking, ranking_evaluator

MOST_CLIENTS: Final = 2_000
"""Of a larger population so many are drawn, once, for evaluation."""
MOST_ALONE: Final = 100
"""For so many clients a model is trained on their own data alone, to compare."""

Numbers = npt.NDArray[np.int64]


def drawn_clients(federation: Federation, most: int, seed: int) -> Numbers:
    """At most ``most`` of the clients that have held-out rows, ascending; the same for the same seed."""
    having = np.flatnonzero(federation.held_out.sizes > 0)
    if len(having) <= most:
        return having
    return np.sort(np.random.default_rng([seed, len(having)]).choice(having, most, replace=False))


def evaluator(federation: Federation, seed: int) -> Callable[[Model], Callable[[Array], dict[str, Any]]]:
    """Makes, of a model, the function that ``Simulation`` calls: accuracy and loss on the test rows, and mean,
    worst decile and deviation over the clients; of an item table ``recall_at_10`` and ``ndcg_at_10``."""
    clients = drawn_clients(federation, MOST_CLIENTS, seed)

    def of(model: Model) -> Callable[[Array], dict[str, Any]]:
        if isinstance(model, ItemTable):
            return ranking_evaluator(federation, clients, model)

        def evaluate(weights: Array) -> dict[str, Any]:
            found: dict[str, Any] = {}
            if len(federation.test_labels):
                metrics = model.metrics(weights, federation.test_inputs, federation.test_labels)
                found |= {"accuracy": metrics.right / metrics.seen, "loss": metrics.loss / metrics.seen}
            if len(clients):
                spread = distribution(evaluate_global(federation, clients, model, weights))
                found |= {
                    "clients_mean": spread.mean,
                    "clients_worst_decile": spread.worst_decile,
                    "clients_deviation": spread.deviation,
                }
            return {name: value if np.isfinite(value) else None for name, value in found.items()}

        return evaluate

    return of


def final_evaluation(
    federation: Federation,
    model: Model,
    first: Array,
    weights: Array,
    training: LocalTraining,
    participations: float,
    seed: int,
) -> dict[str, Any]:
    """The distribution over the clients, and for some of them the global model against their own: trained from the
    same first weights for as many steps as the federation asked of a client on average. None where nobody holds
    rows out. Of an item table, which nobody can learn alone, the ``ranking`` instead."""
    clients = drawn_clients(federation, MOST_CLIENTS, seed)
    if isinstance(model, ItemTable):
        found = final_ranking(federation, clients, model, weights)
        return {"distribution": None, "global_against_local": None, "ranking": found}
    if len(clients) == 0:
        return {"distribution": None, "global_against_local": None}
    spread = distribution(evaluate_global(federation, clients, model, weights))
    some = drawn_clients(federation, MOST_ALONE, seed)
    with np.errstate(all="ignore"):
        alone = train_alone(
            federation, some, model, first, training, participations=participations, seed=seed
        )
    against = compare(evaluate_global(federation, some, model, weights), alone)
    return {
        "distribution": asdict(spread),
        "global_against_local": {**asdict(against), "participations": participations},
    }
