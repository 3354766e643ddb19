"""A marked event takes the way of a like, and leaves nothing behind but watermarks and stamps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.batches import SCHEMA, SMALL, micro_batch
from support.local_parameters import LocalParameters
from support.modes import MODES, Mode, parameter_servers, recorded, train, weights
from support.processing import LOG, NOW, World, records_of

from models.parameters import DENSE
from models.samples import MicroBatch, decode_batch, encode_batch
from models.training import RecommenderModel
from services.events import Event, Impression, Interaction, ItemEvent, Probe
from services.freshness.stamps import Stamp
from services.messagelog.contract import Record
from services.processor.transform import watermark_key
from services.settings.model import ModelSettings
from services.tables import table_specs
from services.trainer.learner import Learner
from services.trainer.metrics import TrainerMetrics
from services.trainer.trainer import Trainer
from sync.spec import Optimiser

MODEL = RecommenderModel(SCHEMA, SMALL)
ITEMS: list[Event] = [ItemEvent(f"i{n}", {"categories": ["c"]}, event_id=f"item-{n}") for n in range(12)]
LIKES: list[Event] = [
    *(Interaction(f"u{n % 5}", f"i{n % 12}", "like", event_id=f"like-{n}") for n in range(30)),
    Impression("u1", ["i1", "i2"], event_id="shown"),
]
PROBES: list[Event] = [Probe(f"probe-{n}") for n in range(20)]


class Collected:
    """Stamps in a list."""

    def __init__(self) -> None:
        self.stamps: list[Stamp] = []

    def put(self, stamp: Stamp) -> None:
        self.stamps.append(stamp)


# --- the processor ---


def test_users_items_popularity_and_samplers_never_hear_of_probes() -> None:
    world = World()
    world.run(records_of([*ITEMS, *LIKES], partitions=1), 7)
    before = {key: dict(cells) for key, cells in world.store.items()}
    counts = world.catalogue.encoded(np.arange(len(world.catalogue)), NOW).numeric.copy()
    recent = world.samplers[0].recent().tolist()
    first = len(ITEMS) + len(LIKES)
    probes = [replace(r, offset=first + r.offset) for r in records_of(PROBES, partitions=1)]
    world.run(probes, 6)
    mark = watermark_key(LOG, 0)
    assert world.store.keys() == before.keys(), "no row was made"
    assert {key: cells for key, cells in world.store.items() if key != mark} == {
        key: cells for key, cells in before.items() if key != mark
    }
    assert world.store[mark]["offset"].value == first + len(PROBES) - 1
    assert np.array_equal(counts, world.catalogue.encoded(np.arange(len(world.catalogue)), NOW).numeric)
    assert world.samplers[0].recent().tolist() == recent


def test_a_probe_costs_a_sample_that_counts_for_nothing() -> None:
    world = World()
    world.step(records_of(ITEMS, partitions=1))
    mixed: list[Event] = [PROBES[0], LIKES[0], PROBES[1], LIKES[1]]
    (batch,) = world.step(records_of(mixed, partitions=1))
    assert batch.marked
    assert batch.weight.tolist() == [0, 1, 0, 1]
    assert batch.label.tolist() == [0, 1, 0, 1]
    assert batch.negatives.shape == (4, 5), "as many as a like's"
    assert decode_batch(encode_batch(batch)).marked
    (plain,) = world.step(records_of(LIKES[2:5], partitions=1))
    assert not plain.marked
    assert not decode_batch(encode_batch(plain)).marked


def test_a_probe_passes_a_stack_that_has_no_items_yet() -> None:
    world = World()
    (batch,) = world.step(records_of(PROBES[:3], partitions=1))
    assert len(batch) == 0
    assert batch.marked
    assert batch.watermark.offset == 2
    assert len(world.catalogue) == 0


# --- the trainer ---


def record(offset: int, batch: MicroBatch) -> Record:
    return Record("samples", 0, offset, b"", encode_batch(batch), NOW)


def probes_of(batch: MicroBatch, which: list[int]) -> MicroBatch:
    """``batch`` with some of its samples made those of probes."""
    weight, label = batch.weight.copy(), batch.label.copy()
    weight[which] = label[which] = 0
    return replace(batch, weight=weight, label=label, marked=True)


def trained(parameters: LocalParameters, *batches: MicroBatch) -> tuple[Collected, TrainerMetrics]:
    stamps, metrics = Collected(), TrainerMetrics()
    trainer = Trainer(parameters, MODEL, "main", "samples-log", metrics, stamps=stamps)
    trainer.open(0)
    for offset, batch in enumerate(batches):
        assert trainer.step(record(offset, batch)) == "done"
    return stamps, metrics


def test_a_micro_batch_of_probes_teaches_nothing_and_moves_the_watermark() -> None:
    parameters = LocalParameters(MODEL.needs)
    trained(parameters, micro_batch(1))
    before = parameters.bits()
    only = probes_of(micro_batch(2), list(range(6)))
    again = Trainer(parameters, MODEL, "main", "samples-log", metrics := TrainerMetrics())
    again.open(0)
    assert again.step(record(1, only)) == "done"
    assert parameters.bits() == before, "not a row more, not a bit of another"
    assert all(history[-1] == (0, 1) for history in parameters.history)
    assert metrics.registry.get_sample_value("headwater_trainer_samples_total") == 0


@pytest.mark.parametrize("optimiser", ["rowwise_adagrad", "adam"])
def test_among_likes_a_probe_changes_neither_rows_nor_what_the_likes_teach(optimiser: str) -> None:
    likes = micro_batch(3)
    counting, probes = [0, 2, 3, 5], [1, 4]
    with_probes, without = LocalParameters(MODEL.needs), LocalParameters(MODEL.needs)
    for parameters in (with_probes, without):
        parameters.specs = tuple(
            replace(spec, optimiser=replace(spec.optimiser, kind=optimiser), l2=0.01)
            for spec in parameters.specs
        )
        for shard in range(3):
            parameters.crash(shard)  # begins anew, with these tables
    stamps, metrics = trained(with_probes, probes_of(likes, probes))
    trained(without, likes.take(np.array(counting)))
    assert metrics.registry.get_sample_value("headwater_trainer_samples_total") == 4
    assert [stamp.stage for stamp in stamps.stamps] == ["trained", "applied"]
    mine = with_probes.bits()
    theirs = without.bits()
    for found, wanted in zip(mine, theirs, strict=True):
        assert found.keys() == wanted.keys()
        for name, data in wanted.items():
            kind = np.uint64 if name.endswith("keys") else np.float32
            got, want = np.frombuffer(found[name], kind), np.frombuffer(data, kind)
            # Sums of other shapes may round otherwise; the same keys have rows, to the last one.
            np.testing.assert_allclose(got, want, rtol=2e-3, atol=1e-5)
            assert kind is np.float32 or np.array_equal(got, want)


def test_without_the_filter_a_probe_would_leave_rows() -> None:
    """Guards the two tests above: these probes do name keys of their own."""
    likes = micro_batch(3)
    marked = probes_of(likes, [1, 4])
    counting = likes.take(np.array([0, 2, 3, 5]))
    more = {t: np.setdiff1d(k, MODEL.keys(counting)[t]) for t, k in MODEL.keys(marked).items() if t != DENSE}
    assert all(len(keys) for keys in more.values())


def test_stamps_name_the_events_position_that_was_trained_and_applied() -> None:
    parameters = LocalParameters(MODEL.needs)
    stamps, _ = trained(parameters, micro_batch(1), probes_of(micro_batch(2), [0]), micro_batch(4))
    found = [(s.stage, s.log, s.partition, s.offset) for s in stamps.stamps]
    assert found == [("trained", "log-1", 2, 41), ("applied", "log-1", 2, 41)]
    assert stamps.stamps[0].at_ms <= stamps.stamps[1].at_ms


@pytest.mark.parametrize("mode", MODES)
def test_in_every_mode_probes_alone_move_nothing_and_are_applied(
    mode: Mode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Momentum and decay would move weights by a gradient of 0, were it pushed."""
    stages: list[str] = []
    monkeypatch.setattr(Learner, "_stamp", lambda self, stage, learned: stages.append(stage))
    specs = tuple(
        replace(spec, optimiser=Optimiser("adam", 0.01), l2=0.1)
        for spec in table_specs(MODEL.needs, ModelSettings())
    )
    likes = [micro_batch(n) for n in (1, 2, 3)]
    probes = [probes_of(micro_batch(n), list(range(6))) for n in (4, 5)]

    def left_by(folder: Path, batches: list[MicroBatch]) -> tuple[dict[str, bytes], list[int]]:
        with parameter_servers(folder, specs) as (settings, client):
            train(settings, MODEL, specs, mode, [{0: recorded([batches])[0]}])
            values = weights(client, MODEL, [*likes, *probes])
            rows = [table.rows for of in client.describe() for table in of.models["main"]]
        return {name: array.tobytes() for name, array in values.items()}, rows

    without = left_by(tmp_path / "without", likes)
    assert stages == []
    with_probes = left_by(tmp_path / "with", [likes[0], probes[0], *likes[1:], probes[1]])
    assert with_probes == without
    assert stages == ["trained", "applied"] * 2
