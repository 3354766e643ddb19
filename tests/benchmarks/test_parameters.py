"""The benchmark of parameter servers: its peers do the same work, and the whole of it runs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.batches import SMALL, dense_of, micro_batch, values_of

from benchmarks import __main__ as command
from benchmarks import draws, epoch, gathers, growth, hot_keys, loopback, parameters, redis_peer
from benchmarks.one_process import OneProcess, Vocabulary, optimiser
from benchmarks.turns import Figures, faced, in_turn
from featurestore.encoded import MISSING
from featurestore.schema import default_schema
from models.samples import MicroBatch, encode_batch
from models.training import RecommenderModel
from sync.clock import HybridClock
from sync.pushes import Push, Source
from sync.shard import Shard

MODEL = RecommenderModel(default_schema(), SMALL)


def batch_of_distinct_items(seed: int, samples: int = 6) -> MicroBatch:
    """A micro-batch as the processor makes them: each item once, some values missing."""
    batch = micro_batch(seed, samples)
    categorical = batch.items.categorical.copy()
    column = default_schema().columns("item").id_column
    assert column is not None
    categorical[:, column] = np.arange(1, len(categorical) + 1) * 1_000_003
    other = (column + 1) % categorical.shape[1]
    if other != column:
        categorical[0, other] = MISSING
    return replace(batch, items=replace(batch.items, categorical=categorical))


class TestInTurn:
    def test_every_contender_runs_every_round_and_the_order_turns_around(self) -> None:
        seen: list[str] = []
        values = iter(range(100))

        def block(name: str) -> float:
            seen.append(name)
            return float(next(values))

        ours, peer = in_turn([lambda: block("ours"), lambda: block("peer")], 2)
        assert seen == ["ours", "peer", "ours", "peer", "peer", "ours"]
        assert (ours.values, peer.values) == ((2.0, 5.0), (3.0, 4.0))

    def test_larger_ratios_are_better_for_us(self) -> None:
        fast, slow = Figures((9.0, 10.0, 14.0)), Figures((4.0, 5.0, 6.0))
        row = faced("w", "rows/s", fast, slow, "p", aim=2.0)
        assert (row.ours, row.peer, row.ratio, row.met, row.spread) == (10.0, 5.0, 2.0, True, (9.0, 14.0))
        row = faced("w", "s", fast, slow, "p", aim=0.6, less_is_better=True)
        assert (row.ratio, row.met) == (0.5, False)

    def test_without_the_peer_nothing_is_met(self) -> None:
        row = faced("w", "rows/s", Figures((1.0,)), None, "p (how to install it)", aim=2.0)
        assert (row.peer, row.ratio, row.met, row.peer_name) == (None, None, None, "p (how to install it)")


class TestDraws:
    def test_distinct_keys_are_distinct_and_stored(self) -> None:
        keys = draws.distinct(np.random.default_rng(0), 5_000, 4_096)
        assert len(np.unique(keys)) == 4_096
        assert np.isin(keys, draws.keys_of(np.arange(5_000))).all()

    def test_ranges_have_each_key_once(self) -> None:
        parts = list(draws.ranges(3, 25, 10))
        assert [len(part) for part in parts] == [10, 10, 2]
        assert np.array_equal(np.concatenate(parts), draws.keys_of(np.arange(3, 25)))

    def test_zipf_draws_key_n_by_its_weight(self) -> None:
        keys = draws.Zipf(100, 1.1).draw(np.random.default_rng(0), 200_000)
        weights = np.arange(1, 101) ** -1.1
        expected = weights / weights.sum()
        for number in (0, 1, 9, 99):
            found = np.mean(keys == draws.keys_of(np.array([number])))
            assert found == pytest.approx(expected[number], rel=0.1)


class TestPeers:
    def test_the_update_of_redis_rows_is_ours(self) -> None:
        keys = draws.keys_of(np.arange(50))
        shard = Shard(0, (draws.table("rows", 8),), 1, HybridClock())
        rows = np.concatenate([shard.pull("rows", keys), np.zeros((50, 1), np.float32)], axis=1)
        for number in range(3):
            some = np.random.default_rng(number).normal(size=(50, 8)).astype(np.float32)
            shard.push(Push(Source("log", 0), number, number - 1, parts=(("rows", keys, some),)))
            rows = redis_peer.adagrad(rows, some)
        np.testing.assert_allclose(rows[:, :-1], shard.pull("rows", keys), rtol=1e-5, atol=1e-7)

    @pytest.mark.skipif(not redis_peer.available(), reason=redis_peer.INSTALL)
    @pytest.mark.parametrize("pipelined", [True, False])
    def test_redis_rows_come_back_and_are_stepped(self, tmp_path: Path, pipelined: bool) -> None:
        names = redis_peer.names(draws.keys_of(np.arange(40)))
        rows = np.random.default_rng(0).uniform(0.1, 1.0, (40, 9)).astype(np.float32)
        some = draws.gradients(40, 8)
        with redis_peer.redis_server(tmp_path) as port:
            held = redis_peer.RedisRows(port, 0, 9)
            held.put(names, rows)
            assert np.array_equal(held.get(names), rows)
            held.step(names, some, pipelined=pipelined)
            assert np.array_equal(held.get(names), redis_peer.adagrad(rows, some))
            held.close()

    def test_one_process_has_the_gradients_of_the_model(self) -> None:
        batch = batch_of_distinct_items(3)
        keys, dense = MODEL.keys(batch), dense_of(MODEL)
        rows = values_of(MODEL, keys)
        expected = MODEL.gradients(batch, rows, dense)
        vocabulary = Vocabulary([batch])
        module = OneProcess(MODEL, rows, dense)
        torch.autograd.backward(module(vocabulary.ready(batch)))
        for name, found in module.tables.items():
            grad = found.weight.grad
            assert isinstance(grad, torch.Tensor)
            assert not grad[-1].any()
            np.testing.assert_allclose(grad[:-1].numpy(), expected.tables[name], rtol=1e-3, atol=1e-5)
        views = MODEL.needs.dense.unpack(expected.dense)
        for name, weight in module.dense().items():
            assert weight.grad is not None
            np.testing.assert_allclose(weight.grad.numpy(), views[name], rtol=1e-3, atol=1e-5)

    def test_one_process_learns(self) -> None:
        batch = batch_of_distinct_items(4)
        vocabulary = Vocabulary([batch])
        module = OneProcess(MODEL, values_of(MODEL, MODEL.keys(batch)), dense_of(MODEL))
        adagrad, ready = optimiser(module, MODEL), vocabulary.ready(batch)
        losses = []
        for _ in range(20):
            adagrad.zero_grad()
            loss = module(ready)
            torch.autograd.backward(loss)
            adagrad.step()
            losses.append(loss.item())
        assert losses[-1] < 0.8 * losses[0]

    def test_a_peer_that_is_not_there_is_named_with_the_command_that_installs_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(loopback, "available", lambda: False)
        (row,) = loopback._faced("pull", [Figures((1.0,))], None, "MGET", 6.0)
        assert (row.peer, row.met) == (None, None)
        assert row.peer_name is not None
        assert "apt-get install redis-server" in row.peer_name


class TestRegrouped:
    def test_samples_keep_their_order_and_their_gradients(self) -> None:
        whole = batch_of_distinct_items(5, samples=10)
        parts = [whole.take(np.arange(0, 3)), whole.take(np.arange(3, 7)), whole.take(np.arange(7, 10))]
        found = list(epoch.regrouped(parts, 4, MODEL))
        assert [len(one) for one in found] == [4, 4, 2]
        assert np.array_equal(np.concatenate([one.label for one in found]), whole.label)
        again = epoch.joined(found, MODEL)
        used = whole.take(np.arange(10))
        assert np.array_equal(MODEL.keys(again)["ranking"], MODEL.keys(used)["ranking"])
        rows, dense = values_of(MODEL, MODEL.keys(used)), dense_of(MODEL)
        ours, theirs = MODEL.gradients(again, rows, dense), MODEL.gradients(used, rows, dense)
        np.testing.assert_allclose(ours.dense, theirs.dense, rtol=1e-3, atol=1e-5)
        for name in rows:
            np.testing.assert_allclose(ours.tables[name], theirs.tables[name], rtol=1e-3, atol=1e-5)


class TestHotKeys:
    def test_rows_are_read_from_metrics(self) -> None:
        text = (
            "# TYPE headwater_parameters_rows counter\n"
            'headwater_parameters_rows_total{model="main",shard="0",what="pulled"} 3.0\n'
            'headwater_parameters_rows_total{model="main",shard="1",what="pulled"} 4.0\n'
            'headwater_parameters_rows_total{model="main",shard="1",what="pushed"} 9.0\n'
        )
        assert (hot_keys.rows_in(text, "pulled"), hot_keys.rows_in(text, "pushed")) == (7.0, 9.0)

    def test_the_busiest_server_is_told_in_times_of_the_mean(self) -> None:
        loads = [{"a": 10.0, "b": 30.0}, {"a": 10.0, "b": 50.0}]
        assert hot_keys.shares(loads) == [0.8, 0.2]
        assert hot_keys.busiest(loads) == 1.6


TINY = parameters.Plan(
    gathers.Sizes((9_000,), (8,), 2_000, calls=2, rounds=1),
    loopback.Sizes((5_000,), (8,), 5_000, calls=1, rounds=1),
    growth.Sizes(65_536, (), 0, rounds=1),
    epoch.Sizes(100, rounds=1),
    hot_keys.Sizes(5_000, calls=1, rounds=1, ways=hot_keys.WAYS[:1]),
)


@pytest.mark.slow
def test_the_command_prints_one_row_for_each_measurement(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = [encode_batch(batch_of_distinct_items(seed, 60)) for seed in range(6)]
    monkeypatch.setattr(epoch, "processed", lambda folder, partitions, interactions: ([values], ()))
    monkeypatch.setattr(parameters, "QUICK", TINY)
    # The thread limits of children are not to outlive this test.
    monkeypatch.setattr(parameters, "limit_threads", lambda environ: None)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "parameters", "--quick", "--json"])
    assert command.main() == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["benchmark"] == "parameters"
    rows = {row["work"]: row for row in printed["rows"]}
    assert len(rows) == len(printed["rows"])
    for start in ("gather 8,192", "pull 4,096", "push 4,096", "insert 65,536 x 32", "memory", "worst push",
                  "insert 65,536 keys into the index alone, growing", "insert 65,536 keys into the index alone, room",
                  "epoch", "Zipf 1.1 pulls", "Zipf 1.1 pushes"):  # fmt: skip
        assert any(work.startswith(start) and row["ours"] > 0 for work, row in rows.items()), start
    compared = [row for row in rows.values() if row["peer"] is not None]
    assert all(row["ratio"] > 0 for row in compared)
    assert len(compared) >= (16 if redis_peer.available() else 12)
