"""An epoch of MovieLens-100K by the trainer's own steps on a parameter server, against the same model in one process.

The peer has its whole vocabulary in advance and its micro-batches as tensors in memory; ours decodes each one, looks
its keys up, pulls, computes and pushes. Both have one thread; our server has a core of its own where there is one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import torch
from rich.console import Console

from benchmarks.one_process import OneProcess, Ready, Vocabulary, optimiser
from benchmarks.recorded import processed
from benchmarks.report import Row
from benchmarks.servers import MODEL, ServersFailed, parameter_servers
from benchmarks.turns import Block, faced, in_turn
from featurestore.encoded import Encoded
from models.samples import MicroBatch, Watermark, decode_batch, encode_batch
from models.training import RecommenderModel
from services.messagelog.contract import Record
from services.modelling import build_model, open_schema
from services.parameter_server.client import ParameterClient
from services.parameter_server.types import Applied, Bound, Keys, Pulled, PushReply, Rows
from services.settings.model import Settings
from services.tables import table_specs
from services.topics import SAMPLES
from services.trainer.metrics import TrainerMetrics
from services.trainer.trainer import Trainer
from sync.pushes import Source

T = TypeVar("T")

SIZE: Final = 256
AIM_TIMES: Final = 1.5
PEER: Final = "one process, nn.Embedding and torch.optim.Adagrad"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The first ``interactions`` of MovieLens-100K, learned from ``rounds`` times by each."""

    interactions: int
    rounds: int


def measure(sizes: Sizes, folder: Path, console: Console) -> Iterator[Row]:
    """One row: seconds of an epoch."""
    torch.set_num_threads(1)
    settings = Settings()
    model = build_model(open_schema(settings), settings.model)
    console.print(f"epoch: recording the samples of {sizes.interactions:,} interactions")
    (values,), notes = processed(folder / "recorded", 1, sizes.interactions)
    for note in notes:
        console.print(note)
    batches = list(regrouped(map(decode_batch, values), SIZE, model))
    samples = sum(map(len, batches))
    console.print(f"epoch: {samples:,} samples, {sizes.rounds} rounds")
    specs = table_specs(model.needs, settings.model)
    with parameter_servers(folder / "servers", specs) as client:
        timed = TimedParameters(client)
        blocks = [_ours(timed, model, batches), _peer(client, model, batches)]
        ours, peer = in_turn(blocks, sizes.rounds)
    row = faced(
        f"epoch of DLRM and two-tower, {samples:,} MovieLens samples in {len(batches)} steps of {SIZE}",
        "s",
        ours,
        peer,
        PEER,
        aim=1.0 / AIM_TIMES,
        less_is_better=True,
        note=f"{ours.median / peer.median:.2f} times the peer's, at most {AIM_TIMES:g} are aimed at; of a step's "
        f"{1e3 * ours.median / len(batches):.1f} ms {timed.said((sizes.rounds + 1) * len(batches))}",
    )
    yield row


def regrouped(batches: Iterable[MicroBatch], size: int, model: RecommenderModel) -> Iterator[MicroBatch]:
    """The samples of ``batches`` in their order, ``size`` to a micro-batch; the last may have fewer."""
    waiting: list[MicroBatch] = []
    for batch in batches:
        waiting.append(batch)
        while sum(map(len, waiting)) >= size:
            whole = joined(waiting, model)
            yield whole.take(np.arange(size))
            waiting = [whole.take(np.arange(size, len(whole)))] if len(whole) > size else []
    if waiting:
        yield joined(waiting, model)


