"""Joint logistic regression: quality beside the pooled model and the guest's alone, and seconds of an epoch beside the
same epoch in the clear."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from rich.console import Console

from benchmarks.report import Row, at_most
from benchmarks.samples import best_s
from benchmarks.turns import Figures
from benchmarks.vertical_work import HOST, SEED, Job, SetMissing, Split, load, logistic_auc, train
from federated.vertical.linear.kind import KIND
from federated.vertical.linear.options import LinearOptions
from federated.vertical.linear.outsourced import Owner, epoch, epoch_plain
from federated.vertical.linear.twin import train_plain

POOLED: Final = "scikit-learn, pooled"
ALONE: Final = "scikit-learn, guest alone"
TUTORIAL: Final = "TenSEAL's tutorial, as published"
TUTORIAL_S: Final = 160.0
EPOCH_AIM_S: Final = 2.0
ABOVE_AIM: Final = 0.05

Surrogate = Literal["degree5", "taylor"]
NAMES: Final[dict[Surrogate, str]] = {"degree5": "degree 5", "taylor": "Taylor's surrogate"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """A set: ``within`` of the pooled model's AUC, and whether the guest alone must be surpassed."""

    name: str
    within: float
    above: bool


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured; ``epochs`` at most; ``rounds`` of the epoch over encrypted data."""

    sets: tuple[Wanted, ...] = (Wanted("default_credit", 0.003, True), Wanted("breast", 0.002, False))
    surrogates: tuple[Surrogate, ...] = ("degree5", "taylor")
    epochs: int = 20
    rounds: int = 5


def measure(sizes: Sizes) -> list[Row]:
    """All rows."""
    rows = _sets(sizes)
    Console(stderr=True).print("vertical: an epoch over encrypted data")
    return [*rows, *outsourced(sizes)]


def _sets(sizes: Sizes) -> list[Row]:
    console = Console(stderr=True)
    rows: list[Row] = []
    for wanted in sizes.sets:
        console.print(f"vertical: logistic regression, {wanted.name}")
        try:
            split = load(wanted.name)
        except SetMissing as error:
            rows.append(missing(f"{wanted.name}, logistic regression", error))
            continue
        rows += _set(wanted, split, sizes)
    return rows


def missing(work: str, error: SetMissing) -> Row:
    """What stands in the place of a set that is not there."""
    return Row(f"{work}: not measured", "sets", 0.0, 1.0, False, note=str(error))


def _set(wanted: Wanted, split: Split, sizes: Sizes) -> list[Row]:
    pooled, alone = logistic_auc(split, split.pooled), logistic_auc(split, split.guest.features)
    rows: list[Row] = []
    for surrogate in sizes.surrogates:
        options = LinearOptions(surrogate=surrogate, epochs=sizes.epochs)
        job = train(KIND, options, split, coordinator=True)
        work = f"{wanted.name}, logistic regression under CKKS, {NAMES[surrogate]}"
        # The better polynomial has an aim; Taylor's is reported beside it.
        aimed = surrogate == "degree5"
        rows += _quality(work, split.auc(job.scores), pooled, alone, wanted, aimed)
        rows += _speed(work, job, split, options)
    return rows


def _quality(work: str, auc: float, pooled: float, alone: float, wanted: Wanted, aimed: bool) -> list[Row]:
    least = pooled - wanted.within
    rows = [
        Row(
            f"{work}: AUC",
            "AUC",
            auc,
            least if aimed else None,
            auc >= least if aimed else None,
            None,
            pooled,
            POOLED,
            auc / pooled,
            f"{auc - pooled:+.4f}",
        )
    ]
    if wanted.above:
        rows.append(
            Row(
                f"{work}: AUC above the guest's alone",
                "AUC",
                auc - alone,
                ABOVE_AIM if aimed else None,
                auc - alone >= ABOVE_AIM if aimed else None,
                note=f"{ALONE}: {alone:.4f}",
            )
        )
    return rows


def _speed(work: str, job: Job, split: Split, options: LinearOptions) -> list[Row]:
    epochs = Figures(job.steps)
    guest, host = split.guest.take(split.train), split.host.take(split.train)
    plain_s = best_s(lambda: train_plain(guest, [host], options, SEED)) / len(job.steps)
    shape = f"{len(guest):,} x {guest.features.shape[1] + host.features.shape[1]}"
    return [
        Row(
            f"{work}: an epoch",
            "s",
            epochs.median,
            spread=epochs.spread,
            peer=plain_s,
            peer_name="the same in the clear",
            ratio=plain_s / epochs.median,
            note=f"{shape}, {job.figures['batches']} batches, {len(job.steps)} epochs; all three parties on one core",
        ),
        Row(
            f"{work}: bytes of an epoch",
            "MB",
            job.bytes / len(job.steps) / 1e6,
            note=f"of all parties; the host sends {job.sent[HOST] / len(job.steps) / 1e6:,.3g} MB; "
            f"masks are noise to the key holder up to 2^{job.figures['mask_distance_log2']}",
        ),
    ]


def outsourced(sizes: Sizes) -> list[Row]:
    """An epoch by somebody without a key: weights, features and labels encrypted, as in TenSEAL's tutorial."""
    rng = np.random.default_rng(0)
    features, weights = rng.standard_normal((780, 9)), rng.standard_normal(10) * 0.3
    labels = (features @ weights[:9] + rng.logistic(size=780) > 0).astype(np.float64)
    owner = Owner()
    began_s = time.perf_counter()
    data = owner.encrypt(features, labels)
    encrypt_s = time.perf_counter() - began_s
    seconds: list[float] = []
    for _ in range(sizes.rounds):
        began_s = time.perf_counter()
        sealed = owner.encrypt_weights(weights)
        found = owner.decrypt_weights(epoch(owner.scheme, data, sealed, 1.0, 0.05))
        seconds.append(time.perf_counter() - began_s)
    truth = epoch_plain(features, labels, weights, 1.0, 0.05)
    figures = Figures(tuple(seconds))
    plain: Callable[[], object] = lambda: epoch_plain(features, labels, weights, 1.0, 0.05)  # noqa: E731
    work = "CKKS epoch over 780 x 9, weights, features and labels encrypted"
    return [
        Row(
            work,
            "s",
            figures.median,
            EPOCH_AIM_S,
            at_most(EPOCH_AIM_S, figures.median),
            figures.spread,
            TUTORIAL_S,
            TUTORIAL,
            TUTORIAL_S / figures.median,
            f"weights encrypted and decrypted within; off by {np.abs(found - truth).max():.1e} at most; columns in "
            "slots, where the tutorial has rows; one core",
        ),
        Row(f"{work}: in the clear", "s", best_s(plain), note="NumPy, one core: the limit"),
        Row(f"{work}: encrypting the data", "s", encrypt_s, note="once, before; with the public keys"),
    ]
