"""``headwater fl vertical``: companies that share users but not features train together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli import answers, vertical_predict
from services.cli.context import Options
from services.cli.exits import Exit
from services.cli.failures import CommandFailed
from services.cli.groups import group

if TYPE_CHECKING:
    from services.vertical.config import PartyConfig

app = group("Companies that share users but not features: train together, answer together.")


@app.command("kinds")
def kinds(context: typer.Context) -> None:
    """List the kinds of joint jobs with their roles and options."""
    from dataclasses import MISSING, fields

    from services.cli.output import print_json, print_table
    from services.vertical.jobs import JobRefused, find_kind, names

    rows: list[tuple[str, str, str, str]] = []
    for name in names():
        try:
            kind = find_kind(name)
        except JobRefused as error:
            rows.append((name, "", "", str(error)))
            continue
        roles = ", ".join(f"{role} {count.least}-{count.most}" for role, count in kind.roles.items())
        options = ", ".join(
            f"{one.name}={one.default!r}" if one.default is not MISSING else one.name
            for one in fields(kind.options)
        )
        rows.append((name, roles, kind.summary, options))
    if context.obj.json:
        print_json([dict(zip(("name", "roles", "summary", "options"), row, strict=True)) for row in rows])
    else:
        print_table(("kind", "parties", "what it does", "options"), rows)


@app.command("keys")
def keys(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="A folder for party.public and party.secret.")],
) -> None:
    """Make a party's key pair, and print the public key that the other parties put into their files."""
    from services.cli.output import print_json
    from services.vertical.keys import make_party_keys

    with _refusals():
        public = make_party_keys(folder).public.hex()
    if context.obj.json:
        print_json({"folder": str(folder), "public": public})
    else:
        print(public)
        print(f"\nThe others put it into their files as peers.NAME.key; the secret stays in {folder}.")


@app.command("example")
def example() -> None:
    """Print a party's file with all that may be in it, to change: `headwater fl vertical example > party.toml`."""
    from services.vertical.example import EXAMPLE

    print(EXAMPLE.read_text(encoding="utf-8"), end="")


@app.command("check")
def check(context: typer.Context) -> None:
    """Check a party's file (--config FILE): keys, table, ids, job, folders, ports, and whether peers answer.

    Nothing of the job is sent, nothing is written. LATER: what may be so when the party begins, such as a peer that
    does not run yet.
    """
    from services.cli.output import print_json
    from services.vertical.checks import check_party

    with _refusals():
        config = _config(context)
        checked = check_party(config)
    table, prepared = checked.table, checked.prepared
    told = {
        "party": config.party.name,
        "role": config.party.role,
        "job": config.job.what,
        "parties": config.roles(),
        "rows": 0 if table is None else len(table),
        "columns": 0 if table is None else len(table.names),
        "state": str(config.party.state if prepared is None else prepared.folder),
    }
    if context.obj.json:
        rows = [
            {"check": one.name, "result": one.result, "detail": one.detail, "next": one.step}
            for one in checked.checks
        ]
        print_json({**told, "checks": rows})
    else:
        parties = ", ".join(f"{name} ({role})" for name, role in config.roles().items())
        for key, value in (told | {"parties": parties}).items():
            print(f"{key:8} {value}")
        print()
        for one in checked.checks:
            print(f"{one.result:5} {one.name}{one.detail and ': '}{one.detail}")
            if one.step:
                print(f"      next: {one.step}")
    if not checked.passed:
        raise CommandFailed(Exit.CHECK_FAILED, "")


@app.command("party")
def party(
    context: typer.Context,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Forget checkpoints and results of this job: all begin anew.")
    ] = False,
) -> None:
    """Take part in a job as the party of --config FILE, until all parties have their results.

    A party that was stopped goes on from the last checkpoint that all parties have, and so do the others.
    """
    import os

    from services.processes import configure_logging, limit_threads

    limit_threads(os.environ)
    from services.cli.output import note, waiting
    from services.vertical.main import STOPPED
    from services.vertical.party import prepare, run_party
    from services.vertical.workers import workers as processes

    with _interrupts(STOPPED), _refusals(), waiting() as line:
        config = _config(context)
        configure_logging(config.party.name)
        with processes(config.party.workers) as several:
            report = run_party(
                prepare(config, several),
                progress=lambda step: line(f"{step.what}: {step.done} of {step.total or '?'}"),
                listening=lambda port: note(f"{config.party.name} listens on port {port}"),
                fresh=fresh,
            )
    _show(context, {"job": config.job.model_dump(mode="json"), "parties": {config.party.name: report}})


