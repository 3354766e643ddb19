"""What a SignDS upload weighs, and how long the accountant keeps a job of 1,000 rounds from starting."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Final

from benchmarks.federated_work import everyone
from benchmarks.privacy_work import DELTA
from benchmarks.report import Row
from benchmarks.turns import Figures, faced
from federated.frames import UPLOAD_OVERHEAD
from federated.privacy.accounting_statement import MEANINGLESS
from federated.privacy.section import PrivacySection
from federated.privacy.signds import reports_of

DENSE: Final = "float32"
ROUNDS: Final = 1_000
_WEIGHTS: Final = 100_000

_SECURE: Final = {"protocol": "secagg+", "dropouts": 0.0, "step_bits": 16}
STARTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "local, Gaussian": {"privacy": {"mechanism": "local_gaussian", "epsilon": 0.1}},
    "local, Laplace": {"privacy": {"mechanism": "local_laplace", "epsilon": 0.01}},
    "SignDS": {
        "privacy": {"mechanism": "signds", "sign_eps": 0.01, "magnitude_epsilon": 0.01},
        "strategy": {"name": "signds"},
    },
    "central": {"privacy": {"mechanism": "central_gaussian", "noise_multiplier": 50.0}},
    "central, Poisson .05": {
        "privacy": {"mechanism": "central_gaussian", "noise_multiplier": 1.0},
        "selection": {"name": "poisson", "rate": 0.05},
        "rounds": {"start_fl_job_threshold": 10, "fl_iteration_num": ROUNDS},
    },
    "distributed, Skellam": {
        "privacy": {"mechanism": "distributed_skellam", "noise_multiplier": 50.0},
        "secure_aggregation": _SECURE,
    },
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """``dimensions`` of uploads at ``epsilons`` of one selection; ``starts`` by name, each ``repeats`` times."""

    dimensions: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)
    epsilons: tuple[float, ...] = (4.0, 100.0)
    starts: tuple[str, ...] = tuple(STARTS)
    repeats: int = 3


def measure(sizes: Sizes) -> list[Row]:
    """All rows."""
    return [*_uploads(sizes), *_started(sizes)]


def _uploads(sizes: Sizes) -> list[Row]:
    rows = []
    for dimension in sizes.dimensions:
        for epsilon in sizes.epsilons:
            scheme = reports_of(PrivacySection("signds", sign_eps=epsilon))
            size = UPLOAD_OVERHEAD + 1 + scheme.most_bytes(dimension)
            dense = UPLOAD_OVERHEAD + 4 * dimension
            named = scheme.plan(dimension).named
            rows.append(
                faced(
                    f"SignDS upload, {dimension:,} weights, epsilon {epsilon:g}",
                    "bytes",
                    Figures((float(size),)),
                    Figures((float(dense),)),
                    DENSE,
                    less_is_better=True,
                    note=f"{named} coordinates"
                    + ("; no meaningful privacy" if epsilon >= MEANINGLESS else ""),
                )
            )
    return rows


def _started(sizes: Sizes) -> list[Row]:
    """Each start in a process of its own, which has nothing imported or cached."""
    rows = []
    for name in sizes.starts:
        found = []
        for _ in range(sizes.repeats):
            with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
                found.append(pool.submit(start_s, name).result())
        figures = Figures(tuple(seconds for seconds, _ in found))
        rows.append(
            Row(
                f"accounting when a job of {ROUNDS:,} rounds starts: {name}",
                "s",
                figures.median,
                spread=figures.spread,
                note=found[0][1],
            )
        )
    return rows


def start_s(name: str) -> tuple[float, str]:
    """Seconds from a job's tables to the rounds that its budget affords and to what it says of its privacy, the
    accountant's imports included; and what it says."""
    from federated.job import load_job
    from federated.privacy.accounting_statement import statement

    given = STARTS[name]
    tables: dict[str, Any] = {
        "rounds": everyone(1_000, ROUNDS),
        "data": {"clients": 1_000},
        **given,
        "privacy": {"budget_epsilon": 50.0, "budget_delta": DELTA, **given["privacy"]},
    }
    since = time.perf_counter()
    job = load_job(tables)
    job.make_rounds(_WEIGHTS)
    said = statement(job.exposure(_WEIGHTS), 0)
    seconds = time.perf_counter() - since
    end = said.epsilon_at_end
    return seconds, f"{said.accountant}, epsilon {0.0 if end is None else end:.3g} at the end"
