"""A split network, in the clear and through the encrypted layer: quality beside a pooled model, seconds and bytes of an
epoch, and what either side makes of what it sees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from rich.console import Console

from benchmarks.report import Row
from benchmarks.turns import Figures
from benchmarks.vertical_linear import missing
from benchmarks.vertical_work import GUEST, HOST, SEED, Floats, SetMissing, Split, load, train
from federated.vertical.evaluation import baselines
from federated.vertical.linear.solver import Scaling
from federated.vertical.split.kind import KIND
from federated.vertical.split.leakage import features_by_inversion, labels_by_direction, watched
from federated.vertical.split.options import SplitOptions

LEAKAGE_ROWS: Final = 3_000
"""Of the training rows, those whose views are attacked."""
KNOWN: Final = 0.1
"""Part of them whose features the attacker knows."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured."""

    sets: tuple[str, ...] = ("default_credit",)
    epochs: int = 10


def measure(sizes: Sizes) -> list[Row]:
    """All rows."""
    console = Console(stderr=True)
    rows: list[Row] = []
    for name in sizes.sets:
        console.print(f"vertical: split network, {name}")
        try:
            split = load(name)
        except SetMissing as error:
            rows.append(missing(f"{name}, split network", error))
            continue
        clear = SplitOptions(epochs=sizes.epochs)
        sealed = replace(clear, layer="encrypted")
        pooled, alone = (_boosting_auc(split, part) for part in (split.pooled, split.guest.features))
        for work, options, told in (
            ("split network without noise", clear, "activations and gradients unprotected"),
            (
                "split network, encrypted layer",
                sealed,
                f"the guest sees {sealed.share} numbers of a row for {sealed.width}, weights of the layer are shared; "
                "gradients unprotected",
            ),
        ):
            rows += _set(split, f"{split.name}, {work}", options, pooled, alone, told)
            rows += _leakage(split, f"{split.name}, {work}", options)
    return rows


def _set(split: Split, work: str, options: SplitOptions, pooled: float, alone: float, told: str) -> list[Row]:
    job = train(KIND, options, split)
    # The first checkpoint is before the first batch.
    auc, epochs = split.auc(job.scores), Figures(job.steps[1:])
    return [
        Row(
            f"{work}: AUC",
            "AUC",
            auc,
            peer=pooled,
            peer_name="scikit-learn's boosting, pooled",
            ratio=auc / pooled,
            note=f"the guest's boosting alone {alone:.4f}; {told}",
        ),
        Row(
            f"{work}: an epoch",
            "s",
            epochs.median,
            spread=epochs.spread,
            note=f"{len(split.train):,} rows in batches of {options.batch}; both parties on one core",
        ),
        Row(f"{work}: bytes of an epoch", "MB", job.bytes / options.epochs / 1e6),
    ]


def _leakage(split: Split, work: str, options: SplitOptions) -> list[Row]:
    """What a guest makes of all that it saw, and a host of the last epoch's gradients."""
    rows = split.train[:LEAKAGE_ROWS]
    guest, host = split.guest.take(rows), split.host.take(rows)
    # Initial weights are the attacked parties' secret; any will do.
    seen = watched(guest, {HOST: host}, options, SEED, {GUEST: 1, HOST: 2})[HOST]
    features = Scaling.of(host.features, options.clip).apply(host.features)
    known = round(KNOWN * len(rows))
    labels = split.labels[rows] == split.labels.max()
    told = labels_by_direction(seen.gradients[-1], labels.astype(np.float64), int(np.flatnonzero(labels)[0]))
    note = f"{len(rows):,} rows, of which the guest knows the features of {known}; 0 is nothing, 1 all"
    return [
        Row(
            f"{work}: the host's features, from all that the guest saw",
            "R²",
            features_by_inversion(seen.of_all_epochs(), features, known),
            note=note,
        ),
        Row(
            f"{work}: labels, from one epoch's gradients at the host",
            "AUC of a guess",
            told,
            note="the host knows the label of one row; .5 is nothing, 1 all",
        ),
    ]


def _boosting_auc(split: Split, features: Floats) -> float:
    labels = split.labels
    seen = features[split.train], labels[split.train]
    held = features[split.test], np.asarray(labels[split.test])
    return baselines(seen, held)["boosting"]["auc"]
