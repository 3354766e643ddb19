"""Strategies by name, as a job's file names them."""

from __future__ import annotations

from dataclasses import MISSING, fields
from difflib import get_close_matches
from typing import Any

from federated.strategies.averaging import FedAvg, FedAvgM, FedProx, FedSGD
from federated.strategies.fednova import FedNova
from federated.strategies.frequency import AdaptiveFrequency
from federated.strategies.optimisers import FedAdagrad, FedAdam, FedYogi
from federated.strategies.robust import Median, MultiKrum, NormBound, TrimmedMean
from federated.strategies.scaffold import Scaffold
from federated.strategies.signds import SignVotes
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
        SignVotes,
    )
}


def make_strategy(name: str, **options: Any) -> Strategy:
    """The strategy ``name`` with its options. Raises ValueError for an unknown name or option, with the nearest known
    one, for a missing option, and for a value out of range."""
    if name not in STRATEGIES:
        raise ValueError(f"strategy {name!r} is unknown{_nearest(name, list(STRATEGIES))}")
    kind = STRATEGIES[name]
    known = {option.name: str(option.type) for option in fields(kind)}
    for option, value in options.items():
        if option not in known:
            raise ValueError(f"{name} has no option {option!r}{_nearest(option, list(known))}")
        whole = known[option] == "int"
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise ValueError(f"{name}: {option} must be a {'whole ' if whole else ''}number, not {value!r}")
    for needed in fields(kind):
        if needed.default is MISSING and needed.name not in options:
            raise ValueError(f"{name} needs its option {needed.name}")
    return kind(**options)


def _nearest(word: str, known: list[str]) -> str:
    near = get_close_matches(word, known, 1)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
