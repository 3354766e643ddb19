"""What the learning parts of ``privacy`` share: mechanisms at a total ε, and digits learned by the simulator's engine.

ε is that of a whole job at δ = 1e-5, by this repository's accountants: noise is found for it by bisection. Everybody
takes part in every round, so nothing is amplified. The engine, the reports and the sums are the simulator's; its
virtual time, which would only make clients wait, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final

import numpy as np

from benchmarks.federated_work import digits, everyone, simulated
from federated.data import Federation, Shares
from federated.job import FederatedJob, load_job
from federated.privacy.accounting_statement import accountant_of
from federated.privacy.section import DISTRIBUTED, Mechanism
from federated.simulator.world import Counted

DELTA: Final = 1e-5
SOFTMAX: Final[Mapping[str, Any]] = {"name": "softmax"}
TRAINING: Final[Mapping[str, Any]] = {"steps": 5, "batch_size": 20, "rate": 0.5}
MAGNITUDE_SHARE: Final = 0.1
"""Of SignDS's ε per report, what its magnitude costs."""
_HALVINGS: Final = 24


@dataclass(frozen=True, slots=True)
class Way:
    """A mechanism (None: no privacy) with what was chosen for it on validation rows: ``rounds``, and ``size``, its clip
    or, of SignDS, ``sign_global_lr``. ``options`` are further ones of [privacy]."""

    mechanism: Mechanism
    rounds: int
    size: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)


def tables(
    way: Way, clients: int, seed: int, noise: float, model: Mapping[str, Any] = SOFTMAX
) -> dict[str, Any]:
    """The job of ``clients`` clients; ``noise`` is the multiplier of sums, or ε of one report."""
    mechanism = way.mechanism
    privacy: dict[str, Any] = {"mechanism": mechanism, "budget_delta": DELTA, **way.options}
    job: dict[str, Any] = {
        "job": {"seed": seed},
        "rounds": everyone(clients, way.rounds),
        "model": dict(model),
        "data": {"clients": clients},
        "training": dict(TRAINING),
        "strategy": {"name": "signds" if mechanism == "signds" else "fedavg"},
        "privacy": privacy,
        "simulation": {"checkpoint_every": 0},
    }
    if mechanism == "signds":
        privacy |= {
            "sign_eps": noise * (1.0 - MAGNITUDE_SHARE),
            "magnitude_epsilon": noise * MAGNITUDE_SHARE,
            "sign_global_lr": way.size,
        }
    elif mechanism != "none":
        local = mechanism in ("local_gaussian", "local_laplace")
        privacy |= {"clip": way.size, "epsilon" if local else "noise_multiplier": noise}
        if local:
            privacy["delta"] = DELTA
    if mechanism in DISTRIBUTED:
        job["secure_aggregation"] = {"protocol": "secagg+", "dropouts": 0.0}
    return job


def spent(job: FederatedJob, dimension: int) -> float:
    """ε of the whole job for models of D weights."""
    accountant = accountant_of(job.exposure(dimension))
    return 0.0 if accountant is None else accountant.epsilon(job.rounds.fl_iteration_num)


@lru_cache(maxsize=1024)
def _noise(mechanism: Mechanism, rounds: int, epsilon: float, clients: int, dimension: int) -> float:
    way = Way(mechanism, rounds)
    grows = mechanism in ("local_gaussian", "local_laplace", "signds")  # with ε of a report; multipliers fall

    def enough(noise: float) -> bool:
        return spent(load_job(tables(way, clients, 0, noise)), dimension) <= epsilon

    low, high = (epsilon / rounds / 4.0, 2.0 * epsilon) if grows else (1e-2, 1e3)
    for _ in range(_HALVINGS):
        middle = float(np.sqrt(low * high))
        if enough(middle) == grows:
            low = middle
        else:
            high = middle
    return low if grows else high


def noise_for(way: Way, epsilon: float, clients: int, dimension: int) -> float:
    """The noise (see ``tables``) with which the whole job spends at most ``epsilon``, found to one part in a million.

    The clip does not enter: noise is relative to it.
    """
    if way.mechanism == "none":
        return 0.0
    return _noise(way.mechanism, way.rounds, epsilon, clients, dimension)


@lru_cache(maxsize=8)
def dealt(clients: int, seed: int) -> Federation:
    """Digits over ``clients``, shifted and turned as the simulator does, but made once: what is varied is the noise."""
    lazy = digits(clients, seed)
    rows = lazy.rows(np.arange(clients))
    counts = np.asarray(rows.counts)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    everything = Shares(np.arange(offsets[-1], dtype=np.int32), offsets)
    return Federation(
        lazy.name,
        rows.inputs[rows.mask],
        rows.labels[rows.mask],
        lazy.classes,
        everything,
        Shares(np.zeros(0, np.int32), np.zeros_like(offsets)),
        lazy.test_inputs,
        lazy.test_labels,
    )


def for_validation(clients: int, seed: int) -> Federation:
    """The same with rows that nobody trains on in place of the test rows, for choosing a ``Way``."""
    lazy = digits(clients, seed)
    rows = np.unique(lazy.held_out.rows)
    return replace(dealt(clients, seed), test_inputs=lazy.inputs[rows], test_labels=lazy.labels[rows])


def learn(
    job: Mapping[str, Any], federation: Federation, told: Callable[[float], object] | None = None
) -> float:
    """% of the test rows that are right after the job's rounds, in all of which everybody takes part; ``told`` hears
    it after each."""
    with simulated(job, federation, evaluated=False) as built:
        learning, right = built.simulation.learning, 0.0
        rounds = int(job["rounds"]["fl_iteration_num"])
        for version in range(rounds):
            uploads = [Counted(client, version + 1, 0) for client in range(federation.clients)]
            learning.learn(uploads, version, None)
            if told is None and version < rounds - 1:
                continue
            found = built.model.metrics(learning.weights, federation.test_inputs, federation.test_labels)
            right = 100.0 * found.right / found.seen
            if told is not None:
                told(right)
    return right
