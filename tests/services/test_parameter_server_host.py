"""What parameter servers do, without a network: operations planned by clients, answered by hosts."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.parameters import (
    ALL_KEYS,
    CHUNK,
    CHUNKS,
    DECLARATION,
    DIM,
    EVERYTHING,
    SOURCE,
    SPECS,
    Fleet,
    a_key_of,
    gradients,
    recorded,
)

from models.samples import Watermark
from services.parameter_server import messages as wire
from services.parameter_server.client import operations
from services.parameter_server.client.routing import Route
from services.parameter_server.declarations import Declaration, decode_declaration, encode_declaration
from services.parameter_server.handlers import Rejected
from services.parameter_server.types import (
    IncarnationChanged,
    Mark,
    ModelMismatch,
    ParametersRefused,
    PushReply,
    ShardChanges,
)
from sync.pushes import Source
from sync.replica import ShardState

keys_of = st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 5), max_size=30)
fleets = st.sampled_from([(("a",), 4), (("a", "b"), 2), (("c", "a", "b"), 7), (("b", "a"), 16)])


def push(fleet: Fleet, offset: int, **others: object) -> dict[int, PushReply]:
    return fleet.ask(
        operations.push(fleet.route, gradients(offset, recorded(offset), fleet.map.shards, **others))
    )


def changes(
    fleet: Fleet, server: str, cursors: dict[int, wire.ShardCursor], limit: int = 1_000
) -> list[ShardChanges]:
    operation = operations.changes(fleet.route, server, ("items",), cursors, limit, 0)
    request = msgspec.msgpack.decode(operation.requests[server].body, type=wire.ChangesRequest)
    answer = fleet.hosts[server].changes(request)
    if answer is None:
        return []
    found = []
    message, arrays = answer
    for cursor, batch in operation.merge({server: fleet_reply(message, arrays)}):
        cursors[cursor.shard] = cursor
        found.append(batch)
    return found


def fleet_reply(message: wire.Wire, arrays: tuple[np.ndarray, ...]) -> object:
    from services.rpc.codec import Reply

    return Reply(1, wire.pack(message), arrays)


class TestManyShards:
    @settings(max_examples=40, deadline=None)
    @given(fleets, st.lists(keys_of, min_size=1, max_size=5), keys_of)
    def test_many_shards_and_servers_give_the_one_shard_answer(
        self, shape: tuple[tuple[str, ...], int], pushes: list[list[int]], asked: list[int]
    ) -> None:
        one, many = Fleet(), Fleet(*shape)
        for offset, some in enumerate(pushes):
            keys = np.array(some, np.uint64)
            values = np.random.default_rng(offset).normal(size=(len(keys), DIM)).astype(np.float32)
            dense = np.full((1, CHUNK), 0.5 + offset, np.float32)
            parts = {"items": (keys, values), "dense": (np.array([offset % CHUNKS], np.uint64), dense)}
            for fleet in (one, many):
                outcome = fleet.ask(operations.push(fleet.route, gradients(offset, parts, fleet.map.shards)))
                assert list(outcome) == list(range(fleet.map.shards))
                assert {reply.status for reply in outcome.values()} == {"applied"}
        wanted = {
            "items": np.array([*asked, *(key for some in pushes for key in some)], np.uint64),
            "dense": np.arange(CHUNKS, dtype=np.uint64),
        }
        expected = one.ask(operations.pull(one.route, wanted)).rows
        found = many.ask(operations.pull(many.route, wanted)).rows
        for table, rows in expected.items():
            assert rows.shape == (len(wanted[table]), {"items": DIM, "dense": CHUNK}[table])
            np.testing.assert_array_equal(found[table], rows)

    def test_nothing_asked_is_nothing_given(self) -> None:
        fleet = Fleet(("a", "b"), 4)
        none = np.array([], np.uint64)
        assert fleet.ask(operations.pull(fleet.route, {"items": none})).rows["items"].shape == (0, DIM)
        assert fleet.ask(operations.pull(fleet.route, {})).rows == {}

    def test_every_key_goes_where_the_map_says(self) -> None:
        fleet = Fleet(("a", "b", "c"), 7)
        split = fleet.route.split("items", ALL_KEYS)
        seen = np.concatenate([split.order[covered] for _, covered in split.parts.values()])
        np.testing.assert_array_equal(np.sort(seen), np.arange(len(ALL_KEYS)))
        for server, (part, covered) in split.parts.items():
            assert {fleet.map.servers[shard] for shard in part.shards} == {server}
            assert sum(part.counts) == covered.stop - covered.start

    def test_a_single_table_lives_in_one_shard(self) -> None:
        fleet = Fleet(("a", "b", "c"), 7)
        push(fleet, 0)
        holders = [
            (name, shard)
            for name, host in fleet.hosts.items()
            for shard, held in host.models["main"].held.items()
            if len(held.shard.table("dense"))
        ]
        assert holders == [
            (fleet.map.servers[fleet.route.dense_shard("dense")], fleet.route.dense_shard("dense"))
        ]


class TestPushes:
    def test_a_repeat_changes_nothing(self) -> None:
        fleet = Fleet(("a", "b"), 4)
        push(fleet, 0)
        before = fleet.ask(operations.pull(fleet.route, EVERYTHING)).rows
        again = push(fleet, 0)
        assert {reply.status for reply in again.values()} == {"duplicate"}
        after = fleet.ask(operations.pull(fleet.route, EVERYTHING)).rows
        np.testing.assert_array_equal(before["items"], after["items"])

    def test_a_gap_is_refused_with_what_was_applied(self) -> None:
        fleet = Fleet(("a", "b"), 4)
        push(fleet, 0)
        replies = push(fleet, 5)
        assert {(reply.status, reply.applied) for reply in replies.values()} == {("gap", 0)}
        assert {
            (r.applied, r.durable) for r in fleet.ask(operations.applied(fleet.route, SOURCE)).values()
        } == {(0, -1)}

    def test_each_shard_has_its_own_predecessor(self) -> None:
        fleet = Fleet(("a", "b"), 4)
        push(fleet, 0)
        given_ = replace(gradients(7, recorded(7), 4), predecessors={0: 0, 1: 3, 2: 0, 3: 0})
        statuses = {s: r.status for s, r in fleet.ask(operations.push(fleet.route, given_)).items()}
        assert statuses == {0: "applied", 1: "gap", 2: "applied", 3: "applied"}

    def test_a_recreated_topic_starts_anew(self) -> None:
        fleet = Fleet(("a", "b"), 4)
        for offset in range(3):
            push(fleet, offset)
        other = Source("log-2", 0)
        assert {r.status for r in push(fleet, 0, source=other).values()} == {"applied"}
        assert {r.applied for r in fleet.ask(operations.applied(fleet.route, other)).values()} == {0}
        assert {r.applied for r in fleet.ask(operations.applied(fleet.route, SOURCE)).values()} == {2}

    def test_nan_is_refused_and_named_but_counts(self) -> None:
        fleet = Fleet(("a", "b"), 4)
        key = a_key_of(2, 4)
        bad = {"items": (key, np.full((1, DIM), np.nan, np.float32))}
        replies = fleet.ask(operations.push(fleet.route, gradients(0, bad, 4)))
        assert {s: r.status for s, r in replies.items()} == {
            0: "applied", 1: "applied", 2: "refused", 3: "applied",
        }  # fmt: skip
        assert "NaN" in replies[2].reason
        assert str(key[0]) in replies[2].reason
        assert {r.status for r in push(fleet, 1).values()} == {"applied"}

    def test_a_push_for_a_process_that_is_gone_does_nothing(self) -> None:
        fleet = Fleet()
        push(fleet, 0)
        old = replace(gradients(1, recorded(1), 1), incarnations={0: 99})
        with pytest.raises(Rejected) as caught:
            fleet.ask(operations.push(fleet.route, old))
        now = fleet.hosts["a"].incarnation
        assert (caught.value.code, caught.value.message) == (wire.INCARNATION, str(now))
        with pytest.raises(IncarnationChanged, match=f"incarnation {now}, expected 99"):
            operations.raise_failure("push", "a", caught.value.code, caught.value.message, 99)
        assert fleet.ask(operations.applied(fleet.route, SOURCE))[0].applied == 0

    def test_wrong_shapes_are_refused_before_anything_is_sent(self) -> None:
        route = Fleet().route
        keys = np.array([1, 2], np.uint64)
        for parts in (
            {"items": (keys, np.zeros((2, DIM + 1), np.float32))},
            {"items": (keys, np.zeros((1, DIM), np.float32))},
            {"items": (keys.astype(np.int64), np.zeros((2, DIM), np.float32))},
            {"nothing": (keys, np.zeros((2, DIM), np.float32))},
        ):
            with pytest.raises(ParametersRefused):
                operations.push(route, gradients(0, parts, 1))
        with pytest.raises(ParametersRefused, match=r"shards \[1\]"):
            operations.push(Fleet(shards=2).route, gradients(0, {}, 1))


class TestWatermarks:
    def test_the_least_over_all_shards_counts(self) -> None:
        fleet = Fleet(("a", "b"), 3)
        mark = Watermark("events", 1, 70, 5_000)
        fleet.ask(operations.push(fleet.route, replace(gradients(0, recorded(0), 3), watermark=mark)))
        assert fleet.ask(operations.pull(fleet.route, {})).watermarks == {("events", 1): Mark(70, 5_000)}
        later = Watermark("events", 1, 90, 6_000)
        ahead = replace(
            gradients(9, recorded(1), 3), watermark=later, predecessors={0: 0, 1: 0, 2: 5}
        )  # shard 2 refuses it as a gap
        fleet.ask(operations.push(fleet.route, ahead))
        assert fleet.ask(operations.pull(fleet.route, {})).watermarks == {("events", 1): Mark(70, 5_000)}

    def test_a_shard_that_has_not_heard_of_a_partition_hides_it(self) -> None:
        marks: list[wire.WireMark] = [("e", 0, 5, 50)]
        assert wire.least_marks(2, {0: marks, 1: [("e", 0, 3, 30), ("e", 1, 9, 90)]}) == {
            ("e", 0): Mark(3, 30)
        }
        assert wire.least_marks(3, {0: marks, 1: marks}) == {}


class TestDense:
    def test_generations_are_published_at_the_first_push_and_when_asked(self) -> None:
        fleet = Fleet(("a", "b"), 4)
        initial = fleet.ask(operations.dense(fleet.route, "dense", True))
        assert initial.generation == 0
        push(fleet, 0)
        first = fleet.ask(operations.dense(fleet.route, "dense", True))
        assert first.generation == 1
        assert (first.values != initial.values).any()
        push(fleet, 1)
        assert (fleet.ask(operations.dense(fleet.route, "dense", True)).values == first.values).all()
        live = fleet.ask(operations.dense(fleet.route, "dense", False))
        assert live.generation == 1
        assert (live.values != first.values).any()
        assert fleet.ask(operations.publish(fleet.route, "dense")) == 2
        second = fleet.ask(operations.dense(fleet.route, "dense", True))
        np.testing.assert_array_equal(second.values, live.values)
        assert fleet.ask(operations.publish(fleet.route, "dense")) == 2
        with pytest.raises(ValueError, match="read-only"):
            second.values[0, 0] = 1.0

    def test_without_a_number_nothing_is_published(self) -> None:
        fleet = Fleet()
        push(fleet, 0)
        push(fleet, 1)
        fleet.numbers.available = False
        assert fleet.ask(operations.publish(fleet.route, "dense")) == 1
        fleet.numbers.available = True
        fleet.hosts["a"].publish_all()
        assert fleet.ask(operations.dense(fleet.route, "dense", True)).generation == 2

    def test_a_hashed_table_has_no_generations(self) -> None:
        with pytest.raises(ParametersRefused, match="spread over all shards"):
            operations.dense(Fleet().route, "items", True)


class TestChanges:
    def test_a_reader_sees_every_row_at_its_newest_value(self) -> None:
        fleet = Fleet(("a", "b"), 4)
        cursors = {
            server: {s: wire.ShardCursor(s) for s in fleet.map.owned_by(server)} for server in ("a", "b")
        }
        seen: dict[int, np.ndarray] = {}
        for offset in range(6):
            push(fleet, offset)
            for server in ("a", "b"):
                while batches := changes(fleet, server, cursors[server], limit=7):
                    for batch in batches:
                        for keys, rows in batch.parts.values():
                            assert len(keys) <= 7
                            seen.update(zip(keys.tolist(), rows, strict=True))
        keys = np.array(sorted(seen), np.uint64)
        pushed = np.unique(np.concatenate([recorded(offset)["items"][0] for offset in range(6)]))
        np.testing.assert_array_equal(keys, pushed)
        rows = fleet.ask(operations.pull(fleet.route, {"items": keys})).rows["items"]
        np.testing.assert_array_equal(np.stack([seen[key] for key in keys.tolist()]), rows)

    def test_batches_say_where_they_stand(self) -> None:
        fleet = Fleet(("a",), 2)
        cursors = {shard: wire.ShardCursor(shard) for shard in range(2)}
        first = changes(fleet, "a", cursors)
        assert [(b.shard, b.shards, b.restarted, b.complete, b.parts) for b in first] == [
            (0, 2, True, True, {}), (1, 2, True, True, {}),
        ]  # fmt: skip
        dense = fleet.route.dense_shard("dense")
        assert {b.shard: b.generation for b in first} == {dense: 0, 1 - dense: None}
        assert changes(fleet, "a", cursors) == []
        empty = replace(gradients(0, {}, 2), watermark=Watermark("events", 0, 9, 90))
        fleet.ask(operations.push(fleet.route, empty))
        moved = changes(fleet, "a", cursors)
        assert [(b.restarted, b.parts, b.watermarks) for b in moved] == [
            (False, {}, {("events", 0): Mark(9, 90)})
        ] * 2
        assert changes(fleet, "a", cursors) == []
        push(fleet, 1)
        changes(fleet, "a", cursors)
        assert fleet.ask(operations.publish(fleet.route, "dense")) == 2
        assert [(b.shard, b.generation, b.parts) for b in changes(fleet, "a", cursors)] == [(dense, 2, {})]

    def test_watermarks_are_told_only_when_the_reader_has_caught_up(self) -> None:
        fleet = Fleet()
        given_ = replace(gradients(0, recorded(0), 1), watermark=Watermark("events", 0, 9, 90))
        fleet.ask(operations.push(fleet.route, given_))
        cursors = {0: wire.ShardCursor(0)}
        told = []
        while batches := changes(fleet, "a", cursors, limit=5):
            told += [(batch.complete, bool(batch.watermarks)) for batch in batches]
        assert len(told) > 3
        assert told == [(False, False)] * (len(told) - 1) + [(True, True)]

    def test_a_reader_of_another_incarnation_starts_over(self) -> None:
        cursors = {0: wire.ShardCursor(0)}
        before, after = Fleet(), Fleet(incarnation=2)
        for offset in range(2):
            push(before, offset)
        push(after, 0)
        changes(before, "a", cursors)
        (batch,) = changes(after, "a", cursors)
        shard = after.hosts["a"].models["main"].held[0].shard
        assert (batch.restarted, batch.incarnation) == (True, shard.incarnation)
        np.testing.assert_array_equal(np.sort(batch.parts["items"][0]), np.unique(recorded(0)["items"][0]))


class TestRestore:
    def test_what_was_saved_goes_on_where_it_was(self) -> None:
        undisturbed, first = Fleet(("a", "b"), 4), Fleet(("a", "b"), 4)
        for offset in range(3):
            push(first, offset)
        saved: dict[int, ShardState] = {
            shard: held.shard.state()
            for host in first.hosts.values()
            for shard, held in host.models["main"].held.items()
        }
        second = Fleet(("a", "b"), 4, lambda _model, shard: saved[shard], incarnation=10)
        assert {
            (r.applied, r.durable) for r in second.ask(operations.applied(second.route, SOURCE)).values()
        } == {(2, 2)}
        dense = second.ask(operations.dense(second.route, "dense", True))
        np.testing.assert_array_equal(
            dense.values, first.ask(operations.dense(first.route, "dense", False)).values
        )
        assert dense.generation == 2
        for offset in range(5):
            push(undisturbed, offset)
            push(second, offset)
        expected = undisturbed.ask(operations.pull(undisturbed.route, EVERYTHING)).rows
        found = second.ask(operations.pull(second.route, EVERYTHING)).rows
        for table, rows in expected.items():
            np.testing.assert_array_equal(found[table], rows)

    def test_a_snapshot_of_another_schema_is_refused_with_both_named(self) -> None:
        first = Fleet()
        push(first, 0)
        state = first.hosts["a"].models["main"].held[0].shard.state()
        state = replace(state, head=replace(state.head, fingerprint="fp-0"))
        with pytest.raises(ModelMismatch, match="fp-0 was declared, this one is fp-1"):
            Fleet(restore=lambda _model, _shard: state, incarnation=2)


class TestDeclarations:
    def test_a_declaration_is_read_back(self) -> None:
        assert decode_declaration(encode_declaration(DECLARATION)) == DECLARATION
        for damaged in (b"", b"[]", b'{"format": 9, "model": "m", "fingerprint": "f", "tables": []}'):
            with pytest.raises(ParametersRefused):
                decode_declaration(damaged)

    def test_declaring_the_same_again_is_fine_and_another_is_named(self) -> None:
        host = Fleet().hosts["a"]
        host.declare(DECLARATION)
        with pytest.raises(ModelMismatch, match="fp-1 was declared, this one is fp-2"):
            host.declare(replace(DECLARATION, fingerprint="fp-2"))
        with pytest.raises(ModelMismatch, match="tables dense, items were declared, these are items"):
            host.declare(replace(DECLARATION, tables=SPECS[:1]))
        wider = (replace(SPECS[0], dim=DIM + 1), SPECS[1])
        with pytest.raises(ModelMismatch, match="table items: dim 4 was declared, this one is 5"):
            host.declare(replace(DECLARATION, tables=wider))


class TestBadRequests:
    @pytest.mark.parametrize(
        ("method", "body", "code"),
        [
            ("fly", b"", wire.UNKNOWN_METHOD),
            ("pull", b"", wire.REFUSED),
            ("pull", b"\xc1\xff", wire.REFUSED),
            ("pull", wire.pack(wire.PullRequest("other", 1, [])), wire.MODEL_UNKNOWN),
            ("pull", wire.pack(wire.PullRequest("main", 1, [wire.Part("items", [0], [1])])), wire.REFUSED),
            (
                "push",
                wire.pack(wire.PushRequest("main", 1, "l", 0, 0, 0, None, [9], [-1], [])),
                wire.NOT_MINE,
            ),
            ("push", wire.pack(wire.PushRequest("main", 1, "l", 0, 0, 0, None, [0], [], [])), wire.REFUSED),
            ("push", wire.pack(wire.PushRequest("main", 1, "l", 0, 3, 0, None, [0], [3], [])), wire.REFUSED),
            ("dense", wire.pack(wire.DenseRequest("main", 1, "items", True)), wire.REFUSED),
            ("dense", wire.pack(wire.DenseRequest("main", 1, "nothing", True)), wire.REFUSED),
            ("publish", wire.pack(wire.PublishRequest("main", 1, "nothing")), wire.REFUSED),
            ("declare", wire.pack(wire.DeclareRequest(b"junk")), wire.REFUSED),
            (
                "declare",
                wire.pack(wire.DeclareRequest(encode_declaration(Declaration("main", "other", SPECS)))),
                wire.MODEL_MISMATCH,
            ),
        ],
    )
    def test_each_gets_its_code(self, method: str, body: bytes, code: str) -> None:
        with pytest.raises(Rejected) as caught:
            Fleet().answer("a", method, body)
        assert caught.value.code == code

    @pytest.mark.parametrize(
        ("part", "array"),
        [
            (wire.Part("items", [0], [2]), np.zeros(3, np.uint64)),
            (wire.Part("items", [0, 0], [3]), np.zeros(3, np.uint64)),
            (wire.Part("items", [0, 0], [4, -1]), np.zeros(3, np.uint64)),
            (wire.Part("items", [0], [3]), np.zeros(3, np.float32)),
            (wire.Part("items", [0], [3]), np.zeros((3, 1), np.uint64)),
            (wire.Part("dense", [0], [1]), np.array([CHUNKS], np.uint64)),
            (wire.Part("nothing", [0], [3]), np.zeros(3, np.uint64)),
        ],
    )
    def test_arrays_that_do_not_fit_are_refused(self, part: wire.Part, array: np.ndarray) -> None:
        with pytest.raises(Rejected) as caught:
            Fleet().answer("a", "pull", wire.pack(wire.PullRequest("main", 1, [part])), (array,))
        assert caught.value.code == wire.REFUSED

    @settings(max_examples=200, deadline=None)
    @given(
        st.sampled_from(["pull", "push", "applied", "dense", "publish", "declare"]), st.binary(max_size=60)
    )
    def test_noise_is_refused_and_changes_nothing(self, method: str, body: bytes) -> None:
        fleet = SHARED
        with pytest.raises(Rejected) as caught:
            fleet.answer("a", method, body)
        assert caught.value.code in {wire.REFUSED, wire.MODEL_UNKNOWN}

    def test_what_nobody_foresaw_stays_on_the_server(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        fleet = Fleet()

        def broken(*_: object) -> None:
            raise RuntimeError("a secret path")

        monkeypatch.setattr(fleet.hosts["a"].models["main"].held[0].shard.__class__, "pull", broken)
        with pytest.raises(Rejected) as caught:
            fleet.ask(operations.pull(fleet.route, EVERYTHING))
        assert caught.value.code == wire.INTERNAL
        assert "secret" not in caught.value.message
        assert "a secret path" in caplog.text

    def test_replies_that_do_not_fit_are_refused_by_the_client(self) -> None:
        route: Route = Fleet().route
        operation = operations.pull(route, {"items": ALL_KEYS})
        good = wire.pack(wire.PullReply([]))
        for body, arrays in (
            (b"junk", ()),
            (good, ()),
            (good, (np.zeros((3, DIM), np.float32),)),
            (good, (np.zeros((len(ALL_KEYS), DIM), np.float64),)),
        ):
            from services.rpc.codec import Reply

            with pytest.raises(ParametersRefused):
                operation.merge({"a": Reply(1, body, arrays)})


SHARED = Fleet()
