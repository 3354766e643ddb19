"""``headwater fl join``: one device of a federated job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from services.cli.context import Options
from services.cli.exits import Exit
from services.cli.failures import CommandFailed
from services.cli.rounds import CA_VARIABLE, federation_of, from_any, rows_in

if TYPE_CHECKING:
    from federated.client_steps import Done, Spent
    from federated.job import FederatedJob
    from services.cli.client import Api
    from services.settings.model import Settings


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("join")(join)


def join(
    context: typer.Context,
    urls: Annotated[
        list[str], typer.Argument(metavar="URL...", help="Servers; the next one when one fails.")
    ],
    client: Annotated[str, typer.Option(help="This device's id; a number picks its share of a data set.")],
    job: Annotated[str | None, typer.Option(help="The job. Left out: the only one.")] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="A data set's name, .npz or .csv (of items .txt: an id a line). Left out: what the job's file says."
        ),
    ] = None,
    state: Annotated[Path | None, typer.Option(help="Folder for what is kept between rounds.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with this device's token.")] = None,
    ca: Annotated[Path | None, typer.Option(help="Authority of the servers' certificates (PEM).")] = None,
    certificate: Annotated[Path | None, typer.Option(help="This device's certificate (PEM).")] = None,
    certificate_key: Annotated[Path | None, typer.Option(help="Its key (PEM).")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="End after so many accepted updates.")] = None,
    budget_seconds: Annotated[float, typer.Option(help="End after so long.")] = float("inf"),
    budget_bytes: Annotated[
        float, typer.Option(help="End before more than this is sent and received.")
    ] = float("inf"),
    torch: Annotated[bool, typer.Option("--torch", help="Train with torch instead of NumPy.")] = False,
    agreed: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The job's file as this device agreed to it: servers must protect it so."
        ),
    ] = None,
    registrar: Annotated[
        str,
        typer.Option(
            metavar="HEX", help="Public key of who certifies signing keys, as its operator told you."
        ),
    ] = "",
    signing_certificate: Annotated[
        str,
        typer.Option(metavar="HEX", help="This device's, from that operator. Left out: a server is asked."),
    ] = "",
) -> None:
    """Take part in a federated job as one device: download, train here, upload, until the job is over.

    The data stay here. On a device that has Python and NumPy alone, `python -m federated.client` does the same.
    """
    import random

    from federated.client_agreed import keep_terms, require_terms
    from federated.client_device import Device, summary
    from federated.client_folder import DeviceFolder
    from federated.client_http import Clock, HttpTransport
    from federated.client_identity import IdentityRefused
    from federated.client_run import (
        JobUnreachable,
        fetch_job,
        run_device,
        terms_of,
        with_identity,
    )
    from federated.client_steps import Budget
    from federated.job import read_job
    from federated.job_sections import JobRefused
    from services.cli.output import note, print_json, waiting

    options: Options = context.obj
    clock = Clock()
    began = clock.now()
    try:
        secret = token_file.read_text(encoding="ascii").strip() if token_file else ""
        connected = HttpTransport(
            urls,
            secret,
            ca=_text(ca) or os.environ.get(CA_VARIABLE),
            certificate=_text(certificate),
            key=_text(certificate_key),
        )
    except (OSError, ValueError) as error:  # an address that is none, a file that cannot be read
        raise CommandFailed(Exit.USAGE, str(error)) from error
    with connected as transport:
        try:
            found = fetch_job(transport, job or _only_job(urls, _text(ca)), clock, min(budget_seconds, 30.0))
        except JobUnreachable as error:
            raise CommandFailed(
                Exit.NOT_RUNNING,
                str(error),
                "`headwater fl list` shows the jobs, `headwater fl token` makes a token, `headwater fl serve` starts a "
                "server.",
            ) from error
        except JobRefused as error:
            raise CommandFailed(
                Exit.BAD_INPUT,
                f"the server's job cannot be run here: {error}",
                "A strategy or model of one's own must be known on devices, too.",
            ) from error
        folder = state or options.settings().data.dir / "devices" / found.job.name / quote(client, safe="")
        kept = DeviceFolder(folder)
        try:
            require_terms(found, kept, None if agreed is None else read_job(agreed))
        except JobRefused as error:
            raise CommandFailed(
                Exit.REFUSED, str(error), "Ask who runs the job why, and take part only if you agree to it."
            ) from error
        trainer = trainer_of(found, client, data, torch, options.settings())
        try:
            terms = with_identity(
                terms_of(found), found, client, kept, transport, clock,
                registrar=registrar, certificate=signing_certificate,
            )  # fmt: skip
        except (IdentityRefused, JobRefused, ValueError) as error:
            raise CommandFailed(
                Exit.BAD_INPUT,
                str(error),
                "`headwater fl identity` prints the key to certify, `headwater fl certify` certifies it.",
            ) from error
        if terms.secure is not None and terms.secure.registrar is not None and not registrar:
            note(
                f"signing keys go by registrar {terms.secure.registrar.hex()}, which the servers named: where they are "
                "not trusted with it, ask its operator and give --registrar"
            )
        keep_terms(found, kept)
        budget = Budget(rounds, budget_seconds, budget_bytes)
        device = Device(
            client,
            terms,
            trainer,
            kept,
            began,
            random.SystemRandom().random,
            budget=budget,
        )
        with waiting() as tell:
            done = run_device(device, transport, clock, began + budget_seconds, tell)
    came = summary(device, done)
    if options.json:
        print_json(came)
    else:
        note(_how_it_ended(device.spent, done))
    if done.why == "refused":
        raise CommandFailed(Exit.REFUSED, done.detail)


def _how_it_ended(spent: Spent, done: Done) -> str:
    from services.simulation.report import size

    ends = {
        "finished": "the job is over", "refused": "refused", "rounds": "as many updates as were wanted",
        "seconds": "the time is used up", "bytes": "the bytes are used up",
        "budget": f"no further report may leave this device: {done.detail}",
    }  # fmt: skip
    lost = f"{spent.lost} requests lost"
    if spent.diverged:
        lost += f", {spent.diverged} trainings diverged (lower training.rate)"
    loss = f"; last loss {spent.losses[-1]:.4f}" if spent.losses else ""
    return (
        f"{ends[done.why]}: {spent.accepted} updates counted, {spent.refused} not, {lost}; "
        f"sent {size(spent.sent)}, received {size(spent.received)}{loss}"
    )


def trainer_of(job: FederatedJob, client: str, data: str | None, torch: bool, settings: Settings) -> Any:
    """What trains ``job``'s model on the rows of ``client``: of its own file, or its share of a data set. Raises
    CommandFailed and DatasetError."""
    import numpy as np

    from federated.client_run import numpy_trainer, own_rows

    if job.model.name == "items":
        from services.cli import items

        if torch:
            raise CommandFailed(Exit.USAGE, "items are learned with NumPy: leave --torch out")

        inputs, labels = items.own_rows(job, client, data, settings)
    elif data is not None and data.endswith((".npz", ".csv")):
        try:
            inputs, labels = own_rows(job, Path(data))
        except (OSError, ValueError) as error:
            raise CommandFailed(
                Exit.BAD_INPUT, str(error), "Mend the file, or name another with --data."
            ) from error
    else:
        federation = federation_of(job, data or job.data.name)
        if not client.isdecimal() or int(client) >= federation.clients:
            raise CommandFailed(
                Exit.USAGE,
                f"--client must be a number below {federation.clients} to pick a share of {federation.name}",
                "Or bring rows of its own: --data FILE.",
            )
        padded = federation.rows(np.array([int(client)]))
        count = int(padded.counts[0])
        inputs, labels = padded.inputs[0, :count], padded.labels[0, :count]
    if torch:
        from federated.torch_client import torch_twin

        return torch_twin(job, client, inputs, labels)
    return numpy_trainer(job, client, inputs, labels)


def _text(file: Path | None) -> str | None:
    return None if file is None else str(file)


def _only_job(urls: list[str], ca: str | None = None) -> str:
    """The name of the only job there is, from the first server that answers."""

    def listed(api: Api) -> list[dict[str, Any]]:
        try:
            return rows_in(api.get("fl", "jobs"), "jobs")
        except CommandFailed as error:
            if error.code != Exit.REFUSED:
                raise
            # An edge does not list jobs, a server may tell them to operators alone.
            raise CommandFailed(
                Exit.USAGE, f"{api.url} does not tell which jobs there are: {error}", "Name one with --job."
            ) from error

    rows = from_any(urls, listed, ca=ca)
    if len(rows) != 1:
        raise CommandFailed(Exit.USAGE, f"there are {len(rows)} jobs", "Name one with --job.")
    return str(rows[0]["job"])
