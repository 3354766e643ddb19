"""SecureBoost: quality beside its plaintext twin on pooled columns, and seconds of a tree beside histogram boosting in
the clear."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import numpy as np
from rich.console import Console
from sklearn.ensemble import HistGradientBoostingClassifier

from benchmarks.report import Row
from benchmarks.turns import Figures
from benchmarks.vertical_linear import missing
from benchmarks.vertical_work import HOST, Floats, Job, SetMissing, Split, load, train
from federated.vertical.boosting.kind import KIND
from federated.vertical.boosting.options import BoostingOptions
from federated.vertical.boosting.plain import PlainModel, boost
from services.vertical.workers import workers

CORES: Final = 2
WITHIN: Final = 0.003
TWIN: Final = "the same boosting, pooled, in the clear"
PEER: Final = "scikit-learn's histogram boosting, pooled"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured."""

    sets: tuple[str, ...] = ("default_credit",)
    trees: int = 20


def measure(sizes: Sizes) -> list[Row]:
    """All rows."""
    console = Console(stderr=True)
    rows: list[Row] = []
    for name in sizes.sets:
        console.print(f"vertical: SecureBoost, {name}")
        try:
            split = load(name)
        except SetMissing as error:
            rows.append(missing(f"{name}, SecureBoost", error))
            continue
        rows += _set(split, BoostingOptions(trees=sizes.trees))
    return rows


def plain_of(options: BoostingOptions, features: Floats, labels: Floats) -> PlainModel:
    """The twin."""
    return boost(
        features,
        labels,
        trees=options.trees,
        depth=options.depth,
        bins=options.bins,
        rule=options.rule,
        loss="logistic",
    )


def _set(split: Split, options: BoostingOptions) -> list[Row]:
    with workers(CORES) as several:
        several.map(_load, range(4 * CORES))
        job = train(KIND, options, split, workers=several)
    features, labels = split.pooled, split.labels
    began_s = time.perf_counter()
    twin = plain_of(options, features[split.train], labels[split.train])
    twin_s = (time.perf_counter() - began_s) / options.trees
    scores = twin.answer(features[split.test])
    peer_auc, peer_s = _peer(split, options)
    auc, twin_auc = split.auc(job.scores), split.auc(scores)
    work = f"{split.name}, SecureBoost of {options.trees} trees"
    return [
        Row(
            f"{work}: AUC",
            "AUC",
            auc,
            twin_auc - WITHIN,
            auc >= twin_auc - WITHIN,
            None,
            twin_auc,
            TWIN,
            auc / twin_auc,
            f"{int((job.scores != scores).sum())} of {len(scores):,} scores differ from the twin's",
        ),
        Row(
            f"{work}: AUC beside scikit-learn's",
            "AUC",
            auc,
            peer=peer_auc,
            peer_name=PEER,
            ratio=auc / peer_auc,
            note=f"as many trees, bins and leaves; guest alone {split.auc(job.alone):.4f}",
        ),
        *_speed(work, job, options, twin_s, peer_s),
    ]


def _speed(work: str, job: Job, options: BoostingOptions, twin_s: float, peer_s: float) -> list[Row]:
    # The checkpoint of a tree stands at its end; what comes before the first is in the first tree.
    trees = Figures(job.steps)
    return [
        Row(
            f"{work}: a tree",
            "s",
            trees.median,
            spread=trees.spread,
            peer=peer_s,
            peer_name=PEER,
            ratio=peer_s / trees.median,
            note=f"depth {options.depth}, {options.bins} bins, {CORES} processes; the same in the clear {twin_s:.3g} s",
        ),
        Row(
            f"{work}: bytes of a tree",
            "MB",
            job.bytes / options.trees / 1e6,
            note=f"the host sends {job.sent[HOST] / options.trees / 1e6:,.3g} MB",
        ),
    ]


def _peer(split: Split, options: BoostingOptions) -> tuple[float, float]:
    """AUC and seconds of a tree."""
    model = HistGradientBoostingClassifier(
        max_iter=options.trees,
        max_depth=options.depth,
        max_bins=options.bins,
        learning_rate=options.rate,
        l2_regularization=options.l2,
        min_samples_leaf=options.least_rows,
        early_stopping=False,
        random_state=0,
    )
    features, labels = split.pooled, split.labels
    began_s = time.perf_counter()
    model.fit(features[split.train], labels[split.train])
    seconds = (time.perf_counter() - began_s) / options.trees
    return split.auc(np.asarray(model.predict_proba(features[split.test])[:, 1])), seconds


def _load(number: int) -> None:
    """Makes a worker load its libraries before the clock starts."""
    import federated.vertical.boosting.host  # noqa: F401
