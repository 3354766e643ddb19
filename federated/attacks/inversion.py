"""Inversion as a game of naming: which of N candidate records did the client train on?

In each trial the client has one of the candidates, each as likely as any other, and perhaps further records. The
adversary orders the candidates by its score; that it is right in one of N is chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from federated.attacks.rates import Estimate, mean_of, wilson
from federated.attacks.setting import Setting
from federated.attacks.spread import Floats
from federated.attacks.views import View
from federated.weights import Array

Knows = Literal["rest", "candidates"]


@dataclass(frozen=True, slots=True)
class Client:
    """The attacked client: how many ``records`` it has, and whether the adversary knows the "rest" of them beside the
    one to be named, or the "candidates" alone."""

    records: int = 1
    knows: Knows = "rest"


@dataclass(frozen=True)
class Trials:
    """R trials of the game: the true candidates [R], what was learned from them [R, D], and what the adversary can work
    out: the candidates' updates ``expected`` [N, D], ``companions`` [Q, D] where it does not know the rest, and updates
    ``alike`` [Q, D] those of the ``others`` [R, n − 1, D]."""

    truths: np.ndarray[tuple[int], np.dtype[np.int64]]
    updates: Array
    expected: Array
    companions: Array | None
    others: Array
    alike: Array


@dataclass(frozen=True, slots=True)
class Inversion:
    """How often the true record was named first and among the first ten, and its mean rank (1 is first; chance is
    (N + 1) / 2)."""

    trials: int
    candidates: int
    top_1: Estimate
    top_10: Estimate
    mean_rank: Estimate

    @property
    def above_chance(self) -> bool:
        """Whether naming it first is surely better than chance."""
        return self.top_1.low > 1.0 / self.candidates


def draw_trials(
    setting: Setting,
    client: Client,
    trials: int,
    cohort: int,
    generator: np.random.Generator,
    companions: int = 200,
) -> Trials:
    """R = ``trials`` trials with ``cohort`` clients, of which one is attacked. The others have as many records, of the
    setting's further rows; ``companions`` is how many updates the adversary makes up to learn their spread."""
    truths = generator.integers(0, setting.candidates, trials)
    everyone = np.arange(setting.candidates)
    alike = setting.strangers(setting.draw(generator, 2 * companions, client.records))
    others = alike[generator.integers(0, len(alike), (trials, cohort - 1))]
    # The adversary's picture of the crowd comes from updates of its own, not from those that it attacks.
    known = setting.strangers(setting.draw(generator, 2 * companions, client.records))
    if client.records == 1:
        expected = setting.updates(everyone)
        return Trials(truths, expected[truths], expected, None, others, known)
    if client.knows == "rest":
        expected = setting.updates(everyone, setting.draw(generator, client.records - 1))
        return Trials(truths, expected[truths], expected, None, others, known)
    rest = setting.draw(generator, trials, client.records - 1)
    some = [setting.updates(everyone, setting.draw(generator, client.records - 1)) for _ in range(4)]
    expected = np.mean(some, axis=0, dtype=np.float32)
    return Trials(truths, setting.updates(truths, rest), expected, known, others, known)


def invert(view: View, trials: Trials, generator: np.random.Generator) -> Inversion:
    """Play the trials in ``view``."""
    seen = view.observe(trials.updates, trials.others, generator)
    likelihood = view.explain(trials.companions, trials.alike, trials.others.shape[1])
    return judge(likelihood.pairs(seen, trials.expected), trials.truths, generator)


def judge(
    scores: Floats, truths: np.ndarray[tuple[int], np.dtype[np.int64]], generator: np.random.Generator
) -> Inversion:
    """Ranks by ``scores`` [R, N]; among equal scores the order is drawn."""
    own = scores[np.arange(len(truths)), truths][:, None]
    above = (scores > own).sum(axis=1)
    equal = (scores == own).sum(axis=1)
    ranks = 1 + above + generator.integers(0, equal)
    count, candidates = scores.shape
    return Inversion(
        count,
        candidates,
        wilson(int((ranks == 1).sum()), count),
        wilson(int((ranks <= 10).sum()), count),
        mean_of(ranks.astype(np.float64)),
    )
