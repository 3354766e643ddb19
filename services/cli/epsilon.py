"""``headwater fl epsilon``: which ε some noise gives, which noise an ε takes, or how many rounds both allow."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from services.cli.context import Options
from services.cli.exits import Exit
from services.cli.failures import CommandFailed

if TYPE_CHECKING:
    from federated.privacy.accounting_statement import Exposure
    from federated.privacy.planning import Question


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("epsilon")(epsilon_)


def epsilon_(
    context: typer.Context,
    mechanism: Annotated[
        str,
        typer.Option(
            help="central_gaussian, distributed_gaussian, distributed_skellam, local_gaussian, local_laplace or signds."
        ),
    ] = "central_gaussian",
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
    delta: Annotated[float, typer.Option(help="Below one over the number of clients.")] = 1e-5,
    rate: Annotated[
        float, typer.Option(help="Share of clients that selection poisson draws; 1: all who come.")
    ] = 1.0,
    clients: Annotated[int | None, typer.Option(min=1, help="How many there are: checks delta.")] = None,
    weights: Annotated[
        int, typer.Option(min=0, help="Of the model, distributed mechanisms: `fl list` shows them.")
    ] = 0,
    honest: Annotated[
        int,
        typer.Option(
            min=0,
            help="Devices in each sum that are honest, distributed mechanisms: uploads less those that collude.",
        ),
    ] = 0,
) -> None:
    """Say what noise costs, before any job: give two of --rounds, --noise and --epsilon, and the third is found.

    The numbers are those of jobs' own accounting. What is printed last goes into the job's file.
    """
    from federated.privacy.accounting_statement import statement
    from federated.privacy.planning import Question, noise_for, rounds_within
    from federated.privacy.section import LOCAL, Mechanism
    from federated.sections import unknown
    from services.cli.output import note, print_json

    options: Options = context.obj
    known = [name for name in get_args(Mechanism) if name != "none"]
    if mechanism not in known:
        raise CommandFailed(Exit.USAGE, unknown(mechanism, known, "--mechanism"))
    local = mechanism in LOCAL
    if (noise if local else report_epsilon) is not None:
        ours, other = ("--report-epsilon", "--noise") if local else ("--noise", "--report-epsilon")
        raise CommandFailed(Exit.USAGE, f"{mechanism} takes {ours}, not {other}")
    amount = report_epsilon if local else noise
    if [rounds, epsilon, amount].count(None) != 1:
        ours = "--report-epsilon" if local else "--noise"
        raise CommandFailed(Exit.USAGE, f"give two of --rounds, --epsilon and {ours}: the third is found")
    try:
        question = Question(cast("Mechanism", mechanism), delta, rate, weights, honest, clients)
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
                "rate": rate,
                **found.as_json(),
            }
        )
        return
    spent = "no bound" if found.epsilon_at_end is None else f"epsilon {found.epsilon_at_end:.4g}"
    what = f"epsilon {amount:g} a report" if local else f"noise multiplier {amount:g}"
    print(
        f"{mechanism}, {what}, {rounds} {'reports of a client' if local else 'rounds'}"
        f"{f' at rate {rate:g}' if rate < 1.0 else ''}: {spent} at delta {delta:g} ({found.accountant})"
    )
    print(f"against {found.adversary}; per {found.unit}\n")
    print(_tables(question, exposure, epsilon))
    for warning in found.warnings:
        note(f"warning: {warning}")


def _tables(question: Question, exposure: Exposure, budget: float | None) -> str:
    """The lines of the job's file."""
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
        tables["secure_aggregation"] = {"protocol": "secagg+"}
    return write_tables(tables)
