"""A split network: quality beside a pooled model, and seconds of an epoch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from rich.console import Console

from benchmarks.report import Row
from benchmarks.turns import Figures
from benchmarks.vertical_linear import missing
from benchmarks.vertical_work import Floats, SetMissing, Split, load, train
from federated.vertical.evaluation import baselines
from federated.vertical.split.kind import KIND
from federated.vertical.split.options import SplitOptions


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
        rows += _set(split, SplitOptions(epochs=sizes.epochs))
    return rows


def _set(split: Split, options: SplitOptions) -> list[Row]:
    job = train(KIND, options, split)
    auc, pooled = split.auc(job.scores), _boosting_auc(split, split.pooled)
    alone = _boosting_auc(split, split.guest.features)
    epochs = Figures(job.steps)
    work = f"{split.name}, split network without noise"
    return [
        Row(
            f"{work}: AUC",
            "AUC",
            auc,
            peer=pooled,
            peer_name="scikit-learn's boosting, pooled",
            ratio=auc / pooled,
            note=f"the guest's boosting alone {alone:.4f}; activations and gradients unprotected",
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


def _boosting_auc(split: Split, features: Floats) -> float:
    labels = split.labels
    seen = features[split.train], labels[split.train]
    held = features[split.test], np.asarray(labels[split.test])
    return baselines(seen, held)["boosting"]["auc"]
