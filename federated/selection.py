"""Who may train: rules that look at one client at a time, by name, so that no list of the population is needed.

A server asks ``judge`` for a client that knocks; the simulator asks ``mask`` for many at once: the same answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from federated.sections import SectionRefused, read_section

Flags = npt.NDArray[np.bool_]
Columns = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a device says of itself. ``battery`` is in [0, 1], ``compute`` in examples per second of training,
    ``bandwidth`` in bytes per second up, ``examples`` what it would train on. It may lie: nothing but its own
    chance to train depends on it."""

    battery: float = 1.0
    charging: bool = True
    unmetered: bool = True
    idle: bool = True
    compute: float = math.inf
    bandwidth: float = math.inf
    examples: int = 0


class SelectionRefused(ValueError):
    """An unknown rule of selection, or options that make no sense."""


class Selection(Protocol):
    """A rule of selection; ``window`` is how many past iterations it must know of a client."""

    name: ClassVar[str]

    @property
    def window(self) -> int: ...

    def judge(self, facts: DeviceFacts, draw: float, recent: int) -> str:
        """Empty when the client may train, else why not. ``draw`` is uniform in [0, 1), ``recent`` counts in how
        many of the last ``window`` iterations the client took part."""
        ...

    def mask(self, facts: Columns, draws: npt.NDArray[np.float64], recent: npt.NDArray[np.int64]) -> Flags:
        """The same for columns of N clients: ``facts`` by the names of DeviceFacts (a missing column means the
        default), ``draws`` ``[N]``, ``recent`` ``[N]``; gives ``[N]``."""
        ...


@dataclass(frozen=True, slots=True)
class Everyone:
    """Whoever comes."""

    name: ClassVar[str] = "everyone"
    window: int = 0

    def judge(self, facts: DeviceFacts, draw: float, recent: int) -> str:
        return ""

    def mask(self, facts: Columns, draws: npt.NDArray[np.float64], recent: npt.NDArray[np.int64]) -> Flags:
        return np.ones(len(draws), np.bool_)


@dataclass(frozen=True, slots=True)
class Random:
    """Each knock is let in with probability ``share``, so that not always the same are first."""

    name: ClassVar[str] = "random"
    share: float = 0.1
    window: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise SelectionRefused(f"random: share must be in (0, 1], not {self.share}")

    def judge(self, facts: DeviceFacts, draw: float, recent: int) -> str:
        return "" if draw < self.share else "not drawn this time"

    def mask(self, facts: Columns, draws: npt.NDArray[np.float64], recent: npt.NDArray[np.int64]) -> Flags:
        flags: Flags = draws < self.share
        return flags


@dataclass(frozen=True, slots=True)
class Poisson:
    """Each client is drawn for each iteration with probability ``rate``, by a coin of its own that asking again does
    not change (``Tickets.coin``): what the accounting of amplification by sampling assumes. Stands alone."""

    name: ClassVar[str] = "poisson"
    rate: float = 0.1
    window: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise SelectionRefused(f"poisson: rate must be above 0 and below 1, not {self.rate}")

    def judge(self, facts: DeviceFacts, draw: float, recent: int) -> str:
        return "" if draw < self.rate else "not drawn for this iteration"

    def mask(self, facts: Columns, draws: npt.NDArray[np.float64], recent: npt.NDArray[np.int64]) -> Flags:
        flags: Flags = draws < self.rate
        return flags

    def expected(self, population: int) -> float:
        """How many of ``population`` clients an iteration draws on average: what sums are divided by."""
        return self.rate * population

    def rate_if_valid(self, population: int, fewest: int) -> float:
        """The probability that one of ``population`` = N clients was drawn, given that at least ``fewest`` = T were:
        q · P(Bin(N − 1, q) >= T − 1) / P(Bin(N, q) >= T). An iteration of fewer publishes nothing, so whoever sees a
        new version knows that much, and it is this rate that thins out the version's release."""
        if fewest <= 0:
            return self.rate
        with_it = 1.0 - _below(population - 1, self.rate, fewest - 1)
        valid = 1.0 - _below(population, self.rate, fewest)
        return min(1.0, self.rate * with_it / valid) if valid > 0.0 else 1.0


