"""Membership: was a record among a client's? A likelihood-ratio test with shadow runs (Carlini et al. 2022).

Worlds run in pairs, K at a time on a batch axis: T iterations of a federation whose other records and clients are drawn
anew in each world. A view of single reports follows the attacked client: in half of the worlds it has the record x, in
the other half another one in its place. A view of sums (and so of released models) asks for more: whether the client
with x takes part at all, which is what the privacy of a sum speaks about.

The adversary sees every iteration's model and what its view shows. At each model it works out what the client would
have sent with and without x, as far as it knows, and adds up the log-likelihood ratios. What those are worth it learns
from worlds of its own, half as many again, before it judges.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, cast

import numpy as np

from federated.attacks.likelihoods import Likelihood, Normal
from federated.attacks.rates import Floats, Told, auc_of, curve_of, told
from federated.attacks.setting import Places, Setting
from federated.attacks.views import Reports, Summed, View
from federated.models import Inputs, Labels
from federated.simulator.arrays import NumpyArrays
from federated.simulator.networks import twin
from federated.weights import Array

_MEMORY_VALUES: Final = 2**21  # of the worlds in work at once
_COMPANIONS: Final = 200
_TYPICAL_ROWS: Final = 128
_NARROWEST: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Federations:
    """``worlds`` with x and as many without, over T = ``rounds`` iterations of ``clients`` clients with ``records``
    records each."""

    worlds: int = 200
    rounds: int = 5
    clients: int = 10
    records: int = 8

    def __post_init__(self) -> None:
        if self.worlds < 8 or self.rounds < 1 or self.clients < 2 or self.records < 1:
            raise ValueError(f"at least 8 worlds, 1 round, 2 clients and 1 record: {self}")


@dataclass(frozen=True)
class Membership:
    """How well members and others were told apart, and the scores themselves, of as many worlds with x as without."""

    told: Told
    members: Floats
    others: Floats

    @property
    def curve(self) -> tuple[Floats, Floats]:
        """False and true positive rates."""
        return curve_of(self.members, self.others)


def attack(
    setting: Setting, view: View, federations: Federations, generator: np.random.Generator
) -> Membership:
    """Run the worlds and judge. Clients train on all their records at once, as many steps as the setting's training
    says."""
    learner = _Learner(setting)
    assumed = _assume(setting, learner, view, federations, generator)
    taught = max(8, federations.worlds // 2)
    present, absent = (
        _ratios(
            setting, learner, view, assumed, federations, taught + federations.worlds, with_record, generator
        )
        for with_record in (True, False)
    )
    judge = _taught(present[:taught], absent[:taught])
    members, others = judge(present[taught:]), judge(absent[taught:])
    return Membership(told(members, others, generator), members, others)


@dataclass(frozen=True)
class _Worlds:
    """K worlds: rows [K, n, M, F] of each client with labels [K, n, M], the attacked client first, whose first row is x
    if it is there; x itself [K, 1, F] with its label [K, 1]."""

    inputs: Inputs
    labels: Labels
    record: Inputs
    answer: Labels


class _Learner:
    """What clients learn from starts of their own, on the batch axis."""

    def __init__(self, setting: Setting) -> None:
        self._network = twin(setting.model, NumpyArrays())
        self._training = setting.training

    def learn(self, starts: Array, inputs: Inputs, labels: Labels) -> Array:
        """Differences [B, D] of clients that begin at ``starts`` [B, D] with rows [B, M, F] and labels [B, M]."""
        weights, gradient = starts.copy(), np.empty_like(starts)
        rows = labels.shape[1]
        shares = np.full(labels.shape, 1.0 / rows, np.float32)
        for _ in range(self._training.steps_for(rows)):
            self._network.gradient(weights, inputs, labels, shares, gradient)
            gradient *= np.float32(self._training.rate)
            weights -= gradient
        weights -= starts
        return weights


@dataclass(frozen=True, slots=True)
class _Assumed:
    """The adversary's likelihoods with and without the record, how much of the usual update is left in the mean of
    clipped ones, and the rows ``typical`` [M] whose update at a model is the usual one. The same in all worlds: what
    were drawn anew for some would tell these from others."""

    present: Likelihood
    absent: Likelihood
    kept: float
    typical: Places


def _assume(
    setting: Setting, learner: _Learner, view: View, federations: Federations, generator: np.random.Generator
) -> _Assumed:
    """What the adversary learns from updates of its own at the first model."""
    drawn = setting.draw(generator, 2 * _COMPANIONS, federations.records)
    starts = np.broadcast_to(setting.start, (len(drawn), len(setting.start))).copy()
    alike = learner.learn(starts, setting.more_inputs[drawn], setting.more_labels[drawn])
    others, typical = (
        federations.clients - 1,
        setting.draw(generator, min(_TYPICAL_ROWS, len(setting.more_labels))),
    )
    present = view.explain(alike if federations.records > 1 else None, alike, others)
    if not isinstance(present, Normal):
        return _Assumed(present, present, 1.0, typical)
    if not isinstance(view, Summed):
        return _Assumed(present, view.explain(alike, alike, others), 1.0, typical)
    usual, sent = alike.mean(axis=0, dtype=np.float64), view.clipped(alike).mean(axis=0, dtype=np.float64)
    present = replace(present, offset=0.0)
    return _Assumed(present, present, float(sent @ usual / (usual @ usual)), typical)


def _ratios(
    setting: Setting,
    learner: _Learner,
    view: View,
    assumed: _Assumed,
    federations: Federations,
    worlds: int,
    with_record: bool,
    generator: np.random.Generator,
) -> Floats:
    """The summed log-likelihood ratio of each world [``worlds``]."""
    size = max(1, _MEMORY_VALUES // (federations.clients * setting.start.size))
    found = []
    for first in range(0, worlds, size):
        count = min(size, worlds - first)
        some = _draw_worlds(setting, federations, count, with_record, generator)
        found.append(_run(setting, learner, view, assumed, federations, some, with_record, generator))
    return np.concatenate(found)


def _draw_worlds(
    setting: Setting, federations: Federations, count: int, with_record: bool, generator: np.random.Generator
) -> _Worlds:
    rows = setting.draw(generator, count, federations.clients * federations.records)
    shape = (count, federations.clients, federations.records)
    inputs, labels = setting.more_inputs[rows], setting.more_labels[rows]
    inputs, labels = inputs.reshape(*shape, -1), labels.reshape(shape)
    chosen = generator.integers(0, setting.candidates, count)
    if with_record:
        inputs[:, 0, 0], labels[:, 0, 0] = setting.inputs[chosen], setting.labels[chosen]
    return _Worlds(inputs, labels, setting.inputs[chosen][:, None], setting.labels[chosen][:, None])


def _run(
    setting: Setting,
    learner: _Learner,
    view: View,
    assumed: _Assumed,
    federations: Federations,
    worlds: _Worlds,
    with_record: bool,
    generator: np.random.Generator,
) -> Floats:
    count, clients, size = len(worlds.labels), federations.clients, setting.start.size
    typical = assumed.typical
    typical_inputs = np.broadcast_to(
        setting.more_inputs[typical], (count, len(typical), setting.inputs.shape[1])
    )
    typical_labels = np.broadcast_to(setting.more_labels[typical], (count, len(typical)))
    models = np.broadcast_to(setting.start, (count, size)).copy()
    ratios = np.zeros(count, np.float64)
    for _ in range(federations.rounds):
        starts = np.repeat(models, clients, axis=0)
        flat = (count * clients, federations.records)
        updates = learner.learn(starts, worlds.inputs.reshape(*flat, -1), worlds.labels.reshape(flat))
        usual = learner.learn(models, typical_inputs, typical_labels)
        alone = learner.learn(models, worlds.record, worlds.answer)
        having = usual + (alone - usual) / np.float32(federations.records)
        updates = updates.reshape(count, clients, size)
        if isinstance(view, Summed):
            own = updates[:, 0] if with_record else np.zeros_like(updates[:, 0])
            seen = view.observe(own, updates[:, 1:], generator)
            step = (seen / clients).astype(np.float32)
            # Others' updates shrink and turn as the model learns: less what they usually are at this model.
            left = seen - (clients - 1) * assumed.kept * usual
            ratios += assumed.present.rows(left, having) - assumed.absent.rows(left, np.zeros_like(having))
        else:
            reports = cast(Reports, view)
            sent = reports.observe(updates.reshape(-1, size), updates[:, 1:], generator)
            step = reports.mean(sent, clients)
            own_report = reports.at(sent, np.arange(0, count * clients, clients))
            ratios += assumed.present.rows(own_report, having) - assumed.absent.rows(own_report, usual)
        models += step
    return ratios


def _taught(present: Floats, absent: Floats) -> Callable[[Floats], Floats]:
    """How ratios are to be judged: by the densities of two normal distributions that are fitted to worlds with and
    without x, or as they are, whichever tells these apart better; in units of what worlds without x give."""
    with_record, without = _Fitted(present), _Fitted(absent)

    def by_densities(ratios: Floats) -> Floats:
        return with_record.log_density(ratios) - without.log_density(ratios)

    def as_they_are(ratios: Floats) -> Floats:
        return ratios

    best = max((as_they_are, by_densities), key=lambda judge: auc_of(judge(present), judge(absent)))
    unit = _Fitted(best(absent))
    return lambda ratios: np.asarray((best(ratios) - unit.mean) / unit.spread)


class _Fitted:
    """A normal distribution with the mean and spread of what was seen."""

    def __init__(self, ratios: Floats) -> None:
        self.mean, self.spread = float(ratios.mean()), max(float(ratios.std(ddof=1)), _NARROWEST)

    def log_density(self, ratios: Floats) -> Floats:
        """Up to a constant."""
        return np.asarray(-0.5 * np.square((ratios - self.mean) / self.spread) - np.log(self.spread))
