"""A federated job as one file: it runs in the simulator and, unchanged, on real servers.

    JobRefused (ValueError)     the file cannot be read, a key or value is wrong, or parts do not go together

Sections: job, model, data, training, strategy, rounds, selection, compression, privacy, secure_aggregation,
simulation, servers, into. Those of models, strategies and selection hold a ``name`` and whatever options that one has.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from federated.compression import Grid, Scheme, make_scheme
from federated.device import LocalTraining
from federated.layout import Layout
from federated.models import Model, make_model
from federated.privacy.accounting_statement import Exposure, most_releases
from federated.privacy.calibration import DistributedNoise, fewest_honest
from federated.privacy.mechanisms import make_protection
from federated.privacy.noised import Circumstances, LocalNoise
from federated.privacy.protection import Protection
from federated.privacy.section import DISTRIBUTED, PrivacySection, SecureAggregationSection
from federated.privacy.signds import reports_of
from federated.privacy.signds.advice import step_warning
from federated.privacy.soundness import Facts, require_sound
from federated.rounds.keys import Keys
from federated.rounds.settings import RoundSettings
from federated.secagg.graph import Degree, smallest_group
from federated.secagg.settings import make_plan
from federated.secagg.updates import MaskedUpdates, masked_updates
from federated.sections import SectionRefused, read_section, unknown, write_tables
from federated.selection import (
    RULES,
    Capability,
    Everyone,
    FairnessCap,
    Poisson,
    Selection,
    earned_sampling,
    make_selection,
)
from federated.strategies import (
    STRATEGIES,
    AdaptiveFrequency,
    FedNova,
    FedProx,
    Median,
    MultiKrum,
    Scaffold,
    SignVotes,
    Strategy,
    TrimmedMean,
    make_strategy,
)
from federated.sums import SCALE_BITS, Bounds

_SMALLEST_SCALE = 2.0 ** (10 - SCALE_BITS)


class JobRefused(ValueError):
    """A job that cannot be run; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Named:
    """Something chosen by name, with its own options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JobSection:
    """``name`` is the job's on servers (1 to 64 of a-z, 0-9, ``_.-``); ``seed`` decides all that is drawn."""

    name: str = "job"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"job.seed must be at least 0 and below 2**63, not {self.seed}")


@dataclass(frozen=True, slots=True)
class DataSection:
    """Whose data: a data set's name or path, over ``clients`` by ``partition`` ("iid", "dirichlet:0.1", "label:2", …).

    None leaves the data set's own rule. ``features`` and ``classes`` need only be told to servers, which see no data.
    ``context`` is the window of text in characters, ``view`` what ratings are seen as, ``items`` the ids of a model
    of items, by number.
    """

    name: str = "digits"
    clients: int | None = None
    partition: str | None = None
    features: int | None = None
    classes: int | None = None
    context: int | None = None
    view: str | None = None
    items: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(set(self.items)) < len(self.items):
            raise ValueError("data.items names an item twice")


@dataclass(frozen=True, slots=True)
class CompressionSection:
    """``upload`` is a scheme such as "top_k:0.03,quantise:1,deflate" ("" sends float32). ``download_bits`` rounds
    versions to a grid and sends differences (0 sends the whole model in float32)."""

    upload: str = ""
    download_bits: int = 0