@dataclass(frozen=True, slots=True)
class Eligible:
    """Devices that training does not disturb: enough battery, and as asked charging, unmetered and idle."""

    name: ClassVar[str] = "eligible"
    battery: float = 0.3
    charging: bool = True
    unmetered: bool = True
    idle: bool = True
    window: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.battery <= 1:
            raise SelectionRefused(f"eligible: battery must be in [0, 1], not {self.battery}")

    def judge(self, facts: DeviceFacts, draw: float, recent: int) -> str:
        if not facts.battery >= self.battery:
            return f"battery below {self.battery:.0%}"
        for name in ("charging", "unmetered", "idle"):
            if getattr(self, name) and not getattr(facts, name):
                return f"not {name}"
        return ""

    def mask(self, facts: Columns, draws: npt.NDArray[np.float64], recent: npt.NDArray[np.int64]) -> Flags:
        flags = _column(facts, "battery", len(draws)) >= self.battery
        for name in ("charging", "unmetered", "idle"):
            if getattr(self, name):
                flags = flags & _column(facts, name, len(draws)).astype(np.bool_)
        return np.asarray(flags, np.bool_)


@dataclass(frozen=True, slots=True)
class Capability:
    """Devices that can make the deadline: training at their speed and uploading at their bandwidth takes at most
    ``deadline_s``. ``examples`` is the local work in examples (0: what the device says it holds), ``upload_bytes``
    the size of an update (after FedCS, Nishio and Yonetani 2019)."""

    name: ClassVar[str] = "capability"
    deadline_s: float = 60.0
    examples: int = 0
    upload_bytes: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        if not self.deadline_s > 0 or self.examples < 0 or self.upload_bytes < 0:
            raise SelectionRefused(
                f"capability: deadline_s must be positive, the rest not negative, not {self}"
            )

    def judge(self, facts: DeviceFacts, draw: float, recent: int) -> str:
        if not (facts.compute > 0 and facts.bandwidth > 0):
            return "no speed"
        took_s = (self.examples or facts.examples) / facts.compute + self.upload_bytes / facts.bandwidth
        return (
            ""
            if took_s <= self.deadline_s
            else f"would take {took_s:.0f} s, the deadline is {self.deadline_s:g} s"
        )

    def mask(self, facts: Columns, draws: npt.NDArray[np.float64], recent: npt.NDArray[np.int64]) -> Flags:
        compute, bandwidth = (
            _column(facts, name, len(draws)).astype(np.float64) for name in ("compute", "bandwidth")
        )
        work = self.examples or _column(facts, "examples", len(draws)).astype(np.float64)
        able = (compute > 0) & (bandwidth > 0)
        with np.errstate(over="ignore"):  # a speed of almost nothing takes for ever
            took_s = work / np.where(able, compute, 1.0) + self.upload_bytes / np.where(able, bandwidth, 1.0)
        return np.asarray(able & (took_s <= self.deadline_s), np.bool_)


@dataclass(frozen=True, slots=True)
class FairnessCap:
    """At most ``most`` of the last ``window`` iterations for any client, so that the model is not that of the few
    who are always there. The servers count from the entries of those iterations: memory follows the cohort."""

    name: ClassVar[str] = "fairness"
    most: int = 1
    window: int = 5

    def __post_init__(self) -> None:
        if self.most < 1 or not 1 <= self.window <= 64:
            raise SelectionRefused(f"fairness: most must be at least 1 and window in [1, 64], not {self}")

    def judge(self, facts: DeviceFacts, draw: float, recent: int) -> str:
        return "" if recent < self.most else f"took part in {recent} of the last {self.window} iterations"

    def mask(self, facts: Columns, draws: npt.NDArray[np.float64], recent: npt.NDArray[np.int64]) -> Flags:
        flags: Flags = recent < self.most
        return flags