@app.command("run")
def run(
    context: typer.Context,
    job: Annotated[str, typer.Argument(help="A kind of job; `headwater fl vertical kinds` lists them.")],
    data: Annotated[
        str,
        typer.Option(
            metavar="FOLDER[/PREFIX]|FILE|sklearn:NAME",
            help="Where the tables are (one with `guest` in its name, others with `host`), or one table to split.",
        ),
    ],
    option: Annotated[
        list[str] | None, typer.Option("--option", metavar="NAME=VALUE", help="Of the job; may be repeated.")
    ] = None,
    psi: Annotated[
        list[str] | None,
        typer.Option("--psi", metavar="NAME=VALUE", help="Of the alignment; may be repeated."),
    ] = None,
    align: Annotated[str, typer.Option(help="psi, or none: rows are in the same order already.")] = "psi",
    test: Annotated[float, typer.Option(min=0.0, max=0.9, help="Part of joint rows to measure on.")] = 0.3,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    coordinator: Annotated[
        bool, typer.Option("--coordinator", help="With one, where the job may have it.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Processes of each party for long work.")] = 1,
    id_column: Annotated[
        str | None, typer.Option("--id", help="The column of ids: `id`, or, of one FILE, rows are numbered.")
    ] = None,
    label: Annotated[str, typer.Option(help="The guest's column of labels.")] = "y",
    hosts: Annotated[int, typer.Option(min=1, max=8, help="How many hosts one table is split for.")] = 1,
    overlap: Annotated[float, typer.Option(min=0.01, max=1.0, help="Part of its rows that all get.")] = 1.0,
    columns: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Of a run of `binning`: each party learns from what it kept."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="For the parties' files; a new one in /tmp if left out."),
    ] = None,
) -> None:
    """Run a whole job on this machine for a trial: each party is a process; then who saw what, and how good it is.

    Pooled models, which need all tables in one place, are trained for comparison at the end.
    """
    import json
    import os
    import tempfile

    from services.cli.output import note, waiting
    from services.processes import limit_threads

    limit_threads(os.environ)
    from services.vertical.jobs import find_kind, settings_of
    from services.vertical.splitting import halves, is_whole, open_whole, write_split
    from services.vertical.trial import (
        FILE,
        find_parties,
        parse_pairs,
        pooled,
        run_trial,
        whole_report,
        with_columns,
        write_files,
    )

    with _interrupts("all parties were ended"), _refusals():
        kind = find_kind(job)
        wanted: dict[str, Any] = {"what": job, "align": align, "seed": seed, "test": test}
        wanted |= {"options": parse_pairs(option or []), "psi": parse_pairs(psi or [])}
        settings_of(wanted)
        folder = out or Path(tempfile.mkdtemp(prefix="headwater-vertical-"))
        if any(folder.glob(f"*/{FILE}")):
            # Before anything of it is written over.
            raise CommandFailed(
                Exit.USAGE, f"{folder} has a trial already", "Name another folder with --out."
            )
        tables = Path(data)
        if is_whole(data):
            whole = open_whole(data, id_column=id_column, label_column=label)
            tables = folder / "tables"
            write_split(whole, tables, halves(whole.names, hosts), overlap=overlap, seed=seed)
            id_column, label = "id", "y"
        parties = find_parties(tables, kind, coordinator=coordinator)
        parties = parties if columns is None else with_columns(parties, columns)
        ids = id_column or "id"
        files = write_files(folder, parties, wanted, id_column=ids, label_column=label, workers=workers)
        with waiting() as line:
            state: dict[str, str] = {}

            def told(name: str, said: dict[str, Any]) -> None:
                if "what" in said:
                    state[name] = f"{name}: {said['what']} {said['done']} of {said['total'] or '?'}"
                    line(" · ".join(state.values()))

            reports = run_trial(files, told)
            line("pooled models, for comparison")
            # Beside what learns nothing that answers there is nothing to compare.
            together = {} if kind.load is None else pooled(files, parties, ids, label)
    report = whole_report(wanted, reports, together)
    (folder / "report.json").write_text(json.dumps(report, indent=2, allow_nan=False), encoding="utf-8")
    note(f"the parties' files, results and the report are in {folder}")
    _show(context, report)


