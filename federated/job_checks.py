"""Whether the parts of a job go together: what is said by two sections at once."""

from __future__ import annotations

from federated.device import LocalTraining
from federated.job_sections import JobRefused, ServersSection, SimulationSection
from federated.rounds.settings import RoundSettings
from federated.selection import Capability, Everyone, FairnessCap, Selection
from federated.strategies import (
    FedNova,
    FedProx,
    Median,
    MultiKrum,
    Scaffold,
    Strategy,
    TrimmedMean,
)


def check_strategy(
    strategy: Strategy, rounds: RoundSettings, training: LocalTraining, population: int | None
) -> None:
    """Raise JobRefused unless ``strategy`` goes with rounds, local training and the number of clients."""
    if rounds.mode == "buffered" and strategy.name == "scaffold":
        raise JobRefused(
            "scaffold needs synchronous rounds: its controls are differences against one common model"
        )
    if rounds.mode == "buffered" and strategy.needs == "updates":
        raise JobRefused(
            f"{strategy.name} compares updates of one model: buffered rounds mix several versions"
        )
    fewest = strategy.fewest() if isinstance(strategy, (Median, MultiKrum, TrimmedMean)) else 1
    if rounds.thresholds.uploads_floor < fewest:
        raise JobRefused(
            f"{strategy.name} needs {fewest} updates, and an iteration may have {rounds.thresholds.uploads_floor}"
        )
    if strategy.name == "fedsgd" and (training.steps or training.epochs or 1) > 1:
        raise JobRefused(
            "fedsgd takes one gradient over all examples: leave training.steps and training.epochs out"
        )
    _check_training(strategy, training, population)


def _check_training(strategy: Strategy, training: LocalTraining, population: int | None) -> None:
    if isinstance(strategy, Scaffold) and training.momentum:
        raise JobRefused("scaffold measures its controls on plain steps: set training.momentum = 0")
    if isinstance(strategy, Scaffold) and strategy.population < (population or 0):
        raise JobRefused(f"scaffold: a population of {strategy.population}, but {population} clients")
    if isinstance(strategy, FedProx) and training.proximal not in (0.0, strategy.proximal):
        raise JobRefused(
            f"fedprox asks devices for strategy.proximal {strategy.proximal:g}: leave training.proximal out"
        )
    if isinstance(strategy, FedNova):
        for name in ("momentum", "proximal"):
            if getattr(strategy, name) != getattr(training, name):
                raise JobRefused(
                    f"fednova counts effective steps by strategy.{name} {getattr(strategy, name):g}, and devices "
                    f"train by training.{name} {getattr(training, name):g}: leave strategy.{name} out"
                )
        if strategy.proximal and strategy.rate != training.rate:
            raise JobRefused("fednova needs the devices' rate: leave strategy.rate out")


def check_selection(selection: Selection, rounds: RoundSettings, population: int | None) -> None:
    """Raise JobRefused unless enough clients may be selected in time."""
    if rounds.kind == "cross_silo" and not isinstance(selection, Everyone):
        raise JobRefused("cross-silo rounds take every member in every iteration: leave the selection out")
    for rule in getattr(selection, "rules", (selection,)):
        if isinstance(rule, FairnessCap):
            _check_fairness(rule, rounds, population)
        window_s = rounds.update_model_time_window_s
        if isinstance(rule, Capability) and rule.deadline_s > window_s:
            raise JobRefused(
                f"selection: a deadline of {rule.deadline_s:g} s is beyond the update window of {window_s:g} s"
            )


def _check_fairness(rule: FairnessCap, rounds: RoundSettings, population: int | None) -> None:
    wanted = rounds.thresholds.starts_floor or rounds.buffer_size
    if population is not None and population * rule.most < wanted * (rule.window + 1):
        raise JobRefused(
            f"fairness lets {population} clients in {rule.most} times in any {rule.window + 1} iterations: "
            f"not enough for {wanted} starts in each"
        )


def check_population(population: int | None, rounds: RoundSettings) -> None:
    """Raise JobRefused where there are too few clients for an iteration."""
    if population is None:
        return
    if rounds.mode == "buffered" and population < rounds.buffer_size:
        raise JobRefused(
            f"a buffer of {rounds.buffer_size} uploads cannot be filled by {population} clients, "
            "each once a version"
        )
    if rounds.mode != "buffered" and population < rounds.thresholds.starts_floor:
        raise JobRefused(
            f"{rounds.thresholds.starts_floor} starts are needed and there are {population} clients: "
            "every iteration would be invalid"
        )


def check_simulation(simulation: SimulationSection, servers: ServersSection) -> None:
    """Raise JobRefused for what the simulator, or servers, cannot do."""
    if simulation.engine in ("numpy", "batched") and simulation.device == "cuda":
        raise JobRefused(f"simulation: the {simulation.engine} engine has no cuda device; take engine torch")
    if simulation.ray and simulation.device != "cpu":
        raise JobRefused("simulation: over ray cohorts are trained on cpus; set simulation.device = cpu")
    if simulation.threads < 1 or simulation.memory_bytes < 0 or simulation.state_bytes < 0:
        raise JobRefused("simulation: threads must be at least 1, memory_bytes and state_bytes not negative")
    if simulation.availability == "trace" and not simulation.trace:
        raise JobRefused("simulation: availability trace needs the file, simulation.trace")
    if not 0.0 < simulation.patience_s < float("inf"):
        raise JobRefused(f"simulation: patience_s must be a positive number, not {simulation.patience_s}")
    if simulation.checkpoint_every < 0 or simulation.evaluate_every < 0:
        raise JobRefused("simulation: checkpoint_every and evaluate_every must not be negative")
    if not 1 <= servers.part_bytes <= servers.max_body_bytes:
        raise JobRefused("servers: part_bytes must be at least 1 and at most max_body_bytes")
