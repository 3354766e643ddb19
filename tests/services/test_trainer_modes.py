"""Four ways of training together: each gives what one process with plain torch gives, on any number of shards."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.batches import SCHEMA, SMALL, micro_batch
from support.modes import MODES, parameter_servers, recorded, train, weights

from models.parameters import DENSE
from models.samples import MicroBatch
from models.training import RecommenderModel
from services.settings.model import ModelSettings
from services.tables import table_specs
from sync.pushes import Source
from sync.spec import Optimiser, TableSpec

MODEL = RecommenderModel(SCHEMA, SMALL)
ADAGRAD = table_specs(MODEL.needs, ModelSettings())
SGD = tuple(replace(spec, optimiser=Optimiser("sgd", 0.01)) for spec in ADAGRAD)


def halves(batch: MicroBatch) -> tuple[MicroBatch, MicroBatch]:
    middle = len(batch) // 2
    return batch.take(np.arange(middle)), batch.take(np.arange(middle, len(batch)))


class Torch:
    """The same model trained by one plain loop: nn.Embedding per table, torch's optimisers."""

    def __init__(
        self, specs: Sequence[TableSpec], start: dict[str, np.ndarray], batches: Sequence[MicroBatch]
    ) -> None:
        self.keys = {
            t.name: np.unique(np.concatenate([MODEL.keys(b)[t.name] for b in batches]))
            for t in MODEL.needs.tables
        }
        self.tables = {
            name: torch.nn.Embedding(*rows.shape, _weight=torch.from_numpy(rows.copy()))
            for name, rows in start.items()
        }
        self.steps = [self._optimiser(spec) for spec in specs]

    def _optimiser(self, spec: TableSpec):
        weight, optimiser = self.tables[spec.name].weight, spec.optimiser
        if optimiser.kind == "sgd":
            return torch.optim.SGD([weight], lr=optimiser.rate).step
        if optimiser.kind == "adagrad":
            return torch.optim.Adagrad([weight], lr=optimiser.rate, eps=optimiser.epsilon).step
        state = torch.zeros(len(weight), 1)

        def rowwise() -> None:
            assert weight.grad is not None
            state.add_((weight.grad**2).mean(1, keepdim=True))
            with torch.no_grad():
                weight.sub_(optimiser.rate * weight.grad / (state.sqrt() + optimiser.epsilon))

        return rowwise

    def step(self, batch: MicroBatch) -> None:
        keys = MODEL.keys(batch)
        places = {name: np.searchsorted(self.keys[name], some) for name, some in keys.items()}
        rows = {name: self.tables[name].weight.detach().numpy()[at].copy() for name, at in places.items()}
        found = MODEL.gradients(batch, rows, self.tables[DENSE].weight.detach().numpy().copy())
        for name, table in self.tables.items():
            table.weight.grad = torch.zeros_like(table.weight)
            if name == DENSE:
                table.weight.grad += torch.from_numpy(found.dense)
            else:
                table.weight.grad[places[name]] = torch.from_numpy(found.tables[name])
        for step in self.steps:
            step()

    def weights(self) -> dict[str, np.ndarray]:
        return {name: table.weight.detach().numpy() for name, table in self.tables.items()}


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for table, rows in expected.items():
        np.testing.assert_allclose(found[table], rows, rtol=2e-4, atol=2e-6, err_msg=table)


def by_torch(client, specs: Sequence[TableSpec], batches: Sequence[MicroBatch]) -> Torch:
    """A plain loop over ``batches`` that starts where the servers are."""
    plain = Torch(specs, weights(client, MODEL, batches), batches)
    for batch in batches:
        plain.step(batch)
    return plain


@pytest.mark.parametrize("specs", [SGD, ADAGRAD], ids=["sgd", "adagrad"])
@pytest.mark.parametrize("mode", MODES)
def test_one_trainer_gives_what_plain_torch_gives(tmp_path, mode, specs):
    batches = [micro_batch(n) for n in range(12)]
    with parameter_servers(tmp_path, specs) as (settings, client):
        before = weights(client, MODEL, batches)
        expected = by_torch(client, specs, batches).weights()
        (metrics,) = train(settings, MODEL, specs, mode, [{0: recorded([batches])[0]}])
        found = weights(client, MODEL, batches)
    assert any(np.abs(found[table] - before[table]).max() > 1e-3 for table in found)
    assert_close(found, expected)
    assert metrics.registry.get_sample_value("headwater_trainer_steps_total") == 12
    assert metrics.registry.get_sample_value("headwater_trainer_samples_total") == 72


@pytest.mark.parametrize("specs", [SGD, ADAGRAD], ids=["sgd", "adagrad"])
def test_two_synchronous_trainers_give_what_one_gives_on_whole_batches(tmp_path, specs):
    batches = [micro_batch(n) for n in range(12)]
    parts = list(zip(*map(halves, batches), strict=True))
    with parameter_servers(tmp_path, specs) as (settings, client):
        expected = by_torch(client, specs, batches).weights()
        records = recorded(parts)
        train(settings, MODEL, specs, "sync", [{0: records[0]}, {1: records[1]}])
        assert_close(weights(client, MODEL, batches), expected)
        steps = client.metrics()["parameter-server-0"]
    assert 'headwater_parameters_steps_taken_total{model="main"} 12.0' in steps