@app.command("serve")
def serve(context: typer.Context) -> None:
    """Answer together with the model that this party trained (--config FILE): a guest over REST, a host to the guest.

    `POST /v1/predictions {"ids": [...]}` asks the hosts; past the deadline the guest's part answers alone, and says so.
    Every party writes down what was asked (audit.jsonl in its state's folder).
    """
    import os
    import threading

    from services.processes import configure_logging, limit_threads, stop_on_signals

    limit_threads(os.environ)
    from services.cli.output import note
    from services.vertical.party import prepare
    from services.vertical.serving.process import serve_party

    stop = threading.Event()
    with _refusals(), stop_on_signals(stop):
        config = _config(context)
        configure_logging(config.party.name)
        serve_party(prepare(config), stop, lambda address: note(f"{config.party.name} answers at {address}"))


@app.command("split")
def split(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A table of your own (CSV with a header, or Parquet), or sklearn:breast_cancer.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="For guest.csv and the hosts' files.")],
    label: Annotated[str, typer.Option(help="The column of labels; the guest gets it.")] = "y",
    id_column: Annotated[
        str | None, typer.Option("--id", help="The column of ids; rows are numbered if left out.")
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=COLUMN,COLUMN",
            help="A host (its name has `host` in it) and its columns; may be repeated.",
        ),
    ] = None,
    hosts: Annotated[int, typer.Option(min=1, max=8, help="How many hosts, where --host is left out.")] = 1,
    overlap: Annotated[float, typer.Option(min=0.01, max=1.0, help="Part of rows that all have.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Cut a table into a guest's and hosts', each in an order of its own, to try `run` on."""
    from services.cli.output import print_json, print_table
    from services.vertical.splitting import halves, open_whole, write_split

    with _refusals():
        table = open_whole(source, id_column=id_column, label_column=label)
        if host:
            wanted = {name: columns.split(",") for name, _, columns in (one.partition("=") for one in host)}
        else:
            wanted = halves(table.names, hosts)
        if bad := [name for name in wanted if "host" not in name or not name.isidentifier()]:
            raise CommandFailed(
                Exit.USAGE, f"{bad[0]!r}: a host's name is a word with `host` in it, so that `run` finds it"
            )
        found = write_split(table, out, wanted, overlap=overlap, seed=seed)
    rows = [(name, str(path), count, columns) for name, (path, count, columns) in found.items()]
    if context.obj.json:
        print_json([dict(zip(("party", "file", "rows", "columns"), row, strict=True)) for row in rows])
    else:
        print_table(("party", "file", "rows", "columns"), rows)


@app.command("report")
def report(
    context: typer.Context,
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...",
            help="A report.json, or a folder with one (a trial's, a party's state); several are compared.",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.md|FILE.html", help="Write it to a file to hand on, instead.")
    ] = None,
) -> None:
    """Show a run's report: how good the model is, how it was protected, and what each party saw; or compare runs."""
    from services.cli.output import note, print_json
    from services.vertical.comparison import compare
    from services.vertical.report import FORMAT, read_reports
    from services.vertical.report_file import SUFFIXES, rendered

    if output is not None and output.suffix not in SUFFIXES:
        raise CommandFailed(Exit.USAGE, f"--output {output}: a file's name ends in {' or '.join(SUFFIXES)}")
    with _refusals():
        found = {str(path): read_reports(path) for path in paths}
    if output is not None:
        try:
            output.write_text(rendered(found, output.suffix), encoding="utf-8")
        except OSError as error:
            raise CommandFailed(Exit.BAD_INPUT, f"{output} cannot be written: {error.strerror}") from error
        note(f"the report is in {output}")
    elif len(found) == 1:
        _show(context, found[str(paths[0])])
    elif context.obj.json:
        differences = [
            {"title": title, "columns": columns, "rows": rows} for title, columns, rows in compare(found)
        ]
        print_json({"format": FORMAT, "runs": found, "comparison": differences})
    else:
        _tell(compare(found))


def _config(context: typer.Context) -> PartyConfig:
    from services.vertical.config import load_party

    options: Options = context.obj
    if options.config is None:
        raise CommandFailed(
            Exit.USAGE,
            "--config FILE names the party's file",
            "`headwater fl vertical example > party.toml` writes one to change.",
        )
    return load_party(options.config)


def _show(context: typer.Context, report: dict[str, Any]) -> None:
    from services.cli.output import print_json
    from services.vertical.report import tables

    if context.obj.json:
        print_json(report)
    else:
        _tell(tables(report))


def _tell(sections: Sequence[tuple[str, Sequence[str], Sequence[tuple[str, ...]]]]) -> None:
    from services.cli.output import print_table

    for title, columns, rows in sections:
        print_table(columns, rows, title)
        print()


@contextmanager
def _interrupts(then: str) -> Iterator[None]:
    """Within the block Ctrl-C and SIGTERM end the command in order; ``then``: what is so then, for people."""
    from services.processes import interrupted_by_sigterm

    try:
        with interrupted_by_sigterm():
            yield
    except KeyboardInterrupt as error:
        raise CommandFailed(Exit.INTERRUPTED, "", f"Interrupted; {then}.") from error


@contextmanager
def _refusals() -> Iterator[None]:
    """What parties may meet with, each with the exit code that says what to do."""
    import zmq

    from federated.vertical.parties import PeerAborted, PeerFault
    from federated.vertical.tables import TableRefused
    from services.vertical.config import ConfigRefused
    from services.vertical.jobs import JobRefused
    from services.vertical.runner import PeerGone
    from services.vertical.store import StateDamaged, StateInUse, StateNotKept
    from services.vertical.trial import TrialFailed

    try:
        yield
    except TableRefused as error:
        raise CommandFailed(
            Exit.BAD_INPUT,
            str(error),
            "Mend the table, or name its columns: --id and --label, or those of [data] in a party's file.",
        ) from error
    except ConfigRefused as error:
        raise CommandFailed(
            Exit.SETTINGS,
            str(error),
            "`headwater fl vertical example` prints a party's file, `check --config FILE` checks one; "
            "`-h` shows options.",
        ) from error
    except JobRefused as error:
        raise CommandFailed(
            Exit.SETTINGS, str(error), "`headwater fl vertical kinds` lists kinds of jobs and their options."
        ) from error
    except StateInUse as error:
        raise CommandFailed(Exit.ALREADY_RUNNING, str(error), "Stop the other process.") from error
    except StateNotKept as error:
        raise CommandFailed(Exit.SETTINGS, str(error), "Make room, or name another folder.") from error
    except StateDamaged as error:
        raise CommandFailed(Exit.BAD_INPUT, str(error), "See to the file that is named.") from error
    except PeerAborted as error:
        raise CommandFailed(Exit.REFUSED, str(error), "The log of that party says why.") from error
    except PeerFault as error:
        step = (
            "That is this party's own limit (psi.most_ids_of_a_peer); raise it where the peer may ask more."
            if error.rule == "limit"
            else "Compare the [job] of both parties, and their versions; then ask that party."
        )
        raise CommandFailed(Exit.REFUSED, str(error), step) from error
    except PeerGone as error:
        raise CommandFailed(
            Exit.NOT_READY,
            str(error),
            "Start that party again: all go on from their last checkpoint. `headwater fl vertical check` tells "
            "whether it answers.",
        ) from error
    except zmq.ZMQError as error:
        code = Exit.ADDRESS_IN_USE if error.errno == zmq.EADDRINUSE else Exit.SETTINGS
        raise CommandFailed(code, f"party.listen: {error}", "Choose another address.") from error
    except TrialFailed as error:
        raise CommandFailed(
            Exit.REFUSED, str(error), "errors.txt beside each party's file says more."
        ) from error
    except ValueError as error:
        # A role refuses what it was given: ids that are none, batches that would tell labels.
        raise CommandFailed(Exit.BAD_INPUT, str(error), "Mend the table or the job's options.") from error


answers.register(app, _config, _refusals)
vertical_predict.register(app, _config, _refusals)
