"""A region says how far it is behind those that it follows, and what comes of it beyond what may be."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.api import NOW_MS, Harness, quick_settings, running_api

from services.api.behind import Behind, watch
from services.api.health import Dependency
from services.coordination.contract import CoordinationError
from services.parameter_server.client.syncs import RegionSync
from services.parameter_server.syncing.status import FollowedShard, StatusReply, UpstreamStatus
from services.settings.model import RegionSettings

ANSWERS = Dependency(True, "region eu: all answer")
SILENT = Dependency(False, "region eu: no answer from server-0@eu")


def server(
    followed: dict[int, float | None],
    *,
    written: tuple[int, ...] = (),
    model: str = "main",
    source: str = "home",
    contested: tuple[int, ...] = (),
) -> StatusReply:
    """What a server says that leads the shards ``followed``, each so far behind."""
    upstream = UpstreamStatus(
        "127.0.0.1:1", source, len(followed), 0, None, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0, 0, 0, 0, "", [],
        list(contested),
    )  # fmt: skip
    shards = [FollowedShard(model, shard, "", behind_s, 0) for shard, behind_s in followed.items()]
    return StatusReply(
        "eu", "server-0@eu", list(written), shards, [upstream], [], {}, 0, 0, 0, None, ""
    )  # fmt: skip


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def behind(clock: Clock) -> Behind:
    return Behind("main", "eu", 60.0, clock)


class TestBehind:
    def test_a_region_that_writes_itself_is_never_behind(self, behind: Behind, clock: Clock) -> None:
        behind.hear([server({}, written=(0, 1))])
        clock.now_s += 1_000.0
        assert behind.behind_s is None
        assert not behind.outdated()
        assert behind.judge(ANSWERS) == ANSWERS

    def test_the_shard_furthest_behind_counts_over_all_servers(self, behind: Behind) -> None:
        behind.hear([server({0: 0.25, 1: 3.0}), server({2: 1.0})])
        assert behind.behind_s == 3.0
        assert behind.judge(ANSWERS) == Dependency(True, "region eu: all answer, 3 s behind")

    def test_an_idle_source_that_says_so_leaves_it_level(self, behind: Behind, clock: Clock) -> None:
        for _ in range(1_000):
            behind.hear([server({0: 0.9})])
            assert behind.behind_s == pytest.approx(0.9)
            clock.now_s += 1.0
            assert behind.judge(ANSWERS) == Dependency(True, "region eu: all answer, level")

    def test_it_falls_behind_while_nobody_answers(self, behind: Behind, clock: Clock) -> None:
        behind.hear([server({0: 0.0})])
        clock.now_s += 60.0
        behind.hear([])
        assert (behind.behind_s, behind.outdated()) == (60.0, False)
        clock.now_s += 15.0
        assert (behind.behind_s, behind.outdated()) == (75.0, True)

    def test_beyond_the_limit_it_names_region_seconds_link_and_what_to_look_at(
        self, behind: Behind, clock: Clock
    ) -> None:
        behind.hear([server({0: 75.0})])
        assert behind.judge(ANSWERS) == Dependency(
            False,
            "region eu: 75 s behind (sync.max_behind is 60 s): look at the link from home with "
            "`headwater sync status`",
        )
        assert behind.judge(SILENT) == SILENT, "what is nearer comes first"
        behind.hear([server({0: 0.1})])
        assert behind.judge(ANSWERS).ok

    def test_a_leader_that_knows_nothing_yet_does_not_make_it_level(
        self, behind: Behind, clock: Clock
    ) -> None:
        behind.hear([server({0: 50.0})])
        clock.now_s += 20.0
        behind.hear([server({0: None})])
        assert behind.behind_s == 70.0

    def test_what_was_never_level_counts_from_when_it_was_heard_of(
        self, behind: Behind, clock: Clock
    ) -> None:
        behind.hear([server({0: None}, source="")])
        clock.now_s += 70.0
        behind.hear([server({0: None}, source="")])
        found = behind.judge(ANSWERS)
        assert not found.ok
        assert found.detail.startswith("region eu: at least 70 s behind")
        assert "from its upstreams" in found.detail
        behind.hear([server({0: 90.0})])
        assert behind.judge(ANSWERS).detail.startswith("region eu: 90 s behind"), "now it is known"

    def test_a_deposed_leader_does_not_hold_it_back(self, behind: Behind) -> None:
        behind.hear([server({0: 80.0}), server({0: 0.5})])
        assert behind.behind_s == 0.5
        behind.hear([server({0: 0.5}), server({0: 80.0})])
        assert behind.behind_s == 0.5

    def test_a_shard_that_the_region_now_writes_no_longer_counts(self, behind: Behind) -> None:
        behind.hear([server({0: 80.0, 1: 2.0})])
        behind.hear([server({1: 2.0}, written=(0,))])
        assert behind.behind_s == 2.0

    def test_what_another_region_writes_too_makes_it_not_ready_and_says_what_to_do(
        self, behind: Behind
    ) -> None:
        behind.hear([server({}, written=(0, 1)), server({}, written=(2,), contested=(0, 2))])
        found = behind.judge(ANSWERS)
        assert not found.ok
        assert found.detail.startswith("shards 0, 2 are written in region eu and in region home alike")
        assert "set sync.writes" in found.detail
        assert behind.judge(SILENT) == SILENT, "what is nearer comes first"
        behind.hear([])
        assert not behind.judge(ANSWERS).ok, "nobody said that it is mended"
        behind.hear([server({}, written=(0, 1, 2))])
        assert behind.judge(ANSWERS) == ANSWERS

    def test_other_models_do_not_count(self, behind: Behind) -> None:
        behind.hear([server({0: 80.0}, model="probes")])
        assert behind.behind_s is None

    def test_without_a_limit_it_only_says_so(self, clock: Clock) -> None:
        behind = Behind("main", "eu", 0.0, clock)
        behind.hear([server({0: 1e6})])
        assert not behind.outdated()
        assert behind.judge(ANSWERS) == Dependency(True, "region eu: all answer, 1000000 s behind")

    def test_it_is_logged_once_each_way(
        self, behind: Behind, clock: Clock, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO", logger="services.api.behind")
        for behind_s in (75.0, 76.0, 0.0, 0.0):
            behind.hear([server({0: behind_s})])
            clock.now_s += 1.0
        behind_for_the_first, caught_up = (record.getMessage() for record in caplog.records)
        assert "75 s behind" in behind_for_the_first
        assert caught_up == "region eu has caught up"

    def test_watching_goes_on_where_coordination_is_lost(self, behind: Behind, clock: Clock) -> None:
        answers: list[RegionSync | Exception] = [
            RegionSync({"server-0@eu": server({0: 1.0})}, ()),
            CoordinationError("gone"),
            RegionSync({"server-0@eu": server({0: 0.5})}, ()),
        ]
        seen: list[float | None] = []

        async def ask() -> RegionSync:
            seen.append(behind.behind_s)
            if not answers:
                await asyncio.Event().wait()
            found = answers.pop(0)
            if isinstance(found, Exception):
                clock.now_s += 5.0
                raise found
            return found

        async def run() -> None:
            watching = asyncio.create_task(watch(behind, ask, every_s=0.0))
            while len(seen) < 4:
                await asyncio.sleep(0)
            watching.cancel()
            await asyncio.wait([watching])

        asyncio.run(run())
        assert seen == [None, 1.0, 6.0, 0.5]


@pytest.fixture
def eu(tmp_path: Path) -> Iterator[Harness]:
    region = RegionSettings(name="eu", number=1)
    with running_api(tmp_path, quick_settings().model_copy(update={"region": region})) as harness:
        harness.write_items({"a": {"title": "A"}, "b": {"title": "B"}})
        yield harness


def degraded(eu: Harness) -> list[bool]:
    """What every kind of list says."""
    replies: list[dict[str, Any]] = [
        eu.recommend(),
        eu.recommend(user_id="u"),
        eu.post("/v1/rankings", json={"item_ids": ["a", "b"]}).json(),
        eu.get("/v1/items/a/similar").json(),
    ]
    assert all(reply["items"] for reply in replies), "what is too old is served nevertheless"
    return [reply["degraded"] for reply in replies]


def test_replies_of_a_region_too_far_behind_are_degraded_until_it_has_caught_up(eu: Harness) -> None:
    eu.on_loop(lambda: eu.behind.hear([server({0: 0.2})]))
    assert degraded(eu) == [False] * 4
    eu.clock[0] = NOW_MS + 75_000
    assert degraded(eu) == [True] * 4
    assert eu.get("/health/ready").json()["behind_s"] == pytest.approx(75.2)
    eu.on_loop(lambda: eu.behind.hear([server({0: 0.2})]))
    assert degraded(eu) == [False] * 4


def test_the_readiness_of_a_region_that_writes_itself_has_no_lag(eu: Harness) -> None:
    assert eu.get("/health/ready").json()["behind_s"] is None
