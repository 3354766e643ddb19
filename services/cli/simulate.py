"""``headwater fl simulate``: a federation on this machine, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from services.cli.context import Options
from services.cli.exits import Exit
from services.cli.failures import CommandFailed
from services.cli.job_keys import KEYS_STEP

if TYPE_CHECKING:
    from federated.data import Federation
    from federated.job import FederatedJob
    from federated.privacy.accounting_statement import PrivacyStatement
    from federated.simulator.build import Built
    from federated.simulator.simulation import Row
    from services.simulation.report import Table

PICTURE: Final = "simulation.png"
FIGURES: Final = "simulation.json"
TABLE: Final = "simulation.csv"
JOB: Final = "job.toml"
WEIGHTS: Final = "model.npz"
SHOWN: Final = 15
"""Rows of the live table."""


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("simulate")(simulate)


def simulate(
    context: typer.Context,
    job: Annotated[
        Path | None,
        typer.Option(
            "--job", metavar="FILE", help="A job's file (TOML; `headwater fl keys`); flags go before it."
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="digits (if nothing is said), breast-cancer, ml-100k, or a file or folder of data."
        ),
    ] = None,
    clients: Annotated[int | None, typer.Option(min=1, help="How many clients.")] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            help="Who holds what: iid, dirichlet:0.1, dirichlet_equal:0.1, label:2, shards:2, quantity:1.2, user."
        ),
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="Of --partition dirichlet.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Iterations (20).")] = None,
    cohort: Annotated[
        int | None, typer.Option(min=1, help="Clients that start an iteration (a tenth, 10 to 100).")
    ] = None,
    ratio: Annotated[float | None, typer.Option(help="Share of them whose uploads close it (.8).")] = None,
    mode: Annotated[str | None, typer.Option(help="sync, over_selection or buffered.")] = None,
    strategy: Annotated[str | None, typer.Option(help="fedavg, fedprox, scaffold, fedadam, ...")] = None,
    model: Annotated[str | None, typer.Option(help="perceptron, softmax, text or items.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over a client's rows.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Local steps, instead of epochs.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=0, help="Rows of a step; 0: all.")] = None,
    rate: Annotated[float | None, typer.Option(help="Local learning rate.")] = None,
    compression: Annotated[
        str | None, typer.Option(help='Of uploads, as in "top_k:0.03,quantise:1,deflate".')
    ] = None,
    download_bits: Annotated[
        int | None,
        typer.Option(help="Bits of downloaded weights (2 to 25), sent as differences; 0: float32."),
    ] = None,
    dropout: Annotated[float | None, typer.Option(help="Share of starts that never upload.")] = None,
    stragglers: Annotated[float | None, typer.Option(help="Share of starts that are slow.")] = None,
    engine: Annotated[str | None, typer.Option(help="auto, batched, torch or numpy (the reference).")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (engine torch).")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Cores in use.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Decides all that is drawn.")] = None,
    with_: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="SECTION.KEY=VALUE",
            help="Set any key of the job's file (`headwater fl keys`). May be repeated.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FOLDER", help=f"Write {JOB}, {FIGURES}, {TABLE}, {PICTURE}, {WEIGHTS} there."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoint in --out, with the job's file there.")
    ] = False,
) -> None:
    """Train a model over many simulated clients, with the rounds of the real servers in virtual time.

    The same seed gives the same bits. With --out, a run that was interrupted goes on with --resume. The job's file
    that is written runs on real servers, too (`headwater fl serve`).
    """
    import os
    import tempfile

    from services.cli.output import note, print_json, print_table
    from services.processes import limit_threads
    from services.simulation.report import Table, summary

    options: Options = context.obj
    # Before NumPy loads: the engine's threads take whole chunks, a product needs no threads of its own.
    limit_threads(os.environ)
    if resume and out is None:
        raise CommandFailed(Exit.USAGE, "--resume needs the folder", "Add --out FOLDER.")
    if alpha is not None:
        if partition not in (None, "dirichlet"):
            raise CommandFailed(Exit.USAGE, f"--alpha is of --partition dirichlet, not of {partition}")
        partition = f"dirichlet:{alpha!r}"
    if resume and job is None and out is not None and (out / JOB).exists():
        job = out / JOB  # else it was killed before it wrote one: nothing to go on from
    flags = {
        "data.name": dataset, "data.clients": clients, "data.partition": partition,
        "rounds.fl_iteration_num": rounds, "rounds.start_fl_job_threshold": cohort,
        "rounds.update_model_ratio": ratio, "rounds.mode": mode,
        "strategy.name": strategy, "model.name": model,
        "training.epochs": epochs, "training.steps": steps, "training.batch_size": batch_size,
        "training.rate": rate,
        "compression.upload": compression, "compression.download_bits": download_bits,
        "simulation.habits.dropout": dropout, "simulation.habits.stragglers": stragglers,
        "simulation.engine": engine, "simulation.device": device, "simulation.threads": threads,
        "job.seed": seed,
    }  # fmt: skip
    with _refusals(), ExitStack() as stack:
        wanted, federation = _prepare(job, flags, with_ or [])
        folder = out if out is not None else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trace = _trace(wanted)
        _make(folder)
        built, first = _build(wanted, federation, folder, trace, keep=out is not None)
        stack.callback(built.simulation.close)
        if resume and not built.simulation.resume():
            note(f"there is no checkpoint in {folder}: starting from the beginning")
        if out is not None:
            _keep_job(wanted, folder)
        masked = wanted.make_masked(built.model.layout())
        if masked is not None:
            for text in masked.plan.describe():
                note(text)
        private = wanted.privacy.mechanism != "none"
        if private:
            for text in _statement(built, wanted, spent=0).lines():
                note(text)
        table = Table(private, wanted.privacy.mechanism != "signds", wanted.model.name == "items")
        with _showing(options.json, wanted.rounds.fl_iteration_num, table) as show:
            for row in built.simulation.rows[-SHOWN:]:
                show(row)
            for row in built.simulation.run():
                show(row)
        found = _report(built, wanted, federation, first)
        if out is not None:
            _write(found, built, folder)
            written = ", ".join(str(folder / name) for name in (JOB, FIGURES, TABLE, PICTURE, WEIGHTS))
            note(f"wrote {written}")
        if options.json:
            print_json(found)
        else:
            rows = built.simulation.rows
            if not rows:
                return
            print_table(table.columns(), [table.cells(row) for row in rows[-SHOWN:]])
            print(table.legend())
            if private:
                print(_statement(built, wanted).lines(over=True)[0])
            if built.simulation.world.spent:
                print("it ended early: too few clients have privacy budget left for another iteration")
            most = built.simulation.world.desk.rounds.settings.most_releases
            if most and rows[-1].iteration < wanted.rounds.fl_iteration_num:
                print(f"it ended early: after {most} releases another would exceed privacy.budget_epsilon")
            for line in summary(rows, found["final"]):
                print(line)


def _prepare(
    path: Path | None, flags: dict[str, Any], assignments: list[str]
) -> tuple[FederatedJob, Federation]:
    import os

    from services.cli.output import note
    from services.datasets.download import user_cache
    from services.datasets.federations import open_federation
    from services.simulation.settings import (
        complete,
        data_section,
        job_section,
        put,
        read_assignments,
        read_tables,
        reread,
    )

    tables = read_tables(path)
    if flags["training.steps"] is not None:
        tables.get("training", {}).pop("epochs", None)
    if flags["training.epochs"] is not None:
        tables.get("training", {}).pop("steps", None)
    put(tables, flags)
    put(tables, read_assignments(assignments))
    data, seed = data_section(tables), job_section(tables).seed
    more: dict[str, Any] = {} if data.context is None else {"context": data.context}
    if data.view is not None:
        more["view"] = data.view
    elif tables.get("model", {}).get("name") == "items":
        more["view"] = "liked"  # the only one that it learns from
    federation, notes = open_federation(
        data.name,
        user_cache(os.environ),
        clients=data.clients,
        seed=seed,
        partition=data.partition,
        **more,
    )
    for text in notes:
        note(text)
    return reread(complete(tables, federation)), federation


def _build(
    job: FederatedJob, federation: Federation, folder: Path, trace: str | None, *, keep: bool
) -> tuple[Built, Any]:
    from federated.simulator.build import build, first_weights
    from services.simulation.evaluate import evaluator

    built = build(
        job,
        federation,
        folder,
        trace=trace,
        evaluate=evaluator(federation, job.job.seed),
        checkpoints=keep,
    )
    return built, first_weights(built.simulation)


def _trace(job: FederatedJob) -> str | None:
    if job.simulation.availability != "trace" or job.simulation.trace is None:
        return None
    try:
        return Path(job.simulation.trace).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailed(
            Exit.BAD_INPUT, f"the availability trace {job.simulation.trace} cannot be read: {error}"
        ) from error


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandFailed(Exit.USAGE, f"{folder} cannot be written to: {error.strerror}") from error


def _keep_job(job: FederatedJob, folder: Path) -> None:
    from federated.simulator.checkpoints import write_whole

    write_whole(folder / JOB, job.to_toml().encode())  # --resume reads it, whenever this run is killed


def _report(built: Built, job: FederatedJob, federation: Federation, first: Any) -> dict[str, Any]:
    import tomllib

    from services.simulation.evaluate import final_evaluation
    from services.simulation.report import document

    rows = built.simulation.rows
    trained = sum(row.trained for row in rows)
    final = final_evaluation(
        federation,
        built.model,
        first,
        built.simulation.weights,
        job.training,
        trained / federation.clients,
        job.job.seed,
    )
    data = {
        "name": federation.name,
        "source": federation.source,
        "clients": federation.clients,
        "features": federation.features,
        "classes": federation.classes,
        "training_rows": int(federation.counts.sum()),
        "held_out_rows": int(federation.held_out.sizes.sum()),
        "test_rows": len(federation.test_labels),
    }
    private = job.privacy.mechanism != "none"
    privacy = _statement(built, job).as_json() if private else None
    return document(tomllib.loads(job.to_toml()), data, built.engine, rows, final, privacy)


def _statement(built: Built, job: FederatedJob, spent: int | None = None) -> PrivacyStatement:
    """What the job's protection is worth after ``spent`` releases; left out: now."""
    from federated.privacy.accounting_statement import statement

    if spent is None:
        spent = _releases(built, job)
    return statement(job.exposure(built.model.layout().trained, simulated=True), spent)


