"""A federated job as one file: it runs in the simulator and, unchanged, on real servers.

    JobRefused (ValueError)     the file cannot be read, a key or value is wrong, or parts do not go together

Sections: job, model, data, training, strategy, rounds, selection, compression, privacy, secure_aggregation,
simulation, servers, into. Those of models, strategies and selection hold a ``name`` and whatever options that one has.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from federated.compression import Grid, Scheme, make_scheme
from federated.device import LocalTraining
from federated.job_checks import check_population, check_selection, check_simulation, check_strategy
from federated.job_sections import (
    KINDS,
    CompressionSection,
    DataSection,
    IntoSection,
    JobRefused,
    JobSection,
    Named,
    ServersSection,
    SimulationSection,
    refusing,
    unknown_section,
)
from federated.layout import Layout
from federated.models import Model, make_model
from federated.privacy.accounting_statement import Exposure, most_releases
from federated.privacy.calibration import DistributedNoise, fewest_honest
from federated.privacy.mechanisms import make_protection
from federated.privacy.noised import Circumstances, LocalNoise
from federated.privacy.planning import Question
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
    Poisson,
    Selection,
    earned_sampling,
    make_selection,
)
from federated.strategies import (
    STRATEGIES,
    AdaptiveFrequency,
    FedNova,
    SignVotes,
    Strategy,
    make_strategy,
)
from federated.sums import SCALE_BITS, Bounds

_SMALLEST_SCALE = 2.0 ** (10 - SCALE_BITS)


@dataclass(frozen=True, slots=True)
class FederatedJob:
    """All of a job. ``load_job`` reads and checks one."""

    rounds: RoundSettings
    job: JobSection = field(default_factory=JobSection)
    model: Named = field(default=Named("perceptron"))
    data: DataSection = field(default_factory=DataSection)
    training: LocalTraining = field(default_factory=LocalTraining)
    strategy: Named = field(default=Named("fedavg"))
    selection: Named = field(default=Named("everyone"))
    compression: CompressionSection = field(default_factory=CompressionSection)
    privacy: PrivacySection = field(default_factory=PrivacySection)
    secure_aggregation: SecureAggregationSection = field(default_factory=SecureAggregationSection)
    simulation: SimulationSection = field(default_factory=SimulationSection)
    servers: ServersSection = field(default_factory=ServersSection)
    into: IntoSection = field(default_factory=IntoSection)

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
        with refusing("model"):
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
        with refusing("strategy"):
            return make_strategy(self.strategy.name, **options)

    def make_selection(self) -> Selection:
        """Who may train. Raises JobRefused."""
        with refusing("selection"):
            return make_selection(self.selection.name, **self.selection.options)

    def make_scheme(self) -> Scheme | None:
        """How uploads are compressed, None for not at all; SignDS's reports have a form of their own. Raises
        JobRefused."""
        if self.privacy.mechanism == "signds":
            return reports_of(self.privacy)
        with refusing("compression.upload"):
            return make_scheme(self.compression.upload) if self.compression.upload else None

    def make_grid(self, layout: Layout) -> Grid | None:
        """How downloads are, None for whole models in float32. Raises JobRefused."""
        with refusing("compression.download_bits"):
            bits = self.compression.download_bits
            return Grid.for_layout(layout, bits) if bits else None

    def make_protection(self, layout: Layout | None = None) -> Protection:
        """How clients are protected, at the device and at the server. Raises JobRefused, also for a ``layout`` that
        the mechanism does not protect."""
        with refusing("privacy"):
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
            with refusing("privacy"):
                honest = fewest_honest(thresholds.uploads_floor, thresholds.starts_close, secure.colluding)
            if secure.protocol == "secagg+" and secure.malicious:
                with refusing("secure_aggregation"):
                    honest = min(honest, _smallest_part(secure, thresholds.starts_close))
        masked = secure.protocol != "none" or self.privacy.mechanism in DISTRIBUTED
        step_bits = secure.step_bits if masked else SCALE_BITS
        return Circumstances(expected, honest, step_bits)

    def make_masked(self, layout: Layout) -> MaskedUpdates | None:
        """How updates of ``layout`` travel under secure aggregation, with its plan proved; None where they travel
        plain. Raises JobRefused."""
        if self.secure_aggregation.protocol == "none":
            return None
        with refusing("secure_aggregation"):
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
        with refusing("privacy"):
            return dataclasses.replace(drawn, most_releases=most_releases(self.exposure(dimension)))

    def exposure(self, dimension: int, *, simulated: bool = False) -> Exposure:
        """What the protection of models of D trained weights costs. Raises JobRefused."""
        noise = None
        if self.privacy.mechanism in DISTRIBUTED:
            with refusing("privacy"):
                noise = DistributedNoise.of(
                    self.privacy,
                    dimension=dimension,
                    step_bits=self.secure_aggregation.step_bits,
                    honest=self._circumstances().honest,
                )
        rate, advice = self._earned_rate()
        if self.privacy.mechanism == "signds" and dimension * self.privacy.sign_k >= 1.0:
            with refusing("privacy"):
                advice = step_warning(self.privacy, dimension, self.rounds.thresholds.uploads_close)
        return Exposure(
            self.privacy,
            self.rounds.fl_iteration_num,
            rate,
            self.population,
            noise,
            simulated,
            () if advice is None else (advice,),
            self.secure_aggregation.protocol != "none",
        )

    def question(self, dimension: int) -> Question:
        """What planning the noise of the job rests on, for models of D trained weights (0 unless the mechanism is
        distributed). Raises JobRefused."""
        distributed = self.privacy.mechanism in DISTRIBUTED
        rate, _ = self._earned_rate()
        with refusing("privacy"):
            return Question(
                self.privacy.mechanism,
                self.privacy.budget_delta,
                rate,
                dimension,
                self._circumstances().honest if distributed else 0,
                self.population,
                self.privacy,
                self.secure_aggregation.step_bits,
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
                f"an iteration needs {fewest} clients of the {expected:g} that are drawn on average, and is invalid "
                f"when fewer are: if many of data.clients {population} cannot be reached, that it was valid tells who "
                "was drawn, and epsilon is too low; lower rounds.start_fl_job_threshold (--cohort)"
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
        with refusing("rounds"):
            return dataclasses.replace(self.rounds, sampled=self.population)

    @property
    def population(self) -> int | None:
        """How many clients there are, if the file says."""
        return len(self.rounds.members) or self.data.clients

    def check(self) -> None:
        """Raise JobRefused with the reason unless all parts go together."""
        with refusing("job.name"):
            Keys(self.job.name)
        if self.population is not None and self.population < 1:
            raise JobRefused(f"data.clients must be at least 1, not {self.population}")
        strategy, selection = self.make_strategy(), self.make_selection()
        self.make_scheme()
        if self.compression.download_bits and not 2 <= self.compression.download_bits <= 16:
            raise JobRefused("compression.download_bits must be 0 or 2 to 16")
        self._drawn_rounds()
        check_strategy(strategy, self.rounds, self.training, self.population)
        with refusing("rounds"):
            Bounds(self._drawn_rounds().most_uploads, strategy.largest_weight)
        check_selection(selection, self.rounds, self.population)
        check_population(self.population, self.rounds)
        self._check_protection(strategy)
        if self.data.items or (self.data.features and self.data.classes):
            self.make_masked(self.make_model().layout())
        check_simulation(self.simulation, self.servers)
        if self.into.model and self.model.name != "items":
            raise JobRefused(
                f'into: what model {self.model.name} learns is not about items; set model.name = "items"'
            )

    def _check_protection(self, strategy: Strategy) -> None:
        scheme = self.make_scheme()
        with refusing("privacy"):
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
            raise JobRefused(unknown_section(title, list(sections)))
        with refusing(""):
            _refuse_sections_within(title, table, set(sections))
            if title in ("model", "strategy", "selection"):
                read[title] = _named(title, table)
            else:
                read[title] = read_section(KINDS[title], table, title)
    if "rounds" not in read:
        raise JobRefused("the section rounds is missing; it needs start_fl_job_threshold at least")
    return FederatedJob(**read)


def _refuse_sections_within(title: str, table: object, sections: set[str]) -> None:
    """Raise SectionRefused for a key of ``table`` that is the name of a section and no key of this one."""
    known = {key.name for key in dataclasses.fields(KINDS[title])} if title in KINDS else {"name"}
    for key, value in table.items() if isinstance(table, Mapping) else ():
        if key in sections - known:
            name = (
                f", with name = {value!r}"
                if isinstance(value, str) and key in ("model", "strategy", "selection")
                else ""
            )
            raise SectionRefused(f"{title}: {key} is no key but a table of its own: [{key}]{name}")


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