@dataclass(frozen=True, slots=True)
class SimulationSection:
    """What the simulator alone needs. ``engine`` is one of ``simulator.engines``, ``auto`` the fastest for the model
    and ``device``; ``memory_bytes`` bounds a cohort's chunk (0: the device's default), ``threads`` of which are in
    work; ``state_bytes`` bounds what clients remember. ``ray`` is "local" or a cluster's address: Ray's tasks train the
    chunks, on ``threads`` cores if local.

    ``availability`` is always, bernoulli, diurnal (``share`` of the clients) or trace (a file, ``trace``); ``habits``
    are speeds, bandwidths, dropouts and stragglers of the population. Checkpoints and evaluations come every so many
    iterations (0: never).
    """

    engine: Literal["auto", "batched", "torch", "numpy"] = "auto"
    device: Literal["cpu", "cuda"] = "cpu"
    memory_bytes: int = 0
    threads: int = 1
    ray: str = ""
    state_bytes: int = 2**32
    availability: Literal["always", "bernoulli", "diurnal", "trace"] = "always"
    share: float = 0.5
    trace: str | None = None
    patience_s: float = 86_400.0
    checkpoint_every: int = 10
    evaluate_every: int = 1
    habits: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServersSection:
    """What real servers and their clients need: where they are, how large a body and a part of it may be, and how long
    a request may take."""

    urls: tuple[str, ...] = ()
    max_body_bytes: int = 2**28
    part_bytes: int = 2**20
    request_s: float = 60.0


@dataclass(frozen=True, slots=True)
class IntoSection:
    """Where else what a job of items learns goes: into the served ``model`` of the stack that its servers belong to
    ("": nowhere). An iteration counts there as ``weight`` samples of a trainer."""

    model: str = ""
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.weight < math.inf:
            raise ValueError(f"into.weight must be positive, not {self.weight}")


