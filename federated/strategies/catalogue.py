"""Strategies by name, as a job's file names them."""

from __future__ import annotations

from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from federated.strategies.averaging import FedAvg, FedAvgM, FedProx, FedSGD
from federated.strategies.fednova import FedNova
from federated.strategies.frequency import AdaptiveFrequency
from federated.strategies.optimisers import FedAdagrad, FedAdam, FedYogi
from federated.strategies.robust import Median, MultiKrum, NormBound, TrimmedMean
from federated.strategies.scaffold import Scaffold
from federated.strategies.strategy import Strategy

STRATEGIES: dict[str, type[Strategy]] = {
    strategy.name: strategy
    for strategy in (
        FedAvg,
        FedSGD,
        FedProx,
        FedAvgM,
        FedAdam,
        FedYogi,
        FedAdagrad,
        Scaffold,
        FedNova,
        AdaptiveFrequency,
        NormBound,
        Median,
        TrimmedMean,
        MultiKrum,
    )
}


def make_strategy(name: str, **options: Any) -> Strategy:
    """The strategy ``name`` with its options. Raises ValueError for an unknown name or option, with the nearest known
    one, for a missing option, and for a value out of range."""
    if name not in STRATEGIES:
        raise ValueError(f"strategy {name!r} is unknown{_nearest(name, list(STRATEGIES))}")
    kind = STRATEGIES[name]
    known = [option.name for option in fields(kind)]
    for option in options:
        if option not in known:
            raise ValueError(f"{name} has no option {option!r}{_nearest(option, known)}")
    try:
        return kind(**options)
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from error


def _nearest(word: str, known: list[str]) -> str:
    near = get_close_matches(word, known, 1)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
