"""The picture of federated learning: accuracy over rounds where clients are unequal, and over the bytes they send."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.federated_bytes import DOWN_BITS, FEW, MINDSPORE
from benchmarks.federated_work import Tables, digits, everyone, simulated

CLIENTS, COHORT = 20, 4


@dataclass(frozen=True, slots=True)
class Curve:
    """Of one run: accuracy in percent after each round, and bytes up and down until then."""

    name: str
    accuracy: tuple[float, ...]
    bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Curves:
    """``unequal``: strategies at Dirichlet .1; ``sent``: the same clients dealt evenly, by what travels."""

    unequal: tuple[Curve, ...]
    sent: tuple[Curve, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Rounds of every run."""

    rounds: int = 100


WAYS: Final[dict[str, dict[str, Any]]] = {
    "float32": {},
    "MindSpore's mask and 8 bits": {"upload": MINDSPORE},
    f"{FEW}; down {DOWN_BITS} bits": {"upload": FEW, "download_bits": DOWN_BITS},
}


def sizes(quick: bool) -> Sizes:
    """Of the quick plan, or of the whole."""
    return Sizes(20) if quick else Sizes()


def learn(sizes: Sizes) -> Curves:
    """All curves."""
    local = {"steps": 50, "batch_size": 20, "rate": 0.1}
    strategies: dict[str, dict[str, Any]] = {
        "SCAFFOLD": {"strategy": {"name": "scaffold", "population": CLIENTS}, "training": local},
        "FedAvg": {"strategy": {"name": "fedavg"}, "training": local},
        "FedSGD": {"strategy": {"name": "fedsgd"}, "training": {"rate": 1.0}},
    }
    unequal = [_run(name, tables, COHORT, "dirichlet:0.1", sizes) for name, tables in strategies.items()]
    training = {"epochs": 3, "batch_size": 20, "rate": 0.1}
    sent = [
        _run(name, {"training": training, "compression": way}, CLIENTS, "iid", sizes)
        for name, way in WAYS.items()
    ]
    return Curves(tuple(unequal), tuple(sent))


def _run(name: str, tables: Tables, cohort: int, partition: str, sizes: Sizes) -> Curve:
    job = {
        "rounds": everyone(cohort, sizes.rounds),
        "model": {"name": "perceptron", "hidden": [64]},
        "simulation": {"checkpoint_every": 0},
        **tables,
    }
    with simulated(job, digits(CLIENTS, 0, partition), evaluated=True) as built:
        rows = list(built.simulation.run())
    accuracy = [100.0 * row.metrics["accuracy"] for row in rows if row.metrics is not None]
    total, sums = 0, []
    for row in rows:
        total += row.bytes_up + row.bytes_down
        sums.append(total)
    return Curve(name, tuple(accuracy), tuple(sums))


def draw(curves: Curves, path: Path) -> None:
    """Write it as PNG to ``path``."""
    # Loads in half a second, and only here: whoever draws nothing should not wait for it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 4.2), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    for curve in curves.unequal:
        left.plot(range(1, len(curve.accuracy) + 1), curve.accuracy, label=curve.name, linewidth=1.4)
    left.set_xlabel("round")
    left.set_ylabel("% of the test rows")
    left.set_title(f"digits at Dirichlet .1, {CLIENTS} clients, {COHORT} a round", fontsize=10)
    for curve in curves.sent:
        right.plot([each / 1e6 for each in curve.bytes], curve.accuracy, label=curve.name, linewidth=1.4)
    right.set_xscale("log")
    right.set_xlabel("MB of whole bodies, up and down (log scale)")
    right.set_title(f"digits dealt evenly, {CLIENTS} clients, all in every round", fontsize=10)
    for axes in (left, right):
        axes.grid(True, alpha=0.3, linewidth=0.5)
        axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path)