@dataclass(frozen=True, slots=True)
class FederatedJob:
    """All of a job. ``load_job`` reads and checks one."""

    rounds: RoundSettings
    job: JobSection = JobSection()
    model: Named = Named("perceptron")
    data: DataSection = DataSection()
    training: LocalTraining = field(default_factory=LocalTraining)
    strategy: Named = Named("fedavg")
    selection: Named = Named("everyone")
    compression: CompressionSection = CompressionSection()
    privacy: PrivacySection = field(default_factory=PrivacySection)
    secure_aggregation: SecureAggregationSection = field(default_factory=SecureAggregationSection)
    simulation: SimulationSection = SimulationSection()
    servers: ServersSection = ServersSection()
    into: IntoSection = IntoSection()

    def make_model(self, features: int | None = None, classes: int | None = None) -> Model:
        """The model for rows of F features and C classes, which the data may tell, else the file must. Raises
        JobRefused."""
        named = len(self.data.items) or None
        features = features or self.data.features or named
        classes = classes or self.data.classes or named
        if named is not None and classes != named:
            raise JobRefused(f"data.items names {named} items, and the data have {classes}")
        if features is None or classes is None:
            raise JobRefused("the model's size is unknown: set data.features and data.classes")
        with _refusing("model"):
            return make_model(self.model.name, features=features, classes=classes, **self.model.options)

    def make_strategy(self) -> Strategy:
        """The strategy, with the cap on examples, the population and the local training that the job says. Raises
        JobRefused."""
        options = dict(self.strategy.options)
        kind = STRATEGIES.get(self.strategy.name)
        known = {option.name for option in dataclasses.fields(kind)} if kind is not None else set()
        if "max_examples" in options:
            raise JobRefused("strategy: set rounds.max_examples, it caps what a client may claim everywhere")
        if "max_examples" in known:
            options["max_examples"] = self.rounds.max_examples
            if self.secure_aggregation.protocol != "none":
                # The ring holds whole weights up to it.
                options["max_examples"] = min(self.rounds.max_examples, self.secure_aggregation.max_weight)
            if self.privacy.mechanism != "none":
                options["max_examples"] = (
                    1  # how many examples a client has is data: everyone weighs the same
                )
        if "population" in known and self.population is not None:
            options.setdefault("population", self.population)
        if kind is FedNova:
            for name in ("momentum", "proximal", "rate"):
                options.setdefault(name, getattr(self.training, name))
        if kind is SignVotes:
            for name, told in (
                ("server_rate", "sign_global_lr"),
                ("magnitude_epsilon", "magnitude_epsilon"),
            ):
                if name in options:
                    raise JobRefused(f"strategy: signds takes its {name} from privacy.{told}: set that")
                options[name] = getattr(self.privacy, told)
        if self.training.steps is not None and kind is not None:
            # Everyone takes as many: who claims more, which FedNova would multiply every step by, gains nothing.
            options.setdefault("steps" if kind is AdaptiveFrequency else "max_steps", self.training.steps)
        with _refusing("strategy"):
            return make_strategy(self.strategy.name, **options)

    def make_selection(self) -> Selection:
        """Who may train. Raises JobRefused."""
        with _refusing("selection"):
            return make_selection(self.selection.name, **self.selection.options)

    def make_scheme(self) -> Scheme | None:
        """How uploads are compressed, None for not at all; SignDS's reports have a form of their own. Raises
        JobRefused."""
        if self.privacy.mechanism == "signds":
            return reports_of(self.privacy)
        with _refusing("compression.upload"):
            return make_scheme(self.compression.upload) if self.compression.upload else None

    def make_grid(self, layout: Layout) -> Grid | None:
        """How downloads are, None for whole models in float32. Raises JobRefused."""
        with _refusing("compression.download_bits"):
            bits = self.compression.download_bits
            return Grid.for_layout(layout, bits) if bits else None

    def make_protection(self, layout: Layout | None = None) -> Protection:
        """How clients are protected, at the device and at the server. Raises JobRefused, also for a ``layout`` that
        the mechanism does not protect."""
        with _refusing("privacy"):
            protection = make_protection(self.privacy, self._circumstances())
            if layout is not None:
                protection.require_layout(layout)
            return protection

    def _circumstances(self) -> Circumstances:
        """What the mechanism needs to know of the rounds: how many clients are expected, and how many are surely
        honest. Raises JobRefused."""
        thresholds = self.rounds.thresholds
        expected: float = thresholds.uploads_close
        selection = self.make_selection()
        if isinstance(selection, Poisson):
            expected = selection.expected(self._drawn_rounds().sampled)
        secure, honest = self.secure_aggregation, 1
        if self.privacy.mechanism in DISTRIBUTED:
            with _refusing("privacy"):
                honest = fewest_honest(thresholds.uploads_floor, thresholds.starts_close, secure.colluding)
            if secure.protocol == "secagg+" and secure.malicious:
                with _refusing("secure_aggregation"):
                    honest = min(honest, _smallest_part(secure, thresholds.starts_close))
        masked = secure.protocol != "none" or self.privacy.mechanism in DISTRIBUTED
        step_bits = secure.step_bits if masked else SCALE_BITS
        return Circumstances(expected, honest, step_bits)

    def make_masked(self, layout: Layout) -> MaskedUpdates | None:
        """How updates of ``layout`` travel under secure aggregation, with its plan proved; None where they travel
        plain. Raises JobRefused."""
        if self.secure_aggregation.protocol == "none":
            return None
        with _refusing("secure_aggregation"):
            noise = self.exposure(layout.trained).noise
            return masked_updates(
                self.secure_aggregation,
                self.privacy,
                self._drawn_rounds(),
                self.make_strategy(),
                layout,
                self.make_scheme(),
                self.job.seed,
                noise=noise,
                answers=self.make_protection().answers,
            )

    def make_rounds(self, dimension: int) -> RoundSettings:
        """``rounds`` with what follows from the selection and, for models of D trained weights, from the budget of
        privacy. Raises JobRefused."""
        drawn = self._drawn_rounds()
        with _refusing("privacy"):
            return dataclasses.replace(drawn, most_releases=most_releases(self.exposure(dimension)))

    def exposure(self, dimension: int, *, simulated: bool = False) -> Exposure:
        """What the protection of models of D trained weights costs. Raises JobRefused."""
        noise = None
        if self.privacy.mechanism in DISTRIBUTED:
            with _refusing("privacy"):
                noise = DistributedNoise.of(
                    self.privacy,
                    dimension=dimension,
                    step_bits=self.secure_aggregation.step_bits,
                    honest=self._circumstances().honest,
                )
        rate, advice = self._earned_rate()
        if self.privacy.mechanism == "signds" and dimension * self.privacy.sign_k >= 1.0:
            with _refusing("privacy"):
                advice = step_warning(self.privacy, dimension, self.rounds.thresholds.uploads_close)
        return Exposure(
            self.privacy,
            self.rounds.fl_iteration_num,
            rate,
            self.population,
            noise,
            simulated,
            () if advice is None else (advice,),
        )

    def _earned_rate(self) -> tuple[float, str | None]:
        """The sampling rate that accounting may assume, and what it rests on where that is not much. Raises
        JobRefused."""
        selection, fewest = self.make_selection(), self.rounds.start_fl_job_threshold
        rate = earned_sampling(self.privacy.mechanism, selection)
        if rate == 1.0 or not isinstance(selection, Poisson):
            return rate, None
        population = self._drawn_rounds().sampled
        expected = selection.expected(population)
        warning = None
        if fewest > expected / 2.0:
            warning = (
                f"an iteration needs {fewest} clients of the {expected:g} that are drawn on average: if many of "
                f"data.clients {population} cannot be reached, that it was valid tells who was drawn, and epsilon is "
                "too low; lower rounds.start_fl_job_threshold"
            )
        return selection.rate_if_valid(population, fewest), warning

    def _drawn_rounds(self) -> RoundSettings:
        """``rounds`` as the selection has them. Raises JobRefused."""
        selection = self.make_selection()
        if self.rounds.sampled or self.rounds.most_releases:
            raise JobRefused(
                "rounds.sampled and rounds.most_releases are not set by hand: they follow from selection poisson with "
                "data.clients, and from privacy.budget_epsilon"
            )
        if not isinstance(selection, Poisson):
            return self.rounds
        if self.population is None:
            raise JobRefused("selection poisson divides by the clients it expects: set data.clients")
        expected = selection.expected(self.population)
        if self.rounds.start_fl_job_threshold > expected:
            raise JobRefused(
                f"rounds.start_fl_job_threshold {self.rounds.start_fl_job_threshold} is above the {expected:g} clients "
                "that selection poisson draws on average: most iterations would be invalid; under poisson it is the "
                "fewest that may start"
            )
        with _refusing("rounds"):
            return dataclasses.replace(self.rounds, sampled=self.population)

    @property
    def population(self) -> int | None:
        """How many clients there are, if the file says."""
        return len(self.rounds.members) or self.data.clients

    def check(self) -> None:
        """Raise JobRefused with the reason unless all parts go together."""
        with _refusing("job.name"):
            Keys(self.job.name)
        if self.population is not None and self.population < 1:
            raise JobRefused(f"data.clients must be at least 1, not {self.population}")
        strategy, selection = self.make_strategy(), self.make_selection()
        self.make_scheme()
        if self.compression.download_bits and not 2 <= self.compression.download_bits <= 16:
            raise JobRefused("compression.download_bits must be 0 or 2 to 16")
        self._drawn_rounds()
        self._check_strategy(strategy)
        self._check_selection(selection)
        self._check_population()
        self._check_protection(strategy)
        if self.data.items or (self.data.features and self.data.classes):
            self.make_masked(self.make_model().layout())
        self._check_simulation()
        if self.into.model and self.model.name != "items":
            raise JobRefused(
                f'into: what model {self.model.name} learns is not about items; set model.name = "items"'
            )

    def _check_strategy(self, strategy: Strategy) -> None:
        rounds = self.rounds
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
        if strategy.name == "fedsgd" and (self.training.steps or self.training.epochs or 1) > 1:
            raise JobRefused(
                "fedsgd takes one gradient over all examples: leave training.steps and training.epochs out"
            )
        self._check_training(strategy)
        with _refusing("rounds"):
            Bounds(self._drawn_rounds().most_uploads, strategy.largest_weight)

    def _check_training(self, strategy: Strategy) -> None:
        training = self.training
        if isinstance(strategy, Scaffold) and training.momentum:
            raise JobRefused("scaffold measures its controls on plain steps: set training.momentum = 0")
        if isinstance(strategy, Scaffold) and strategy.population < (self.population or 0):
            raise JobRefused(
                f"scaffold: a population of {strategy.population}, but {self.population} clients"
            )
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

    def _check_selection(self, selection: Selection) -> None:
        if self.rounds.kind == "cross_silo" and not isinstance(selection, Everyone):
            raise JobRefused(
                "cross-silo rounds take every member in every iteration: leave the selection out"
            )
        for rule in getattr(selection, "rules", (selection,)):
            if isinstance(rule, FairnessCap):
                self._check_fairness(rule)
            window_s = self.rounds.update_model_time_window_s
            if isinstance(rule, Capability) and rule.deadline_s > window_s:
                raise JobRefused(
                    f"selection: a deadline of {rule.deadline_s:g} s is beyond the update window of {window_s:g} s"
                )

    def _check_fairness(self, rule: FairnessCap) -> None:
        population, wanted = self.population, self.rounds.thresholds.starts_floor or self.rounds.buffer_size
        if population is not None and population * rule.most < wanted * (rule.window + 1):
            raise JobRefused(
                f"fairness lets {population} clients in {rule.most} times in any {rule.window + 1} iterations: "
                f"not enough for {wanted} starts in each"
            )

    def _check_population(self) -> None:
        population, rounds = self.population, self.rounds
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

    def _check_protection(self, strategy: Strategy) -> None:
        scheme = self.make_scheme()
        with _refusing("privacy"):
            require_sound(
                Facts(
                    self.privacy,
                    self.secure_aggregation,
                    strategy.name,
                    strategy.needs,
                    self.rounds.mode,
                    self.selection.name,
                    self.compression.upload,
                    scheme is not None and scheme.shared_support,
                )
            )
        sized = self.data.items or (self.data.features and self.data.classes)
        protection = self.make_protection(self.make_model().layout() if sized else None)
        if isinstance(protection, LocalNoise):
            # Servers refuse larger numbers; a draw beyond 40 scales has a chance below 1e-17.
            largest = Bounds(self.rounds.most_uploads, strategy.largest_weight).magnitude
            if protection.scale * 40.0 + self.privacy.clip > largest:
                raise JobRefused(
                    f"privacy: noise of scale {protection.scale:.4g} passes the largest value {largest:g} that a sum "
                    "of so many uploads may hold: lower privacy.clip or raise privacy.epsilon"
                )
            if protection.scale < _SMALLEST_SCALE:
                raise JobRefused(
                    f"privacy: noise of scale {protection.scale:.4g} is lost in the steps of 2**-{SCALE_BITS} that "
                    "sums have: raise privacy.clip, or lower privacy.epsilon"
                )

    def _check_simulation(self) -> None:
        simulation = self.simulation
        if simulation.engine in ("numpy", "batched") and simulation.device == "cuda":
            raise JobRefused(
                f"simulation: the {simulation.engine} engine has no cuda device; take engine torch"
            )
        if simulation.ray and simulation.device != "cpu":
            raise JobRefused("simulation: over ray cohorts are trained on cpus; set simulation.device = cpu")
        if simulation.threads < 1 or simulation.memory_bytes < 0 or simulation.state_bytes < 0:
            raise JobRefused(
                "simulation: threads must be at least 1, memory_bytes and state_bytes not negative"
            )
        if simulation.availability == "trace" and not simulation.trace:
            raise JobRefused("simulation: availability trace needs the file, simulation.trace")
        if not 0.0 < simulation.patience_s < float("inf"):
            raise JobRefused(f"simulation: patience_s must be a positive number, not {simulation.patience_s}")
        if simulation.checkpoint_every < 0 or simulation.evaluate_every < 0:
            raise JobRefused("simulation: checkpoint_every and evaluate_every must not be negative")
        servers = self.servers
        if not 1 <= servers.part_bytes <= servers.max_body_bytes:
            raise JobRefused("servers: part_bytes must be at least 1 and at most max_body_bytes")

    def to_toml(self) -> str:
        """The job as a file that ``load_job`` reads back the same."""
        tables: dict[str, dict[str, Any]] = {}
        for section in dataclasses.fields(self):
            value = getattr(self, section.name)
            if isinstance(value, Named):
                tables[section.name] = {"name": value.name, **value.options}
            else:
                tables[section.name] = {
                    f.name: getattr(value, f.name) for f in dataclasses.fields(value) if _worth(value, f)
                }
        order = sorted(tables, key=lambda title: title != "job")
        return write_tables({title: tables[title] for title in order})