def test_hybrid_trainers_sum_their_dense_gradients(tmp_path):
    """All embeddings live in the shard of the dense weights here, so that a round is one step of everything."""
    batches = [micro_batch(n) for n in range(12)]
    parts = list(zip(*map(halves, batches), strict=True))
    with parameter_servers(tmp_path, ADAGRAD, shards=1) as (settings, client):
        expected = by_torch(client, ADAGRAD, batches).weights()
        records = recorded(parts)
        found = train(settings, MODEL, ADAGRAD, "hybrid", [{0: records[0]}, {1: records[1]}], step_wait_s=5.0)
        assert_close(weights(client, MODEL, batches), expected)
    for metrics in found:
        assert metrics.registry.get_sample_value("headwater_trainer_reloads_total") == 0


@pytest.mark.parametrize("mode", ["sync", "hybrid"])
def test_any_number_of_shards_and_servers_gives_the_same_bits(tmp_path, mode):
    """In hybrid mode one member: with two, the order in which embeddings come is left to them."""
    batches = [micro_batch(n) for n in range(10)]
    parts = list(zip(*map(halves, batches), strict=True)) if mode == "sync" else [batches]
    found = []
    for servers, shards in ((1, 1), (1, 3), (2, 4)):
        with parameter_servers(tmp_path / str(shards), ADAGRAD, servers=servers, shards=shards) as (
            settings,
            client,
        ):
            records = recorded(parts)
            train(settings, MODEL, ADAGRAD, mode, [{p: some} for p, some in enumerate(records)])
            found.append(weights(client, MODEL, batches))
    for other in found[1:]:
        for table, rows in found[0].items():
            assert other[table].tobytes() == rows.tobytes(), table


def test_backup_workers_do_not_wait_for_the_slowest_and_say_what_was_dropped(tmp_path):
    parts = [[micro_batch(100 * p + n) for n in range(12)] for p in range(4)]
    records = recorded(parts)

    def slow(rank: int) -> None:
        if rank == 3:
            time.sleep(0.15)

    with parameter_servers(tmp_path, SGD) as (settings, client):
        members = [{p: some} for p, some in enumerate(records)]
        metrics = train(settings, MODEL, SGD, "backup", members, ratio="0.75", slow=slow)
        text = client.metrics()["parameter-server-0"]
        for partition in range(4):
            assert {s.applied for s in client.applied("main", Source("samples-log", partition)).values()} == {
                11
            }
    late = [m.registry.get_sample_value("headwater_trainer_late_total") for m in metrics]
    assert late[3] >= 1
    assert f"headwater_parameters_steps_dropped_total {2 * sum(late)}" in text


@pytest.mark.parametrize("staleness", [0, 1, 64])
def test_asynchronous_trainers_repeat_what_was_stale_and_lose_nothing(tmp_path, staleness):
    parts = [[micro_batch(100 * p + n) for n in range(15)] for p in range(3)]
    members = [{p: some} for p, some in enumerate(recorded(parts))]
    with parameter_servers(tmp_path, SGD, servers=2, shards=4) as (settings, client):
        metrics = train(settings, MODEL, SGD, "async", members, staleness=staleness)
        text = "".join(client.metrics().values())
    stale = sum(m.registry.get_sample_value("headwater_trainer_stale_total") for m in metrics)
    if staleness != 1:  # by chance no two of them may have come between a pull and its push
        assert (stale > 0) == (staleness == 0)
    for shard in range(4):
        assert (
            f'headwater_parameters_pushes_total{{model="main",shard="{shard}",status="applied"}} 45.0' in text
        )


def test_a_member_without_samples_holds_nobody_up(tmp_path):
    batches = [micro_batch(n) for n in range(8)]
    for mode in ("sync", "hybrid"):
        with parameter_servers(tmp_path / mode, SGD) as (settings, client):
            started = time.monotonic()
            train(settings, MODEL, SGD, mode, [{0: recorded([batches])[0]}, {1: []}], step_wait_s=0.02)
            assert time.monotonic() - started < 10.0
            assert {s.applied for s in client.applied("main", Source("samples-log", 0)).values()} == {7}


@pytest.mark.parametrize("mode", ["sync", "hybrid"])
def test_the_same_samples_and_assignment_leave_the_same_bits(tmp_path, mode):
    """Two members with two partitions each; in hybrid mode on the one shard whose order is not left to chance."""
    parts = [[micro_batch(50 * p + n) for n in range(6)] for p in range(4)]
    records = recorded(parts)
    members = [{0: records[0], 2: records[2]}, {1: records[1], 3: records[3]}]
    found = []
    for run in range(2):
        with parameter_servers(tmp_path / str(run), ADAGRAD, shards=1 if mode == "hybrid" else 3) as (
            settings,
            client,
        ):
            train(settings, MODEL, ADAGRAD, mode, members)
            found.append(weights(client, MODEL, [batch for some in parts for batch in some]))
    for table, rows in found[0].items():
        assert found[1][table].tobytes() == rows.tobytes(), table
