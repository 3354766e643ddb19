"""A simulation out of a job's file and a federation's data."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from federated.data import Federation
from federated.job import FederatedJob
from federated.job_sections import JobRefused
from federated.models import Model
from federated.rounds import Desk, MemoryStore, Rounds, Tickets
from federated.sections import read_section
from federated.selection import Everyone, FairnessCap, Poisson, Random, Selection
from federated.simulator.availability import AvailabilityRefused, make_availability
from federated.simulator.cohort import Engine
from federated.simulator.engines import make_engine
from federated.simulator.learning import Learning
from federated.simulator.on_ray import RayEngine, RayMissing
from federated.simulator.population import Habits, Population
from federated.simulator.simulation import Evaluate, Simulation
from federated.simulator.spending import spending
from federated.simulator.world import World
from federated.weights import Array


def ticket_key(seed: int) -> bytes:
    """The key of a simulation's tickets, and of poisson's coins: runs must repeat, so it is no secret."""
    return hashlib.sha256(b"tickets of a simulation" + seed.to_bytes(8, "little")).digest()


@dataclass(frozen=True, slots=True)
class Built:
    """A simulation with its model, for whoever evaluates it."""

    simulation: Simulation
    model: Model
    engine: str


def build(
    job: FederatedJob,
    federation: Federation,
    folder: Path,
    *,
    model: Model | None = None,
    trace: str | None = None,
    evaluate: Callable[[Model], Evaluate] | None = None,
    checkpoints: bool = True,
) -> Built:
    """``job`` over the clients of ``federation``, with its files in ``folder``.

    ``model`` takes the place of the job's (a ``modules.ModuleModel``), ``trace`` is the text of the availability trace.
    ``evaluate`` makes, of the model, what is called after a version. Without ``checkpoints`` the folder holds what
    clients remember alone. Raises JobRefused.
    """
    job = replace(job, data=replace(job.data, clients=federation.clients))
    job.check()
    simulation, seed = job.simulation, job.job.seed
    if model is None and (job.model.name == "text") != _of_characters(federation):
        raise JobRefused(
            f"model {job.model.name} does not fit {federation.name}: "
            + (
                "model text takes characters"
                if job.model.name == "text"
                else "its inputs are numbers of things"
            )
        )
    model = model or job.make_model(federation.features, federation.classes)
    protection = job.make_protection(model.layout())
    try:
        habits = read_section(Habits, simulation.habits, "habits")
        availability = make_availability(simulation.availability, seed, share=simulation.share, trace=trace)
        engine = _engine(job, model)
    except (AvailabilityRefused, RayMissing, ValueError) as error:
        raise JobRefused(f"simulation: {error}") from error
    selection, store = job.make_selection(), MemoryStore()
    rounds = job.make_rounds(model.layout().trained)
    desk = Desk(store, Rounds(rounds, Tickets(job.job.name, ticket_key(seed)), selection))
    learning = Learning(
        model,
        federation,
        job.make_strategy(),
        job.training,
        rounds,
        engine,
        seed,
        folder=folder,
        scheme=job.make_scheme(),
        grid=job.make_grid(model.layout()),
        state_bytes=simulation.state_bytes,
        protection=protection,
        masked=job.make_masked(model.layout()),
        messages=job.secure_aggregation.simulate == "protocol",
    )
    world = World(
        desk,
        Population(federation.clients, habits, seed),
        federation.counts,
        availability,
        training=learning.training,
        down_bytes=learning.downloads.bytes_for,
        up_bytes=lambda: learning.body_bytes,
        names=job.rounds.members,
        needs_facts=_looks_at_facts(selection),
        patience_s=simulation.patience_s,
        most_reports=protection.most_reports,
        tells_examples=job.privacy.mechanism == "none",
    )
    made = Simulation(
        store,
        world,
        learning,
        evaluate=None if evaluate is None else evaluate(model),
        evaluate_every=simulation.evaluate_every,
        folder=folder if checkpoints else None,
        checkpoint_every=simulation.checkpoint_every,
        fingerprint=fingerprint(job, federation, trace),
        epsilon=spending(job.exposure(model.layout().trained, simulated=True)),
    )
    return Built(made, model, engine.name)


def fingerprint(job: FederatedJob, federation: Federation, trace: str | None) -> str:
    """What a checkpoint must have in common with who resumes from it: all that decides the bits."""
    digest = hashlib.sha256(job.to_toml().encode())
    digest.update(np.ascontiguousarray(federation.training.offsets).tobytes())
    digest.update(np.ascontiguousarray(federation.training.rows).tobytes())
    digest.update((trace or "").encode())
    return digest.hexdigest()[:32]


def _of_characters(federation: Federation) -> bool:
    """Whether inputs are numbers of classes, as the next character's are."""
    inputs = federation.inputs
    return inputs.dtype.kind in "iu" and (inputs.size == 0 or int(inputs.max()) < federation.classes)


def first_weights(simulation: Simulation) -> Array:
    """The model [D] before the first iteration of a fresh simulation."""
    return simulation.learning.state.weights.copy()


def _engine(job: FederatedJob, model: Model) -> Engine:
    wanted = job.simulation
    if wanted.ray:
        address = None if wanted.ray == "local" else wanted.ray
        return RayEngine(
            wanted.engine, model, memory_bytes=wanted.memory_bytes, cores=wanted.threads, address=address
        )
    return make_engine(
        wanted.engine, model, device=wanted.device, memory_bytes=wanted.memory_bytes, threads=wanted.threads
    )


def _looks_at_facts(selection: Selection) -> bool:
    rules = getattr(selection, "rules", (selection,))
    return not all(isinstance(rule, (Everyone, Random, Poisson, FairnessCap)) for rule in rules)