def joined(batches: Sequence[MicroBatch], model: RecommenderModel) -> MicroBatch:
    """One micro-batch of the samples of ``batches``; an item is as the last of them has it."""
    items = Encoded.concatenate([batch.items for batch in batches])
    keys, place = np.unique(model.item_own_keys(items), return_inverse=True)
    newest = np.zeros(len(keys), np.intp)
    newest[place] = np.arange(len(place))
    starts = np.cumsum([0, *(len(batch.items) for batch in batches[:-1])]).tolist()
    position = place.reshape(-1).astype(np.int32)
    last = batches[-1]
    return MicroBatch(
        users=Encoded.concatenate([batch.users for batch in batches]),
        items=items.take(newest),
        positive=np.concatenate(
            [position[b.positive + start] for b, start in zip(batches, starts, strict=True)]
        ),
        negatives=np.concatenate(
            [position[b.negatives + start] for b, start in zip(batches, starts, strict=True)]
        ),
        log_q=np.concatenate([batch.log_q for batch in batches]),
        label=np.concatenate([batch.label for batch in batches]),
        weight=np.concatenate([batch.weight for batch in batches]),
        event_time_ms=np.concatenate([batch.event_time_ms for batch in batches]),
        watermark=last.watermark,
        model=last.model,
        fingerprint=last.fingerprint,
    )


@dataclass(slots=True)
class TimedParameters:
    """A client that notes how long its pulls and pushes took."""

    client: ParameterClient
    spent_s: dict[str, float] = field(default_factory=lambda: {"pull": 0.0, "push": 0.0})

    def pull(self, model: str, keys: Mapping[str, Keys]) -> Pulled:
        started_s = time.perf_counter()
        found = self.client.pull(model, keys)
        self.spent_s["pull"] += time.perf_counter() - started_s
        return found

    def applied(self, model: str, source: Source) -> dict[int, Applied]:
        return self.client.applied(model, source)

    def push(
        self,
        model: str,
        source: Source,
        offset: int,
        predecessors: Mapping[int, int],
        accepted_at_ms: int,
        watermark: Watermark | None,
        parts: Mapping[str, tuple[Keys, Rows]],
        *,
        incarnations: Mapping[int, int] | None = None,
        bound: Bound | None = None,
    ) -> dict[int, PushReply]:
        started_s = time.perf_counter()
        found = self.client.push(
            model, source, offset, predecessors, accepted_at_ms, watermark, parts,
            incarnations=incarnations, bound=bound,
        )  # fmt: skip
        self.spent_s["push"] += time.perf_counter() - started_s
        return found

    def said(self, steps: int) -> str:
        """How long both take in a step, for a note."""
        return ", ".join(f"{name} {1e3 * spent / steps:.1f} ms" for name, spent in self.spent_s.items())


def _ours(parameters: TimedParameters, model: RecommenderModel, batches: Sequence[MicroBatch]) -> Block:
    values = [encode_batch(batch) for batch in batches]
    trainer = Trainer(parameters, model, MODEL, "benchmark", TrainerMetrics())
    epochs = iter(range(2**31))

    def block() -> float:
        # A partition of its own: its pushes are new, though the samples are the same.
        partition = next(epochs)
        trainer.open(partition)
        records = [Record(SAMPLES, partition, offset, b"", value, 0) for offset, value in enumerate(values)]
        return _seconds(records, lambda record: _require_done(trainer.step(record)))

    return block


def _require_done(step: object) -> None:
    if step != "done":
        raise ServersFailed(f"a step came to {step}")


def _peer(client: ParameterClient, model: RecommenderModel, batches: Sequence[MicroBatch]) -> Block:
    vocabulary = Vocabulary(batches)
    rows = client.pull(MODEL, {table.name: vocabulary.keys for table in model.needs.tables}).rows
    module = OneProcess(model, rows, client.dense(MODEL, published=False).values)
    adagrad = optimiser(module, model)
    ready = [vocabulary.ready(batch) for batch in batches]

    def step(batch: Ready) -> None:
        adagrad.zero_grad()
        torch.autograd.backward(module(batch))
        adagrad.step()

    return lambda: _seconds(ready, step)


def _seconds(batches: Sequence[T], step: Callable[[T], object]) -> float:
    started_s = time.perf_counter()
    for batch in batches:
        step(batch)
    return time.perf_counter() - started_s
