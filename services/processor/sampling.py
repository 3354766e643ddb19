"""From interactions to training micro-batches: features, negatives and their log Q. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from featurestore.encoded import Encoded
from featurestore.encoder import Encoder
from featurestore.online import Cell
from models.negatives import NegativeSampler
from models.samples import MicroBatch, Watermark
from services.catalogue import Catalogue
from services.processor.users import LIKES, RECENT

MICRO_BATCH: Final = 64
"""Samples of one training step at most: larger steps save little time and learn less from as many samples."""
REMEMBERED: Final = 4_096
"""Recent positives that a restarted processor knows again."""

Rows = npt.NDArray[np.int64]


@dataclass(slots=True)
class Sample:
    """An interaction on its way to a micro-batch, with the user as before it.

    ``cells`` are the user's, but for the recent items and the number of likes, which stand beside them.
    ``passed_over``: items that were shown with the one that was liked, and not taken. ``counts``: whether anything
    is learned from it (a probe's sample is only worked).
    """

    offset: int
    accepted_at_ms: int
    time_ms: int
    user_id: str
    cells: Mapping[str, Cell]
    recent: list[str]
    likes: int
    item_id: str
    liked: bool
    passed_over: tuple[str, ...] = ()
    counts: bool = True


@dataclass(frozen=True, slots=True)
class Recipe:
    """What all micro-batches of a processor share. ``log``: the incarnation of the events log."""

    encoder: Encoder
    log: str
    model: str
    negatives: int


def micro_batches(
    samples: Sequence[Sample],
    end: Watermark,
    catalogue: Catalogue,
    sampler: NegativeSampler,
    recipe: Recipe,
    *,
    marked: bool = False,
) -> Iterator[MicroBatch]:
    """The micro-batches of one partition, in order; the last one reaches up to ``end``.

    Without samples there is one all the same, which carries the watermark alone. All items must be in the
    catalogue. The positives join the sampler's reservoir after the micro-batch that they are in. ``marked``: the
    last one is, even if no sample of a probe is in it.
    """
    users = _encode_users(samples, recipe.encoder)
    last = max(len(samples) - 1, 0) // MICRO_BATCH
    for number in range(last + 1):
        part = slice(number * MICRO_BATCH, (number + 1) * MICRO_BATCH)
        chunk = samples[part]
        watermark = end
        if number < last:
            watermark = Watermark(end.log, end.partition, chunk[-1].offset, chunk[-1].accepted_at_ms)
        rows = np.arange(len(samples))[part]
        made = _micro_batch(chunk, users.take(rows), watermark, catalogue, sampler, recipe)
        yield replace(made, marked=True) if marked and number == last else made


def _encode_users(samples: Sequence[Sample], encoder: Encoder) -> Encoded:
    rows = [
        {**s.cells, RECENT: Cell(list(s.recent), s.time_ms), LIKES: Cell(s.likes, s.time_ms)} for s in samples
    ]
    now = np.fromiter((s.time_ms for s in samples), np.int64, len(samples))
    return encoder.encode("user", [s.user_id for s in samples], rows, now)


def _micro_batch(
    samples: Sequence[Sample],
    users: Encoded,
    watermark: Watermark,
    catalogue: Catalogue,
    sampler: NegativeSampler,
    recipe: Recipe,
) -> MicroBatch:
    times = np.fromiter((s.time_ms for s in samples), np.int64, len(samples))
    positives = catalogue.rows([s.item_id for s in samples])
    items, log_q = _negatives(samples, positives, watermark, catalogue, sampler, recipe)
    candidates = np.concatenate([positives[:, None], items], axis=1)
    used, index = np.unique(candidates, return_inverse=True)
    index32: npt.NDArray[np.int32] = index.reshape(candidates.shape).astype(np.int32)
    liked = np.fromiter((s.liked for s in samples), bool, len(samples))
    sampler.observe(positives[liked])
    return MicroBatch(
        users=users,
        items=catalogue.encoded(used, int(times.max(initial=0))),
        positive=index32[:, 0],
        negatives=index32[:, 1:],
        log_q=log_q,
        label=liked.astype(np.float32),
        weight=np.fromiter((s.counts for s in samples), np.float32, len(samples)),
        event_time_ms=times,
        watermark=watermark,
        model=recipe.model,
        fingerprint=recipe.encoder.schema.fingerprint,
        marked=not all(s.counts for s in samples),
    )


def _negatives(
    samples: Sequence[Sample],
    positives: Rows,
    watermark: Watermark,
    catalogue: Catalogue,
    sampler: NegativeSampler,
    recipe: Recipe,
) -> tuple[Rows, npt.NDArray[np.float32]]:
    """Catalogue rows ``[B, K]`` and log Q ``[B, K + 1]``; never what the user liked lately.

    Items that were passed over replace up to a quarter of the draws. They were not drawn from the mixture, so
    no exact Q exists; they carry the mixture's, which treats them as if it had proposed them. That is biased
    towards pushing them back harder than their share, which is what they are there for, and bounded by K / 4.
    """
    owner = np.repeat(np.arange(len(samples)), np.array([len(s.recent) for s in samples], np.int64))
    recent = catalogue.rows([item for s in samples for item in s.recent])
    seed = (watermark.partition, max(watermark.offset, 0))
    draw = sampler.draw(positives, len(catalogue), recipe.negatives, seed, (owner, recent))
    items, log_q = draw.items, draw.log_q
    most = recipe.negatives // 4
    for number, sample in enumerate(samples):
        if sample.passed_over and most:
            rows = catalogue.rows(sample.passed_over[:most])
            rows = rows[(rows >= 0) & ~np.isin(rows, recent[owner == number]) & (rows != positives[number])]
            items[number, : len(rows)] = rows
            log_q[number, 1 : 1 + len(rows)] = np.log(sampler.probability(rows, len(catalogue)))
    return items, log_q


def remember(sampler: NegativeSampler, catalogue: Catalogue) -> bytes:
    """The newest positives of a sampler by id, since rows are not the same in the next process."""
    ids = catalogue.ids
    recent: list[int] = sampler.recent()[-REMEMBERED:].tolist()
    return msgspec.msgpack.encode([ids[row] for row in recent])


def recall(data: bytes, catalogue: Catalogue) -> NegativeSampler:
    """A sampler that knows what ``remember`` saved; an empty one if ``data`` cannot be read."""
    sampler = NegativeSampler()
    try:
        ids = msgspec.msgpack.decode(data, type=list[str])
    except msgspec.DecodeError:
        return sampler
    rows = catalogue.rows(ids)
    sampler.observe(rows[rows >= 0])
    return sampler