def _releases(built: Built, job: FederatedJob) -> int:
    """How often at most one client was exposed so far."""
    from federated.privacy.section import LOCAL

    world = built.simulation.world
    if job.privacy.mechanism in LOCAL:
        return int(world.reports.max(initial=0))
    return world.desk.header().releases


def _write(found: dict[str, Any], built: Built, folder: Path) -> None:
    import json

    import numpy as np

    from services.simulation.picture import draw
    from services.simulation.report import csv_of

    job = found["job"]
    title = (
        f"{job.get('strategy', {}).get('name', 'fedavg')} on {found['data']['name']}, "
        f"{found['data']['clients']:,} clients"
    )
    (folder / FIGURES).write_text(json.dumps(found, indent=2, allow_nan=False))
    (folder / TABLE).write_text(csv_of(built.simulation.rows))
    draw(built.simulation.rows, found["final"], title, folder / PICTURE)
    np.savez(folder / WEIGHTS, **built.model.layout().unflatten(built.simulation.weights))  # type: ignore[arg-type]


@contextmanager
def _showing(json: bool, iterations: int, table: Table) -> Iterator[Callable[[Row], None]]:
    """Shows rows as they come: a live table on a terminal, lines elsewhere; on standard error beside JSON."""
    import sys

    from services.cli.output import Lines

    stream = sys.stderr if json else sys.stdout
    if not stream.isatty():
        now_and_then = Lines()
        yield (
            (lambda row: now_and_then(f"iteration {row.iteration} of {iterations}"))
            if json
            else (lambda row: print(table.line(row), flush=True))
        )
        return
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table as LiveTable

    shown: list[Row] = []
    with Live(console=Console(file=stream), refresh_per_second=8, transient=True) as live:

        def show(row: Row) -> None:
            shown.append(row)
            del shown[:-SHOWN]
            drawn = LiveTable(
                *table.columns(),
                box=None,
                pad_edge=False,
                title=f"iteration {row.iteration} of {iterations}",
            )
            for one in shown:
                drawn.add_row(*table.cells(one))
            live.update(drawn)

        yield show


@contextmanager
def _refusals() -> Iterator[None]:
    """What the simulator refuses, with the exit code that says what to do."""
    from federated.job_sections import JobRefused
    from federated.simulator.arrivals import NobodyComes
    from federated.simulator.checkpoints import CheckpointRefused
    from federated.simulator.states import StatesFull

    try:
        yield
    except JobRefused as error:
        raise CommandFailed(
            Exit.SETTINGS, str(error), f"Mend the job's file or the flag; {KEYS_STEP}"
        ) from error
    except CheckpointRefused as error:
        raise CommandFailed(Exit.BAD_INPUT, str(error), "Leave --resume out to begin anew.") from error
    except (NobodyComes, StatesFull) as error:
        raise CommandFailed(Exit.CHECK_FAILED, str(error)) from error
