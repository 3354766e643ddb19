"""Whose likes make which device, and a course of rounds over regions that are played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.batches import SCHEMA

from featurestore.encoder import Encoder
from featurestore.online import Cell
from federated.recommendation import Rounds, Softmax, by_device, initial_table, leave_last_out
from services.catalogue import Catalogue
from services.datasets.dataset import Dataset, Entities, Interactions
from services.federation.arrival import Shown, Watched
from services.federation.course import Course, Devices, devices_of, most_liked
from services.settings.model import ProcessorSettings

NOW_MS = 1_700_000_000_000


def dataset(rows: list[tuple[str, str, str, float, int]]) -> Dataset:
    """Of (user, item, action, value, time)."""
    users, items, actions = (tuple(dict.fromkeys(row[n] for row in rows)) for n in range(3))
    empty: tuple[dict[str, Any], ...] = ({},)
    seen = Interactions(
        np.array([users.index(row[0]) for row in rows], np.int32),
        np.array([items.index(row[1]) for row in rows], np.int32),
        np.array([actions.index(row[2]) for row in rows], np.int16),
        np.array([row[3] for row in rows]),
        np.array([row[4] for row in rows]),
        np.array([f"e{n}" for n in range(len(rows))], object),
        actions,
    )
    return Dataset(
        "d", "here", Entities(users, empty * len(users)), Entities(items, empty * len(items)), seen
    )


def test_devices_are_users_over_the_stacks_items_in_its_numbering() -> None:
    catalogue = Catalogue(Encoder(SCHEMA))
    catalogue.apply(["c", "hidden", "a", "b"], [{"categories": Cell(["x"], NOW_MS)}] * 4, NOW_MS)
    shown = catalogue.rows(["a", "b", "c"])  # their numbers are 0, 1, 2
    rows = [
        ("u", "a", "rating", 5.0, 3),
        ("u", "b", "rating", 2.0, 4),  # known, not liked
        ("u", "c", "like", np.nan, 9),  # the last one
        ("u", "elsewhere", "like", np.nan, 10),
        ("v", "hidden", "like", np.nan, 1),
        ("w", "b", "view", np.nan, 1),
        ("x", "b", "rating", 4.0, 1),
    ]
    found = devices_of(dataset(rows), ProcessorSettings(), catalogue, shown)
    assert [found.likes.training.of(n).tolist() for n in range(4)] == [[0], [], [], [1]]
    assert found.likes.held_out.tolist() == [2, -1, -1, -1]
    assert [found.known.of(n).tolist() for n in range(4)] == [[0, 1, 2], [], [1], [1]]
    assert found.able == 2


class Played:
    """A teacher that counts, and a region that hears of the first push and of no other."""

    def __init__(self) -> None:
        self.taught = 0
        self.objective = Softmax(dim=4)
        self.asked: list[tuple[int, float]] = []
        # Something else teaches during the second round.
        self.moving = iter([7, 7, 7, 8])

    def others(self) -> dict[str, int]:
        return {"trainer": next(self.moving)}

    def round(self, liked: object, devices: np.ndarray, weight: float) -> Any:
        self.taught += 1
        self.asked.append((len(devices), weight))
        total = SimpleNamespace(mean_scalar=lambda name: 1.5)
        return SimpleNamespace(number=self.taught, sent_at_ms=0.0, applied_at_ms=4.0), total

    def vectors(self) -> tuple[np.ndarray, None, None]:
        return initial_table(130, 4, np.random.default_rng(0)), None, None

    def similar(self, item: str) -> Shown:
        assert item == "film"
        return (("a", float(min(self.taught, 1))),)


def devices(items: int) -> Devices:
    owners, named = np.repeat(np.arange(5), 6), np.tile(np.arange(6), 5)
    likes = leave_last_out(owners, named, np.tile(np.arange(6), 5), 5, items)
    return Devices(likes, by_device(owners, named, 5, items))


def course(played: Played, items: int = 130) -> Course:
    region = Watched("eu", lambda number: number <= played.taught, played.similar)
    return Course(played, devices(items), [region], "film", Rounds(2, 3), 2.0, 0.05)  # type: ignore[arg-type]


def test_a_round_that_does_not_arrive_is_missing_and_the_next_goes_on() -> None:
    played = Played()
    found = course(played)
    first, second = found.run()
    assert played.asked == [(3, 2.0), (3, 2.0)]
    assert (first.number, first.devices, first.loss, first.applied_ms) == (1, 3, 1.5, 4.0)
    assert None not in first.after_ms["eu"].values()
    assert second.after_ms["eu"]["parameters"] is not None
    assert second.after_ms["eu"]["list"] is None, "the list did not change again"
    assert found.lists == {"eu": ((("a", 0.0),), (("a", 1.0),))}
    assert first.alone
    assert not second.alone


def test_held_out_items_are_judged_where_there_are_99_others() -> None:
    found = course(Played()).judge()
    assert found is not None
    assert found.devices == 5
    assert 0.0 <= found.ndcg <= found.hit_rate <= 1.0
    assert course(Played(), items=100).judge() is None


def test_the_most_liked_item() -> None:
    assert most_liked(by_device(np.array([0, 1, 2]), np.array([3, 1, 3]), 3, 5)) == 3
    with pytest.raises(ValueError, match="argmax"):
        most_liked(by_device(np.zeros(0, np.int64), np.zeros(0, np.int64), 1, 0))
