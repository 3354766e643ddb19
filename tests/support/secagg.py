"""Shared by the tests of secure aggregation: plans, inputs, and what their plain sum is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from federated.privacy.section import SecureAggregationSection
from federated.secagg.settings import Plan, make_plan

VARIANTS = [("secagg", False), ("secagg", True), ("secagg+", False), ("secagg+", True)]
Integers = npt.NDArray[np.int64]


@lru_cache
def plan(
    protocol: str = "secagg", malicious: bool = False, clients: int = 12, length: int = 40, **settings: Any
) -> Plan:
    wanted = {"colluding": 0.1, "dropouts": 0.3, "clip": 1.0, "step_bits": 8, "max_weight": 3, **settings}
    section = SecureAggregationSection(protocol=protocol, malicious=malicious, **wanted)  # type: ignore[arg-type]
    return make_plan(section, clients, length)


def names(clients: int) -> list[str]:
    return [f"client-{number}" for number in range(clients)]


def inputs(of: Plan, clients: int = 0, seed: int = 0) -> dict[str, Integers]:
    """Whole-range inputs int64 [L] of as many clients as the plan takes."""
    draws, limit = np.random.default_rng(seed), of.bound * of.max_weight
    return {
        name: draws.integers(-limit, limit, of.length, endpoint=True) for name in names(clients or of.most)
    }


def plain_sum(given: Mapping[str, Integers], who: Iterable[str]) -> Integers:
    total: Integers = np.sum([given[name] for name in who], axis=0)
    return total