@lru_cache(maxsize=64)
def _smallest_part(secure: SecureAggregationSection, clients: int) -> int:
    """How many honest devices' noise a sum has at least that a lying server may learn, by telling parts of a cohort of
    ``clients`` different survivors, where each device asks its neighbours alone. Raises PlanRefused."""
    plan = make_plan(secure, clients, 1)
    return smallest_group(clients, secure.colluding, Degree(plan.degree, plan.threshold))


def load_job(source: str | Path | Mapping[str, Any]) -> FederatedJob:
    """The job in a TOML file, or in its tables, checked. Raises JobRefused."""
    job = read_job(source)
    job.check()
    return job


def read_job(source: str | Path | Mapping[str, Any]) -> FederatedJob:
    """As ``load_job``, without the check that its parts go together. Raises JobRefused."""
    tables = source if isinstance(source, Mapping) else _read_file(Path(source))
    sections = {section.name: section for section in dataclasses.fields(FederatedJob)}
    read: dict[str, Any] = {}
    for title, table in tables.items():
        if title not in sections:
            raise JobRefused(unknown(title, list(sections), "the section"))
        with _refusing(""):
            if title in ("model", "strategy", "selection"):
                read[title] = _named(title, table)
            else:
                read[title] = read_section(_KINDS[title], table, title)
    if "rounds" not in read:
        raise JobRefused("the section rounds is missing; it needs start_fl_job_threshold at least")
    return FederatedJob(**read)


