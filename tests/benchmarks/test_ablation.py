"""The simulated ablation: its world is causal and repeats, its parts do what they are said to, its baselines wait for
whom they must."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from rich.console import Console

from benchmarks import ablation, baselines, growth_of_replicas, sync_picture
from benchmarks.charges import Constants, measure
from benchmarks.outcomes import Outcome
from benchmarks.overlays import Way, World, weight
from benchmarks.scale import Plan, Scale, distinct_rows, names, path_s, updates_a_second
from sync.exchange import Pull

CONSTANTS = Constants(1e-9, 3e-5, 3e-8, 2e-6, 9e-5, 6e-8, 9e-5, 8e-8, 1e-4)
SMALL = Scale(regions=3, copies=3, rows=20_000_000, columns=2, each=20, slowest=2e6, fastest=8e6)
PARKED = Way("parked")
QUIET = Console(file=io.StringIO())
Model = TypeVar("Model", baselines.TwoPhase, baselines.Chain, baselines.Touched)


def ran(way: Way, scale: Scale = SMALL, seconds: float = 10.0, slowed: float = 1.0, seed: int = 0) -> Outcome:
    world = World(scale, way, Plan(scale, seconds, seed), CONSTANTS, seed=seed, slowed=slowed)
    return world.run(0.3 * seconds, 0.7 * seconds, seconds)


def sent(kind: type[Model], scale: Scale = SMALL, seconds: float = 40.0) -> tuple[Model, Outcome]:
    model = kind(scale, Plan(scale, seconds, 0), CONSTANTS)
    model.start()
    return model, model.outcome("", baselines.Span(0.3 * seconds, 0.7 * seconds, seconds))


def test_as_many_rows_change_in_an_hour_as_it_says() -> None:
    drawn = updates_a_second(SMALL) * 3_600.0
    assert distinct_rows(SMALL, drawn) / SMALL.held == pytest.approx(SMALL.changed, rel=1e-3)
    # Hot rows are drawn again and again.
    assert drawn > 1.5 * SMALL.changed * SMALL.held


def test_a_seed_has_one_plan_and_one_outcome() -> None:
    one, same, other = (Plan(SMALL, 5.0, seed) for seed in (0, 0, 1))
    assert np.array_equal(one.keys, same.keys)
    assert np.array_equal(one.lengths, same.lengths)
    assert not np.array_equal(one.keys, other.keys)
    assert ran(PARKED) == ran(PARKED)
    assert ran(PARKED) != ran(PARKED, seed=1)


def test_nothing_is_held_before_it_can_be_there() -> None:
    plan = Plan(SMALL, 8.0, 0)
    world = World(SMALL, PARKED, plan, CONSTANTS)
    found = world.run(2.0, 6.0, 8.0)
    assert found.between.unfinished == 0.0
    for region, observers in enumerate(world.observers):
        way_s = path_s(0, region) if region else 0.0
        for observer in observers:
            held = np.isfinite(observer.held_s)
            assert held.mean() > 0.9
            assert (observer.held_s[held] - plan.written_s[held] > way_s).all()


def test_a_leader_carries_each_row_into_its_region_once() -> None:
    alone = ran(Way("all", leaders=False, parked=False))
    led = ran(Way("led", leaders=True, parked=False))
    assert alone.between.unfinished == led.between.unfinished == 0.0
    assert alone.wide_bytes_a_second / led.wide_bytes_a_second == pytest.approx(SMALL.copies, rel=0.15)


def test_parked_pulls_do_not_wait_for_the_next_poll() -> None:
    polled, parked = ran(Way("polled", parked=False)), ran(PARKED)
    assert polled.inside.mean_s > 0.3 * SMALL.poll_s
    assert parked.inside.mean_s < 0.1 * polled.inside.mean_s
    assert parked.between.mean_s < 0.5 * polled.between.mean_s


def test_a_scan_takes_its_time_and_the_cache_saves_it() -> None:
    slow = replace(CONSTANTS, scanned_row=1e-7)
    plan = Plan(SMALL, 40.0, 0)
    scanned, cached = (
        World(SMALL, Way(finding, finding, leaders=False, parked=False), plan, slow).run(12.0, 28.0, 40.0)
        for finding in ("scan", "cache")
    )
    # Eight pullers, a second of the source's thread each.
    assert scanned.inside.mean_s > 4.0
    assert cached.inside.mean_s < 0.2 * scanned.inside.mean_s


def test_a_poll_names_all_shards_by_vectors_or_tokens() -> None:
    pull = Pull(1, 1, 10_000, 0.0)
    many = replace(SMALL, shards=100)
    by_vector, by_token, parked = (
        weight(many, finding, waits, pull)
        for finding, waits in (("cache", False), ("token", False), ("token", True))
    )
    assert by_vector - parked == 100 * (32 + 12 * many.writers)
    assert by_token - parked == 1_600


def test_what_is_urgent_overtakes_on_slow_links() -> None:
    # The least batch is soon across, and all that changes is much more.
    busy = replace(SMALL, changed=0.2)
    plain, urgent = (
        ran(way, busy, seconds=50.0, slowed=8.0) for way in (PARKED, Way("urgent", priority_share=0.1))
    )
    assert plain.high.mean_s > 0.5 * plain.low.mean_s
    assert urgent.high.mean_s < 0.5 * urgent.low.mean_s
    assert urgent.high.mean_s < 0.5 * plain.high.mean_s


def test_two_phases_take_two_round_trips_to_the_farthest_but_one_way() -> None:
    model, found = sent(baselines.TwoPhase)
    far_s = max(path_s(0, region) for region in range(1, SMALL.regions))
    assert found.between.unfinished == 0.0
    for name, held_s in model.held_s.items():
        region = int(name[1 : name.index(".")])
        there = np.isfinite(held_s)
        waited = held_s[there] - model.plan.written_s[there]
        assert (waited > 2.0 * far_s + (path_s(0, region) if region else 0.0)).all()


def test_a_chain_reaches_one_region_after_the_other() -> None:
    model, found = sent(baselines.Chain)
    order = model.order
    means = [found.by_region_s[region] for region in order]
    assert order[0] == 0
    assert means == sorted(means)
    assert found.between.unfinished == 0.0


def test_touched_keys_wait_for_the_timer() -> None:
    _, found = sent(baselines.Touched, seconds=60.0)
    assert found.inside.mean_s == pytest.approx(baselines.TOUCHED_S / 2.0, rel=0.25)
    assert found.between.p50_s > found.inside.p50_s


def test_the_links_are_calibrated_on_a_published_broadcast() -> None:
    row = ablation._calibrated(CONSTANTS)
    assert row.met
    assert row.ours == pytest.approx(800.0, rel=0.01)


def test_full_compare_moves_all_versions() -> None:
    model = baselines.FullCompare(SMALL, CONSTANTS)
    model.start()
    found = model.outcome("", 3)
    slowest = SMALL.copies * SMALL.real_rows * baselines.VERSION / SMALL.rates()[-1]
    assert found.by_region_s[-1] > slowest


def test_all_rows_and_the_picture(tmp_path: Path) -> None:
    sizes = ablation.Sizes(8.0, 8.0, 6.0, 12.0, rounds=2, corners=((2, 64),))
    found = ablation.run(sizes, replace(SMALL, each=100), QUIET, CONSTANTS)
    assert [one.name for one in found.outcomes[1:7]] == [way.name for way in ablation.STEPS]
    assert len(found.outcomes) == 11
    works = [row.work for row in found.rows]
    assert len(set(works)) == len(works)
    aimed = [row for row in found.rows if row.aim is not None]
    assert len(aimed) == 5
    for row in aimed[1:]:
        assert row.met == (row.aim is not None and row.ours >= row.aim)
    path = tmp_path / "sync.png"
    sync_picture.draw(found.outcomes, 4, found.title, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_more_replicas_of_a_region_cost_nothing_between_regions() -> None:
    sizes = growth_of_replicas.Sizes(((2, 0), (6, 0), (6, 2)), seconds=5.0)
    rows = list(growth_of_replicas.measure(sizes, SMALL, CONSTANTS, QUIET))
    latency, messages, nbytes = (rows[at::3] for at in range(3))
    assert len({row.work for row in rows}) == len(rows) == 9
    assert all(row.ours > 0.0 for row in (*latency, *messages))
    assert [row.ours for row in nbytes] == pytest.approx([nbytes[0].ours] * 3, rel=0.02)


def test_a_tree_spares_the_leader() -> None:
    flat, tree = (
        World(replace(SMALL, copies=40), Way("grown", fan_out=fan_out), Plan(SMALL, 5.0, 0), CONSTANTS)
        for fan_out in (0, 6)
    )
    found = [world.run(2.0, 4.0, 5.0) for world in (flat, tree)]
    assert [one.between.unfinished for one in found] == [0.0, 0.0]
    assert len(flat.regions[1][0].feeds.pullers) == 39
    assert len(tree.regions[1][0].feeds.pullers) == 6
    assert found[1].inside.mean_s < found[0].inside.mean_s


def test_costs_are_measured() -> None:
    found = measure()
    assert 0.0 < found.scanned_row < found.told_row < found.told_shard
    assert found.merged_row < found.merged_shard
    assert found.message > 1e-4
    assert "scanned row" in found.said()


def test_every_replica_has_a_name_of_its_own() -> None:
    found = [name for region in names(SMALL) for name in region]
    assert len(set(found)) == SMALL.regions * SMALL.copies
