"""``headwater fl epsilon``: which ε some noise gives, which noise an ε takes, or how many rounds both allow."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from services.cli.context import Options
from services.cli.exits import Exit
from services.cli.failures import CommandFailed
from services.cli.job_keys import KEYS_STEP

if TYPE_CHECKING:
    from federated.job import FederatedJob
    from federated.privacy.accounting_statement import Exposure
    from federated.privacy.planning import Question
    from federated.privacy.section import Mechanism, PrivacySection


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("epsilon")(epsilon_)


def epsilon_(
    context: typer.Context,
    mechanism: Annotated[
        str | None,
        typer.Option(
            help="central_gaussian (if nothing is said), distributed_gaussian, distributed_skellam, local_gaussian, "
            "local_laplace or signds."
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, max=2**20, help="Iterations; of local mechanisms, reports of one client."),
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="Of all rounds together.")] = None,
    noise: Annotated[
        float | None,
        typer.Option(help="Noise multiplier: standard deviation of the sum's noise over the clip."),
    ] = None,
    report_epsilon: Annotated[
        float | None, typer.Option(help="Epsilon of one report, local mechanisms (in place of --noise).")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Below one over the number of clients (1e-5).")] = None,
    rate: Annotated[
        float | None, typer.Option(help="Share of clients that selection poisson draws; 1: all who come (1).")
    ] = None,
    clients: Annotated[int | None, typer.Option(min=1, help="How many there are: checks delta.")] = None,
    weights: Annotated[
        int | None, typer.Option(min=1, help="Of the model, distributed mechanisms: `fl list` shows them.")
    ] = None,
    honest: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Devices in each sum that are honest, distributed mechanisms: uploads less those that collude.",
        ),
    ] = None,
    job: Annotated[
        Path | None,
        typer.Option("--job", metavar="FILE", help="A job's file (TOML): what it says need not be given."),
    ] = None,
) -> None:
    """Say what noise costs, before any job: give two of --rounds, --noise and --epsilon, and the third is found.

    With --job what is not given is what that job says. The numbers are those of jobs' own accounting. What is printed
    last goes into the job's file.
    """
    from federated.privacy.accounting_statement import statement
    from federated.privacy.planning import noise_for, rounds_within
    from federated.privacy.section import LOCAL
    from services.cli.output import note, print_json

    options: Options = context.obj
    given = {"delta": delta, "rate": rate, "weights": weights, "honest": honest, "clients": clients}
    known = {name: value for name, value in given.items() if value is not None}
    told = None if job is None else _told(job, mechanism)
    mechanism = _mechanism(mechanism or (None if told is None else told.privacy.mechanism))
    local = mechanism in LOCAL
    if (noise if local else report_epsilon) is not None:
        ours, other = ("--report-epsilon", "--noise") if local else ("--noise", "--report-epsilon")
        raise CommandFailed(Exit.USAGE, f"{mechanism} takes {ours}, not {other}")
    amount = report_epsilon if local else noise
    if told is not None:
        if rounds is None and (epsilon is None or amount is None):
            rounds = told.rounds.fl_iteration_num
        if amount is None and epsilon is None:
            amount = _amount(told.privacy)
    if [rounds, epsilon, amount].count(None) != 1:
        ours = "--report-epsilon" if local else "--noise"
        raise CommandFailed(Exit.USAGE, f"give two of --rounds, --epsilon and {ours}: the third is found")
    try:
        question = _question(mechanism, told, known)
        if amount is None:
            assert epsilon is not None
            assert rounds is not None
            amount = noise_for(question, epsilon, rounds)
        elif rounds is None:
            assert epsilon is not None
            rounds = rounds_within(question, amount, epsilon)
        assert rounds is not None
        exposure = question.exposure(amount, rounds)
        found = statement(exposure, rounds)
    except ValueError as error:  # of planning, of accounting, of a budget that affords nothing
        raise CommandFailed(Exit.USAGE, str(error)) from error
    if options.json:
        print_json(
            {
                "rounds": rounds,
                "report_epsilon" if local else "noise": amount,
                "rate": question.rate,
                **found.as_json(),
            }
        )
        return
    spent = "no bound" if found.epsilon_at_end is None else f"epsilon {found.epsilon_at_end:.4g}"
    what = f"epsilon {amount:g} a report" if local else f"noise multiplier {amount:g}"
    print(
        f"{mechanism}, {what}, {rounds} {'reports of a client' if local else 'rounds'}"
        f"{f' at rate {question.rate:g}' if question.rate < 1.0 else ''}: {spent} at delta {question.delta:g} "
        f"({found.accountant})"
    )
    print(f"against {found.adversary}; per {found.unit}\n")
    protocol = None if told is None else told.secure_aggregation.protocol
    print(_tables(question, exposure, epsilon, "secagg+" if protocol in (None, "none") else protocol))
    for warning in found.warnings:
        note(f"warning: {warning}")


def _mechanism(name: str | None) -> Mechanism:
    from federated.privacy.section import Mechanism
    from federated.sections import unknown

    if name is None:
        return "central_gaussian"
    known = [one for one in get_args(Mechanism) if one != "none"]
    if name not in known:
        raise CommandFailed(Exit.USAGE, unknown(name, known, "--mechanism"))
    return cast("Mechanism", name)


def _told(file: Path, mechanism: str | None) -> FederatedJob:
    """The job in ``file``, with another ``mechanism`` if that is given, and the size of its model."""
    from federated.job import read_job
    from federated.job_sections import JobRefused
    from federated.privacy.section import DISTRIBUTED
    from services.cli.rounds import with_shape

    try:
        job = read_job(file)
    except JobRefused as error:
        raise CommandFailed(Exit.BAD_INPUT, str(error), f"Mend the job's file; {KEYS_STEP}") from error
    if mechanism is not None:
        job = replace(job, privacy=replace(job.privacy, mechanism=_mechanism(mechanism)))
    if job.privacy.mechanism == "none":
        raise CommandFailed(Exit.USAGE, f"{file} names no mechanism", "Say which: --mechanism.")
    # Only noise that the devices add together depends on the model's size.
    return with_shape(job) if job.privacy.mechanism in DISTRIBUTED else job


def _question(mechanism: Mechanism, told: FederatedJob | None, known: dict[str, Any]) -> Question:
    """What is asked: by the job that was ``told``, and by ``known`` flags before it. Raises ValueError."""
    from federated.privacy.planning import Question
    from federated.privacy.section import DISTRIBUTED

    if told is None:
        return Question(mechanism, **known)
    weights = known.get("weights", 0)
    if mechanism in DISTRIBUTED and not weights:
        weights = told.make_model().layout().trained
    return replace(told.question(weights), **known)


def _amount(section: PrivacySection) -> float:
    """The noise of a job: the multiplier, or of local mechanisms a report's epsilon."""
    from federated.privacy.budget import pure_epsilon_of
    from federated.privacy.section import LOCAL

    if section.mechanism == "signds":
        return pure_epsilon_of(section)
    return section.epsilon if section.mechanism in LOCAL else section.noise_multiplier


def _tables(question: Question, exposure: Exposure, budget: float | None, protocol: str) -> str:
    """The lines of the job's file; distributed noise needs a ``protocol`` of secure aggregation."""
    from federated.privacy.planning import STEP_BITS
    from federated.privacy.section import DISTRIBUTED, PrivacySection
    from federated.sections import write_tables

    section, usual = exposure.section, PrivacySection()
    names = [field.name for field in fields(PrivacySection)]
    privacy: dict[str, Any] = {
        name: getattr(section, name) for name in names if getattr(section, name) != getattr(usual, name)
    }
    if budget is not None:
        privacy["budget_epsilon"] = budget
    tables: dict[str, dict[str, Any]] = {"privacy": privacy}
    if question.rate < 1.0:
        tables["selection"] = {"name": "poisson", "rate": question.rate}
    if question.mechanism == "signds":
        tables["strategy"] = {"name": "signds"}
    if question.mechanism in DISTRIBUTED:
        tables["secure_aggregation"] = {"protocol": protocol}
        if question.step_bits != STEP_BITS:
            tables["secure_aggregation"]["step_bits"] = question.step_bits
    return write_tables(tables)
