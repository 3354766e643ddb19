"""A course of rounds: simulated devices teach a running stack, and each round is watched into every region."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from federated.recommendation import (
    LeaveOneOut,
    Liked,
    Ranking,
    Rounds,
    by_device,
    cohort_of,
    draw_negatives,
    evaluate,
    leave_last_out,
)
from services.catalogue import Catalogue
from services.federation.arrival import Shown, Watched, await_arrival, lists_before
from services.federation.teaching import RowNumbers, Teacher
from services.settings.model import ProcessorSettings

if TYPE_CHECKING:
    from services.datasets.dataset import Dataset

NEGATIVES: Final = 99


@dataclass(frozen=True, slots=True)
class Devices:
    """Simulated devices, one a user, over the stack's items: what each likes with the last one held back, and all that
    each has had to do with."""

    likes: LeaveOneOut
    known: Liked

    @property
    def able(self) -> int:
        """How many have something to teach."""
        return int((self.likes.training.counts > 0).sum())


@dataclass(frozen=True, slots=True)
class Round:
    """What became of one: the devices' mean ``loss`` before it; ms until the last leader had the push, and by region
    and stage until it was there (None: not in time). ``alone``: nothing else taught the model meanwhile."""

    number: int
    devices: int
    loss: float
    applied_ms: float
    after_ms: dict[str, dict[str, float | None]]
    alone: bool


@dataclass
class Course:
    """``rounds`` with ``devices``, each as many samples as ``weight`` says. ``item``: whose list is watched;
    ``lists``: by region, it before the first round and after the latest."""

    teacher: Teacher
    devices: Devices
    regions: list[Watched]
    item: str
    rounds: Rounds
    weight: float
    timeout_s: float
    lists: dict[str, tuple[Shown, Shown]] = field(default_factory=dict)

    def run(self) -> Iterator[Round]:
        """Round after round; a region that does not get one in time does not keep it from the next. Raises
        ParameterError, ContributionRefused, and what asking a region raises."""
        liked = self.devices.likes.training
        for number in range(self.rounds.number):
            cohort = cohort_of(liked, self.rounds, number)
            others, before = self.teacher.others(), lists_before(self.regions, self.item)
            taught, total = self.teacher.round(liked, cohort, self.weight)
            arrivals = await_arrival(
                self.regions, taught.number, taught.sent_at_ms, self.item, before, self.timeout_s
            )
            for name, shown in before.items():
                first, _ = self.lists.get(name, (shown, shown))
                self.lists[name] = first, arrivals[name].shown or shown
            yield Round(
                number + 1,
                len(cohort),
                total.mean_scalar("loss"),
                taught.applied_at_ms - taught.sent_at_ms,
                {name: arrival.after_ms for name, arrival in arrivals.items()},
                self.teacher.others() == others,
            )

    def judge(self) -> Ranking | None:
        """How well the vectors served now find what devices hold back, among 99 items that each never had to do with;
        None where the catalogue is too small for that. Raises ParameterError."""
        likes, known = self.devices.likes, self.devices.known
        if known.catalogue - int(known.counts.max(initial=0)) < NEGATIVES or not (likes.held_out >= 0).any():
            return None
        negatives = draw_negatives(known, NEGATIVES, np.random.default_rng(self.rounds.seed))
        return evaluate(self.teacher.objective, self.teacher.vectors()[0], likes, negatives)


def devices_of(data: Dataset, labels: ProcessorSettings, catalogue: Catalogue, items: RowNumbers) -> Devices:
    """The users of ``data`` as devices, over the catalogue's rows ``items`` [N], numbered in that order. What a like is
    the processor's settings say; items that the stack does not have are passed over."""
    seen = data.interactions
    place = np.full(len(catalogue) + 1, -1, np.int64)
    place[items] = np.arange(len(items))
    # An unknown item is -1 there, which is the last place: none.
    named = place[catalogue.rows(list(data.items.ids))][seen.item]
    owners, there = seen.user.astype(np.int64), named >= 0
    kept = seen.liked(labels.positive_actions, labels.rating_threshold) & there
    users, count = len(data.users), len(items)
    likes = leave_last_out(owners[kept], named[kept], seen.timestamp_ms[kept], users, count)
    return Devices(likes, by_device(owners[there], named[there], users, count))


def most_liked(liked: Liked) -> int:
    """The item that most devices have."""
    return int(np.bincount(liked.items, minlength=liked.catalogue).argmax())
