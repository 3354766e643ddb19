"""``headwater model``: what the models' parameters take, and where they are."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import shards
from services.cli.context import Options
from services.cli.exits import Exit
from services.cli.failures import CommandFailed
from services.cli.groups import group

if TYPE_CHECKING:
    from services.coordination.contract import Coordination
    from services.parameter_server.client.summary import ModelSummary, TableSummary
    from services.parameter_server.declarations import Declaration

app = group("Show what the models' parameters take and where they are; move them between servers.")
app.add_typer(shards.app, name="shards")


@app.command("describe")
def describe(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="This model alone.")] = None,
) -> None:
    """Show each model's tables: rows, bytes, optimiser, admission, expiry, and what pushes did to them.

    Leaders alone are counted, so replicas do not count twice. Totals begin anew where a shard gets another leader.
    """
    from services.cli.output import note, print_json
    from services.cli.parameters import answered, surveying
    from services.parameter_server.client.summary import summarise_model

    options: Options = context.obj
    with surveying(options.settings()) as surveyor:
        survey = answered(surveyor)
        declared = _declared(surveyor.store, model)
    found = [summarise_model(declaration, survey) for declaration in declared]
    if options.json:
        print_json({"models": [asdict(one) for one in found], "silent": survey.silent})
        return
    for number, one in enumerate(found):
        print("\n" if number else "", end="")
        _print_model(one)
    if survey.silent:
        note(f"no answer from {', '.join(survey.silent)}")


def _declared(store: Coordination, model: str | None) -> list[Declaration]:
    from services.parameter_server.declarations import read_declarations

    declared = read_declarations(store)
    if not declared:
        raise CommandFailed(
            Exit.NOT_READY, "no model is declared yet", "A trainer declares its model when it starts."
        )
    found = [one for one in declared if model in (None, one.model)]
    if not found:
        names = ", ".join(one.model for one in declared)
        raise CommandFailed(Exit.USAGE, f"no model {model} is declared", f"Declared are: {names}.")
    return found


def _print_model(model: ModelSummary) -> None:
    from services.cli.output import print_table
    from services.cli.parameters import size

    servers = ", ".join(f"{server} ({len(led)})" for server, led in model.servers.items()) or "nobody"
    print(f"{model.name}   schema {model.fingerprint}   {model.shards} shards led by {servers}")
    if model.missing:
        print(f"without an answer from the leader of shards {', '.join(map(str, model.missing))}")
    pushes = model.pushes
    print(
        f"{model.rows:,} rows: embeddings {size(model.embedding_bytes)}, dense {size(model.dense_bytes)}; "
        f"{size(model.allocated_bytes)} allocated"
    )
    print(
        f"pushes: {pushes.applied_total:,} applied, {pushes.duplicate_total:,} repeated, "
        f"{pushes.gap_total:,} too early, {pushes.refused_total:,} refused, {pushes.stale_total:,} stale"
    )
    if model.last_refusal:
        print(f"last refusal: {model.last_refusal}")
    print()
    columns = ("table", "kind", "dim", "rows", "row bytes", "allocated", "touched a push")
    print_table(columns, [_sizes(table) for table in model.tables])
    print()
    learned = ("table", "optimiser", "rate", "l2", "clip", "guard", "usual norm")
    kept = ("admission", "waiting", "not admitted", "expiry", "expired", "graves")
    print_table((*learned, *kept), [_upkeep(table) for table in model.tables])


def _sizes(table: TableSummary) -> tuple[object, ...]:
    from services.cli.parameters import size

    touched = "" if table.touched_share is None else f"{100 * table.touched_share:.3g} %"
    rows, allocated = size(table.row_bytes), size(table.allocated_bytes)
    return (table.name, table.kind, table.dim, f"{table.rows:,}", rows, allocated, touched)


def _upkeep(table: TableSummary) -> tuple[object, ...]:
    return (
        table.name,
        table.optimiser,
        f"{table.rate:g}",
        f"{table.l2:g}" if table.l2 else "none",
        f"{table.clip:g}" if table.clip else "none",
        f"{table.guard:g} x" if table.guard else "none",
        f"{table.norm:.3g}",
        table.admission,
        f"about {table.waiting:,}" if table.admission > 1 else "",
        f"{table.unadmitted_rows_total:,}",
        f"{table.expiry_s:,} s" if table.expiry_s else "never",
        f"{table.expired_rows_total:,}",
        f"{table.graves:,}",
    )
