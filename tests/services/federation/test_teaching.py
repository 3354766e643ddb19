"""What devices teach becomes a push like a trainer's, once, and it lowers their loss on the served vectors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support.batches import SCHEMA, SMALL
from support.local_parameters import LocalParameters

from featurestore.encoder import Encoder
from featurestore.online import Cell
from federated.recommendation import Liked, by_device
from models.parameters import RETRIEVAL
from models.training import RecommenderModel
from services.catalogue import Catalogue
from services.federation.arrival import (
    Arrival,
    Shown,
    Watched,
    await_arrival,
    differs,
    lists_before,
    reached_by,
)
from services.federation.teaching import LOG, MOST_ITEMS, FederatedWriter, NotTaught, Teacher
from services.parameter_server.types import Mark, ParametersUnavailable, Pulled
from sync.pushes import Source

MODEL = RecommenderModel(SCHEMA, SMALL)
ITEMS, NOW_MS = 24, 1_700_000_000_000


def catalogue(items: int = ITEMS) -> Catalogue:
    made = Catalogue(Encoder(SCHEMA))
    ids = [f"film-{n}" for n in range(items)]
    made.apply(ids, [{"categories": Cell(["Drama", "War"][n % 2 :], NOW_MS)} for n in range(items)], NOW_MS)
    return made


def liked(devices: int = 12) -> Liked:
    """Half of the devices like even items, half odd ones."""
    generator = np.random.default_rng(0)
    items = np.concatenate(
        [generator.choice(np.arange(n % 2, ITEMS, 2), 5, replace=False) for n in range(devices)]
    )
    return by_device(np.repeat(np.arange(devices), 5), items, devices, ITEMS)


def writer(parameters: LocalParameters, slot: int = 3) -> FederatedWriter:
    ticks = itertools.count(NOW_MS * 1_000_000, 1_000_000)
    return FederatedWriter(parameters, "main", slot, lambda: next(ticks))  # type: ignore[arg-type]


def teacher(parameters: LocalParameters, items: int = ITEMS) -> Teacher:
    its = catalogue(items)
    rows = np.arange(items, dtype=np.int64)
    return Teacher(parameters, writer(parameters), MODEL, "main", its, rows, NOW_MS)  # type: ignore[arg-type]


class TestTeacher:
    def test_rounds_lower_the_devices_loss_on_what_is_served(self) -> None:
        found = teacher(LocalParameters(MODEL.needs))
        losses = [found.round(liked(), np.arange(12), 1.0)[1].mean_scalar("loss") for _ in range(25)]
        assert losses[-1] < losses[0] - 0.3

    def test_the_push_is_the_gradient_through_the_tower_at_the_items_own_rows_alone(self) -> None:
        parameters = LocalParameters(MODEL.needs)
        found = teacher(parameters)
        its = catalogue().encoded(np.arange(ITEMS), NOW_MS)
        keys = MODEL.item_keys(its)[RETRIEVAL]
        own = np.isin(keys, MODEL.item_own_keys(its))
        assert own.sum() == ITEMS < len(keys)
        before = parameters.pull("main", {RETRIEVAL: keys}).rows[RETRIEVAL]
        dense = found.vectors()[2].copy()
        found.round(liked(), np.arange(12), 1.0)
        after = parameters.pull("main", {RETRIEVAL: keys}).rows[RETRIEVAL]
        assert (np.abs(after - before).max(axis=1) > 0).tolist() == own.tolist()
        assert (found.vectors()[2] == dense).all()

    def test_every_item_moves_whoever_likes_it(self) -> None:
        taught, _ = teacher(LocalParameters(MODEL.needs)).round(liked(1), np.arange(1), 1.0)
        assert (taught.strength > 0).all()

    def test_equal_rounds_leave_equal_bits(self) -> None:
        def run() -> list[dict[str, bytes]]:
            parameters = LocalParameters(MODEL.needs)
            found = teacher(parameters)
            for number in range(3):
                found.round(liked(), np.arange(number, 12, 2), 2.0)
            return parameters.bits()

        assert run() == run()

    def test_no_item_and_too_many_are_refused(self) -> None:
        parameters = LocalParameters(MODEL.needs)
        with pytest.raises(ValueError, match="learn about 1 to"):
            teacher(parameters, 0)
        many = np.zeros(MOST_ITEMS + 1, np.int64)
        with pytest.raises(ValueError, match="not 50,001"):
            Teacher(parameters, writer(parameters), MODEL, "main", catalogue(), many, NOW_MS)  # type: ignore[arg-type]


class TestItemRowGradients:
    def test_agree_with_finite_differences(self) -> None:
        parameters = LocalParameters(MODEL.needs)
        its = catalogue().encoded(np.arange(ITEMS), NOW_MS)
        keys = MODEL.item_keys(its)[RETRIEVAL]
        rows = {RETRIEVAL: parameters.pull("main", {RETRIEVAL: keys}).rows[RETRIEVAL]}
        dense = parameters.dense("main").values
        at_vectors = np.random.default_rng(0).normal(size=(ITEMS, 8)).astype(np.float32)
        gradients = MODEL.item_row_gradients(its, rows, dense, at_vectors)

        def loss() -> float:
            return float((MODEL.encode_items(its, rows, dense).astype(np.float64) * at_vectors).sum())

        for place in [(0, 0), (5, 7), (len(keys) - 1, 3)]:
            kept = rows[RETRIEVAL][place]
            rows[RETRIEVAL][place] = kept + 1e-2
            above = loss()
            rows[RETRIEVAL][place] = kept - 1e-2
            below = loss()
            rows[RETRIEVAL][place] = kept
            assert gradients[place] == pytest.approx((above - below) / 2e-2, abs=2e-3)


class TestWriter:
    KEYS = np.arange(1, 40, dtype=np.uint64)
    ONES = np.ones((39, 8), np.float32)

    def test_a_push_that_was_cut_off_is_neither_lost_nor_in_the_way_of_the_next(self) -> None:
        parameters = LocalParameters(MODEL.needs)
        mine = writer(parameters)
        first = mine.push(self.KEYS, self.ONES)[0]

        def fails(shard: int) -> None:
            if shard == 2:
                raise parameters.unavailable()

        parameters.fault = fails
        with pytest.raises(ParametersUnavailable):
            mine.push(self.KEYS, self.ONES)
        parameters.fault = lambda shard: None
        last = mine.push(self.KEYS, self.ONES)[0]
        assert [len(applied) for applied in parameters.history] == [3, 3, 2]
        assert {applied[0][1] for applied in parameters.history} == {first}
        assert {applied[-1][1] for applied in parameters.history} == {last}

    def test_a_shard_that_went_back_takes_the_next_push_once(self) -> None:
        parameters = LocalParameters(MODEL.needs)
        mine = writer(parameters)
        mine.push(self.KEYS, self.ONES)
        parameters.crash(1)
        number = mine.push(self.KEYS, self.ONES)[0]
        assert {of.applied for of in parameters.applied("main", Source(LOG, 3)).values()} == {number}
        assert [len(applied) for applied in parameters.history] == [2, 1, 2]

    def test_a_new_writer_goes_on_where_the_slot_is(self) -> None:
        parameters = LocalParameters(MODEL.needs)
        first = writer(parameters).push(self.KEYS, self.ONES)[0]
        assert writer(parameters).push(self.KEYS, self.ONES)[0] > first

    def test_two_writers_of_one_slot_are_told(self) -> None:
        parameters = LocalParameters(MODEL.needs)
        one, other = writer(parameters), writer(parameters)
        one.push(self.KEYS, self.ONES)
        for _ in range(3):
            other.push(self.KEYS, self.ONES)
        with pytest.raises(NotTaught, match="another writer's"):
            one.push(self.KEYS, self.ONES)

    def test_what_is_refused_is_told_and_does_not_block(self) -> None:
        parameters = LocalParameters(MODEL.needs)
        mine = writer(parameters)
        with pytest.raises(NotTaught, match="refused"):
            mine.push(self.KEYS, np.full((39, 8), np.nan, np.float32))
        mine.push(self.KEYS, self.ONES)


class TestArrival:
    BEFORE: Shown = (("a", 0.5), ("b", 0.25))

    def watch(self, reached_at: int | None, list_at: int | None, timeout_s: float = 0.2) -> Arrival:
        """A region that has the push at the n-th question, and whose list changes at the n-th after that."""
        asked, shown = itertools.count(), itertools.count()

        def reached(number: int) -> bool:
            assert number == 7
            return reached_at is not None and next(asked) >= reached_at

        def similar(item: str) -> Shown:
            changed = list_at is not None and next(shown) >= list_at
            return (("b", 0.5), ("a", 0.25)) if changed else self.BEFORE

        clock = itertools.count(1_000, 10)
        region = Watched("eu", reached, similar)
        return await_arrival(
            [region], 7, 1_000, "x", {"eu": self.BEFORE}, timeout_s, lambda: float(next(clock))
        )["eu"]

    def test_a_list_counts_only_once_the_parameters_are_there(self) -> None:
        found = self.watch(3, 0)
        parameters, shown = found.after_ms["parameters"], found.after_ms["list"]
        assert parameters is not None
        assert shown is not None
        assert 0 < parameters < shown
        assert found.shown == (("b", 0.5), ("a", 0.25))

    def test_what_does_not_come_in_time_is_missing(self) -> None:
        assert self.watch(None, 0).after_ms == {"parameters": None, "list": None}
        found = self.watch(0, None)
        assert found.after_ms["parameters"] is not None
        assert found.after_ms["list"] is None

    def test_what_cannot_be_asked_is_not_missing(self) -> None:
        regions = [Watched("far", None, lambda item: self.BEFORE), Watched("mute", lambda number: True, None)]
        assert lists_before(regions, "x") == {"far": self.BEFORE}
        found = await_arrival(regions, 1, 0.0, "x", {"far": self.BEFORE}, 0.02)
        assert found["far"].after_ms == {"list": None}
        assert found["mute"].after_ms.keys() == {"parameters"}

    def test_parameter_servers_that_are_away_do_not_have_it_yet(self) -> None:
        source = Source(LOG, 3)

        class Region:
            mark: Mark | None = None

            def pull(self, *_: object, **__: object) -> Pulled:
                if self.mark is None:
                    raise ParametersUnavailable("pull", ("server-0@eu",), 0.0)
                return Pulled({}, {(LOG, 3): self.mark, (LOG, 4): Mark(99, 0)})

        region = Region()
        reached = reached_by(region, "main", source, np.zeros(1, np.uint64))  # type: ignore[arg-type]
        assert not reached(5)
        region.mark = Mark(4, 0)
        assert not reached(5)
        region.mark = Mark(5, 0)
        assert reached(5)

    def test_rounding_is_no_change(self) -> None:
        assert not differs(self.BEFORE, (("a", 0.5 + 1e-8), ("b", 0.25)))
        assert differs(self.BEFORE, (("a", 0.5 + 1e-4), ("b", 0.25)))
        assert differs(self.BEFORE, (("a", 0.5),))