_KINDS: Mapping[str, type[Any]] = {
    "rounds": RoundSettings,
    "job": JobSection,
    "data": DataSection,
    "training": LocalTraining,
    "compression": CompressionSection,
    "privacy": PrivacySection,
    "secure_aggregation": SecureAggregationSection,
    "simulation": SimulationSection,
    "servers": ServersSection,
    "into": IntoSection,
}


def _named(title: str, table: object) -> Named:
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
        raise SectionRefused(f"{title} must be a table with a name")
    known = {"strategy": list(STRATEGIES), "selection": list(RULES)}.get(title)
    name = table["name"]
    if known is not None and "+" not in name and name not in known:
        raise SectionRefused(unknown(name, known, f"{title}: the name"))
    return Named(name, {key: value for key, value in table.items() if key != "name"})


def _worth(value: object, f: dataclasses.Field[Any]) -> bool:
    """Whether a field is worth a line: it is not what it would be without one."""
    default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
    return f.init and bool(getattr(value, f.name) != default)


def _read_file(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise JobRefused(
            f"{path} cannot be read: {error.strerror}; `headwater fl simulate -h` shows how to make one"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise JobRefused(f"{path} is not TOML: {error}") from error


@contextmanager
def _refusing(where: str) -> Iterator[None]:
    """What a part refuses is refused by the job, with the part's name before it."""
    try:
        yield
    except JobRefused:
        raise
    except ValueError as error:
        raise JobRefused(f"{where}: {error}" if where else str(error)) from error
