"""``headwater fl cohort``: several devices of a federated job, by one command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from services.cli.context import Options
from services.cli.exits import Exit
from services.cli.failures import CommandFailed
from services.cli.rounds import CA_VARIABLE, Key, from_any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from services.cli.client import Api


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("cohort")(cohort)


def cohort(
    context: typer.Context,
    urls: Annotated[
        list[str], typer.Argument(metavar="URL...", help="Servers; the next one when one fails.")
    ],
    job: Annotated[str, typer.Option(help="The job.")],
    clients: Annotated[
        int, typer.Option(min=1, max=256, help="How many devices: clients 0 to N-1 of a data set.")
    ] = 8,
    data: Annotated[
        str | None, typer.Option(help="The data set that is theirs. Left out: what the job's file says.")
    ] = None,
    state: Annotated[Path | None, typer.Option(help="Folder for what they keep between rounds.")] = None,
    ca: Annotated[
        Path | None, typer.Option(help=f"Authority of the servers' certificates (PEM; {CA_VARIABLE}).")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Each ends after so many accepted updates.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Each ends after so long.")] = float("inf"),
    key: Key = None,
) -> None:
    """Take part in a federated job as several devices of this machine, to try servers that run.

    To the servers they are devices like any other (`fl join` is one). Where they want tokens, an operator's key
    (admin) enrols them.
    """
    from federated.client_http import Clock, HttpTransport
    from federated.client_run import JobUnreachable, fetch_job
    from federated.client_steps import Budget
    from federated.job_sections import JobRefused
    from services.cli.joining import trainer_of
    from services.cli.output import print_json, print_table, waiting
    from services.federation.cohort import Seat, run_cohort

    options: Options = context.obj
    settings = options.settings()
    authority = os.environ.get(CA_VARIABLE) if ca is None else str(ca)
    names = [str(client) for client in range(clients)]
    tokens = from_any(urls, lambda api: _tokens(api, job, names), key, authority)
    try:
        with HttpTransport(urls, tokens[0], ca=authority) as transport:
            found = fetch_job(transport, job, Clock(), min(seconds, 30.0))
        seats = [
            Seat(name, token, trainer_of(found, name, data, False, settings))
            for name, token in zip(names, tokens, strict=True)
        ]
        folder = state or settings.data.dir / "devices" / found.job.name
        with waiting() as line:
            ended = run_cohort(
                found, urls, seats, folder, ca=authority, budget=Budget(rounds, seconds), told=line
            )
    except JobUnreachable as error:
        raise CommandFailed(
            Exit.NOT_RUNNING,
            str(error),
            "`headwater fl list` shows the jobs, `headwater fl begin` makes one.",
        ) from error
    except JobRefused as error:
        raise CommandFailed(Exit.BAD_INPUT, f"the server's job cannot be run here: {error}") from error
    except (OSError, ValueError) as error:  # an address that is none, a file that cannot be read
        raise CommandFailed(Exit.USAGE, str(error)) from error
    if options.json:
        print_json({"job": found.job.name, "devices": ended})
    else:
        # Under masks a device tells nobody its loss, and the sum has it.
        shown = ("loss",) if found.secure_aggregation.protocol == "none" else ()
        columns = ("device", "ended", "accepted", "refused", "lost", "upload bytes", *shown)
        print_table(columns, [_row(name, came)[: len(columns)] for name, came in ended.items()])
    if refused := [f"{name}: {came['detail']}" for name, came in ended.items() if came["ended"] == "refused"]:
        raise CommandFailed(Exit.REFUSED, f"device {refused[0]}")


def _tokens(api: Api, job: str, names: list[str]) -> list[str]:
    """Enrols each. Raises CommandFailed."""
    found = []
    for name in names:
        path = f"/v1/fl/jobs/{quote(job, safe='')}/tokens?client={quote(name, safe='')}"
        reply = api.post(path, None)
        found.append(str(reply["token"]) if isinstance(reply, dict) else "")
    return found


def _row(name: str, came: Mapping[str, object]) -> tuple[object, ...]:
    loss = came["loss"]
    counted = (came["accepted"], came["refused"], came["lost"], came["upload_bytes"])
    return name, came["ended"], *counted, f"{loss:.4f}" if isinstance(loss, float) else None