@dataclass(frozen=True, slots=True)
class AllOf:
    """Several rules, all of which must let a client in."""

    name: ClassVar[str] = "all"
    rules: tuple[Selection, ...] = ()

    @property
    def window(self) -> int:
        return max((rule.window for rule in self.rules), default=0)

    def judge(self, facts: DeviceFacts, draw: float, recent: int) -> str:
        return next((why for rule in self.rules if (why := rule.judge(facts, draw, recent))), "")

    def mask(self, facts: Columns, draws: npt.NDArray[np.float64], recent: npt.NDArray[np.int64]) -> Flags:
        flags = np.ones(len(draws), np.bool_)
        for rule in self.rules:
            flags &= rule.mask(facts, draws, recent)
        return flags


RULES: Mapping[str, type[Selection]] = {
    rule.name: rule for rule in (Everyone, Random, Poisson, Eligible, Capability, FairnessCap)
}


def make_selection(name: str, /, **options: float | int | bool | str) -> Selection:
    """The rule called ``name`` with ``options``; several joined by "+" get the options that each knows. Text is taken
    for times and sizes ("30s", "64MiB").

    Raises SelectionRefused on an unknown rule or option.
    """
    names = [part.strip() for part in name.split("+")]
    unknown = [part for part in names if part not in RULES]
    if unknown or len(set(names)) != len(names):
        raise SelectionRefused(
            f"unknown or repeated selection {name!r}; known: {', '.join(RULES)}, joined by +"
        )
    if len(names) > 1 and Poisson.name in names:
        raise SelectionRefused(
            f"selection {name!r}: poisson stands alone, since sums are divided by the count that it expects"
        )
    left = set(options)
    rules = []
    for part in names:
        known = {field.name for field in fields(RULES[part])} & set(options)  # type: ignore[arg-type]
        left -= known
        rules.append(_rule(RULES[part], {option: options[option] for option in known}))
    if left:
        has = [field.name for part in names for field in fields(RULES[part])]  # type: ignore[arg-type]
        raise SelectionRefused(
            f"selection {name!r} has no option {', '.join(sorted(left))}; it has {', '.join(has) or 'none'}, and "
            f"selection.name is one of {', '.join(RULES)}"
        )
    return rules[0] if len(rules) == 1 else AllOf(tuple(rules))


def _rule(kind: type[Selection], options: Mapping[str, object]) -> Selection:
    try:
        return read_section(kind, options, kind.name)
    except SectionRefused as error:
        if isinstance(error.__cause__, SelectionRefused):
            raise error.__cause__ from None  # says which rule by itself
        raise SelectionRefused(str(error)) from error


def earned_sampling(mechanism: str, selection: Selection) -> float:
    """The sampling rate that accounting may assume, 1 where none is earned. Only central noise earns from poisson
    sampling: first-come clients are no random sample, and local and distributed noise protect against the servers, who
    know whom they drew."""
    return selection.rate if mechanism == "central_gaussian" and isinstance(selection, Poisson) else 1.0


def _below(trials: int, chance: float, limit: int) -> float:
    """P(Bin(``trials``, ``chance``) < ``limit``)."""
    wanted = np.arange(min(limit, trials + 1), dtype=np.float64)
    if not len(wanted):
        return 0.0
    steps = np.log(trials - wanted[:-1]) - np.log1p(wanted[:-1])
    ways = np.concatenate([[0.0], np.cumsum(steps)])
    logs = ways + wanted * math.log(chance) + (trials - wanted) * math.log1p(-chance)
    return min(1.0, float(np.exp(logs).sum()))


def _column(facts: Columns, name: str, rows: int) -> npt.NDArray[Any]:
    return facts[name] if name in facts else np.full(rows, getattr(DeviceFacts(), name))
