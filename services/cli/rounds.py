"""``headwater fl serve``, ``join``, ``list``, ``log``, ``token``, ``stop``, ``resume``: rounds with real devices."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import quote

import typer

from services.cli.context import Options
from services.cli.exits import Exit
from services.cli.failures import CommandFailed

if TYPE_CHECKING:
    from federated.client_steps import Done, Spent
    from federated.data import Federation
    from federated.job import FederatedJob
    from services.cli.client import Api
    from services.settings.model import Settings

URL_VARIABLE: Final = "HEADWATER_FL_URL"
KEY_VARIABLE: Final = "HEADWATER_FL_KEY"
Url = Annotated[
    str | None,
    typer.Option(
        metavar="URL", help=f"A server or the scheduler ({URL_VARIABLE}). Left out: where the settings say."
    ),
]
Key = Annotated[str | None, typer.Option(metavar="KEY", help=f"An operator's key ({KEY_VARIABLE}).")]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="The job's name.")]
_ROLES: Final = ("server", "scheduler", "edge")


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command("serve")(serve)
    app.command("join")(join)
    app.command("list")(list_)
    app.command("log")(log)
    app.command("token")(token)
    app.command("stop")(stop)
    app.command("resume")(resume)


def serve(
    context: typer.Context,
    job: Annotated[
        Path | None, typer.Option("--job", metavar="FILE", help="Begin the job of this file (TOML), too.")
    ] = None,
    role: Annotated[str, typer.Option(help="server, scheduler or edge.")] = "server",
    name: Annotated[
        str | None, typer.Option(help="Of this process: one that is started again takes its place.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Where to listen.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65_535)] = None,
    store: Annotated[
        str | None, typer.Option(metavar="STORE", help="sqlite:FOLDER or redis://HOST:PORT/DB; all share it.")
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Devices need a token of the job.")] = False,
    certificate: Annotated[Path | None, typer.Option(help="TLS: this server's certificate (PEM).")] = None,
    certificate_key: Annotated[Path | None, typer.Option(help="TLS: its key (PEM).")] = None,
    client_ca: Annotated[
        Path | None, typer.Option(help="TLS: devices need a certificate of this authority.")
    ] = None,
    parent: Annotated[str | None, typer.Option(metavar="URL", help="An edge's parent.")] = None,
    parent_ca: Annotated[Path | None, typer.Option(help="Authority of the parent's certificate.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with an edge's token.")] = None,
    edge_job: Annotated[str | None, typer.Option("--edge-job", help="An edge's job.")] = None,
) -> None:
    """Run a server, a scheduler or an edge of federated learning until it is told to stop.

    Any number of servers may share a store; any device may talk to any of them, and any may die. A scheduler serves
    operators alone. An edge serves the devices of its region and hands their sums to its parent. The settings below
    [federation] say the rest.
    """
    from services.processes import leave, limit_threads, run_service
    from services.settings.model import Settings

    limit_threads(os.environ)  # before NumPy is loaded
    options: Options = context.obj
    settings = options.settings()
    if role not in _ROLES:
        raise CommandFailed(Exit.USAGE, f"{role!r} is none of {', '.join(_ROLES)}")
    listen_host, _, listen_port = settings.federation.listen.rpartition(":")
    given: dict[str, Any] = {
        "role": role, "store": store, "tokens": tokens or None, "certificate": certificate,
        "certificate_key": certificate_key, "client_ca": client_ca, "parent": parent, "parent_ca": parent_ca,
        "token_file": token_file, "job": edge_job,
        "listen": f"{host or listen_host}:{listen_port if port is None else port}",
    }  # fmt: skip
    told = settings.federation.model_dump() | {
        key: value for key, value in given.items() if value is not None
    }
    settings = Settings.model_validate({**settings.model_dump(), "federation": told})
    if job is not None:
        _begin(settings, job)
    _, _, at = settings.federation.listen.rpartition(":")
    run_service("federation", settings, name or f"federation-{role}-{at}")
    leave()


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

    from federated.client_device import Device, summary
    from federated.client_folder import DeviceFolder
    from federated.client_http import Clock, HttpTransport
    from federated.client_identity import IdentityRefused
    from federated.client_run import (
        JobUnreachable,
        fetch_job,
        require_agreed,
        run_device,
        terms_of,
        with_identity,
    )
    from federated.client_steps import Budget
    from federated.job import JobRefused, read_job
    from services.cli.output import note, print_json, waiting

    options: Options = context.obj
    clock = Clock()
    began = clock.now()
    try:
        secret = token_file.read_text(encoding="ascii").strip() if token_file else ""
        connected = HttpTransport(
            urls, secret, ca=_text(ca), certificate=_text(certificate), key=_text(certificate_key)
        )
    except (OSError, ValueError) as error:  # an address that is none, a file that cannot be read
        raise CommandFailed(Exit.USAGE, str(error)) from error
    with connected as transport:
        try:
            found = fetch_job(transport, job or _only_job(urls), clock, min(budget_seconds, 30.0))
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
        try:
            if agreed is not None:
                require_agreed(found, read_job(agreed))
        except JobRefused as error:
            raise CommandFailed(
                Exit.REFUSED, str(error), "Ask who runs the job why, and take part only if you agree to it."
            ) from error
        trainer = _trainer(found, client, data, torch, options.settings())
        folder = state or options.settings().data.dir / "devices" / found.job.name / quote(client, safe="")
        kept = DeviceFolder(folder)
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


def list_(context: typer.Context, url: Url = None, key: Key = None) -> None:
    """Show the jobs, where they stand, and the servers that live."""
    from services.cli.output import print_json, print_table

    api = _api(context.obj.settings(), url, key)
    jobs = _rows(api.get("fl", "jobs"), "jobs")
    servers = _rows(api.get("fl", "servers"), "servers")
    if context.obj.json:
        print_json({"jobs": jobs, "servers": servers})
        return
    print_table(
        ("job", "phase", "iteration", "valid", "invalid", "version", "starts", "uploads", "strategy", "parameters"),
        [
            (
                row["job"], _phase(row), f"{row['iteration']}/{row['iterations']}", row["valid"], row["invalid"],
                row["version"], f"{row['starts']}/{row['starts_needed']}", f"{row['uploads']}/{row['uploads_needed']}",
                row["strategy"], row["parameters"],
            )
            for row in jobs
        ],
    )  # fmt: skip
    for row in jobs:
        for text in _privacy(row):
            print(text)
    print()
    print_table(
        ("server", "role", "address", "process"),
        [(row["name"], row["role"], row["address"], row["pid"]) for row in servers],
    )


def log(context: typer.Context, job: JobName, url: Url = None, key: Key = None) -> None:
    """Show how each iteration of a job ended."""
    from services.cli.output import print_json, print_table

    reply = _api(context.obj.settings(), url, key).get("fl", "jobs", job, "rounds")
    rows = _rows(reply, "rounds")
    if context.obj.json:
        print_json({"rounds": rows})
        return
    # Only jobs that go into a stack have it.
    into = ("pushed",) if any("pushed" in row for row in rows) else ()
    private = ("epsilon",) if any("epsilon" in row for row in rows) else ()
    print_table(
        ("iteration", "valid", "why", "starts", "uploads", "seconds", "upload bytes", "loss", *private, *into),
        [
            (
                row["iteration"], "yes" if row["valid"] else "no", _why(row), row["starts"], row["uploads"],
                f"{row['closed_at'] - row['opened_at']:.2f}", row.get("upload_bytes"),
                None if row.get("loss") is None else f"{row['loss']:.4f}",
                *(None if row.get("epsilon") is None else f"{row['epsilon']:.3f}" for _ in private),
                *(_pushed(row) for _ in into),
            )
            for row in rows
        ],
    )  # fmt: skip


def _phase(row: dict[str, Any]) -> str:
    """Where an iteration is, with the stage of secure aggregation in which its clients are."""
    return f"{row['phase']}, {row['stage']}" if row.get("stage") else str(row["phase"])


def _why(row: dict[str, Any]) -> str:
    return f"{row['why']}: {row['detail']}" if row.get("detail") else str(row["why"])


def _privacy(row: dict[str, Any]) -> list[str]:
    """What a job's protection is worth, if it has any."""
    if "privacy" not in row:
        return []
    from federated.privacy.accounting_statement import PrivacyStatement

    said = PrivacyStatement(**{**row["privacy"], "warnings": tuple(row["privacy"]["warnings"])}).lines()
    if row.get("over") == "budget":
        said.append("over: another iteration would exceed the privacy budget")
    return [f"{row['job']}: {line}" for line in said]


def _pushed(row: dict[str, Any]) -> str | None:
    """How soon after an iteration's end its version was in the stack, and with which later one."""
    push = row.get("pushed")
    if push is None:
        return "not yet" if row["valid"] else None
    if push["refused"]:
        return "refused"
    after_s = push["applied_at_ms"] / 1e3 - row["closed_at"]
    together = "" if push["version"] == row["version"] else f", in version {push['version']}"
    return f"after {after_s:.2f} s{together}"


def token(
    context: typer.Context,
    job: JobName,
    id_: Annotated[str, typer.Argument(metavar="ID", help="The device's id, or the edge's name.")],
    edge: Annotated[bool, typer.Option("--edge", help="For an edge server.")] = False,
    valid: Annotated[str, typer.Option(help="How long it is valid, such as 30d. 0s: for ever.")] = "0s",
    url: Url = None,
    key: Key = None,
) -> None:
    """Print a token for a device or an edge. It is shown once and kept nowhere."""
    from services.cli.output import print_json
    from services.settings.units import parse_duration

    try:
        seconds = parse_duration(valid)
    except ValueError as error:
        raise CommandFailed(Exit.USAGE, str(error)) from error
    assert isinstance(seconds, (int, float))
    role = "edge" if edge else "client"
    path = f"/v1/fl/jobs/{quote(job, safe='')}/tokens?{role}={quote(id_, safe='')}&valid={int(seconds)}"
    reply = _api(context.obj.settings(), url, key).post(path, None)
    assert isinstance(reply, dict)
    if context.obj.json:
        print_json(reply)
    else:
        print(reply["token"])


def stop(
    context: typer.Context,
    job: JobName,
    yes: Annotated[bool, typer.Option("--yes", help="Stop without asking.")] = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Stop a job. The iteration that devices are in becomes invalid; `resume` goes on with the next."""
    if not yes and not typer.confirm(f"Stop {job}?", err=True):
        raise CommandFailed(Exit.DECLINED, f"{job} goes on")
    _change(context, job, "stop", url, key)


def resume(context: typer.Context, job: JobName, url: Url = None, key: Key = None) -> None:
    """Let a stopped job go on with its next iteration."""
    _change(context, job, "resume", url, key)


def _change(context: typer.Context, job: str, what: str, url: str | None, key: str | None) -> None:
    from services.cli.output import note, print_json

    path = f"/v1/fl/jobs/{quote(job, safe='')}/{what}"
    reply = _api(context.obj.settings(), url, key).post(path, None)
    assert isinstance(reply, dict)
    if context.obj.json:
        print_json(reply)
    else:
        note(f"{job}: {reply['phase']}, iteration {reply['iteration']}")


def _begin(settings: Settings, file: Path) -> None:
    from contextlib import closing

    from federated.job import JobRefused, load_job
    from federated.privacy.accounting_statement import statement
    from services.cli.items import with_items
    from services.cli.output import note
    from services.federation.assembly import require_fits
    from services.federation.registry import JobConflict, Registry
    from services.federation.stores import open_round_store

    try:
        job, first = load_job(file), None
        with closing(open_round_store(settings)) as store:
            registry = Registry(store)
            if job.model.name == "items":
                job, first = with_items(job, settings, registry.find(job.job.name))
            else:
                job = with_shape(job)
            require_fits(job, settings.federation.max_body)
            _, created = registry.create(job, first)
    except (JobRefused, JobConflict) as error:
        raise CommandFailed(
            Exit.BAD_INPUT, str(error), "Mend the job's file, or name the job differently."
        ) from error
    note(f"job {job.job.name}: {'begins' if created else 'is there already and goes on'}")
    layout = job.make_model().layout()
    if job.privacy.mechanism != "none":
        for line in statement(job.exposure(layout.trained), 0).lines():
            note(f"job {job.job.name}: {line}")
    masked = job.make_masked(layout)
    if masked is not None:
        for line in masked.plan.describe():
            note(f"job {job.job.name}: {line}")


def with_shape(job: FederatedJob) -> FederatedJob:
    """``job`` with the size of its data's rows, which servers must know and do not see. Raises DatasetError."""
    if job.data.features is not None and job.data.classes is not None:
        return job
    federation = _federation(job, job.data.name)
    data = replace(job.data, features=federation.features, classes=federation.classes)
    return replace(job, data=data)


def _federation(job: FederatedJob, name: str) -> Federation:
    from services.cli.output import note
    from services.datasets.download import user_cache
    from services.datasets.federations import open_federation

    more: dict[str, Any] = {} if job.data.context is None else {"context": job.data.context}
    if job.data.view is not None:
        more["view"] = job.data.view
    federation, notes = open_federation(
        name,
        user_cache(os.environ),
        clients=job.data.clients,
        seed=job.job.seed,
        partition=job.data.partition,
        **more,
    )
    for text in notes:
        note(text)
    return federation


def _trainer(job: FederatedJob, client: str, data: str | None, torch: bool, settings: Settings) -> Any:
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
        federation = _federation(job, data or job.data.name)
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


def _only_job(urls: list[str]) -> str:
    """The name of the only job there is, from the first server that answers."""
    from services.cli.client import Api

    for place, url in enumerate(urls):
        try:
            rows = _rows(Api(url, os.environ.get(KEY_VARIABLE)).get("fl", "jobs"), "jobs")
            break
        except CommandFailed as error:
            if (
                error.code == Exit.REFUSED
            ):  # an edge does not list jobs, a server may tell them to operators alone
                raise CommandFailed(
                    Exit.USAGE, f"{url} does not tell which jobs there are: {error}", "Name one with --job."
                ) from error
            if error.code != Exit.NOT_RUNNING or place == len(urls) - 1:
                raise
    if len(rows) != 1:
        raise CommandFailed(Exit.USAGE, f"there are {len(rows)} jobs", "Name one with --job.")
    return str(rows[0]["job"])


def _api(settings: Settings, url: str | None, key: str | None) -> Api:
    from services.cli.client import Api

    scheme = "https" if settings.federation.certificate else "http"
    default = f"{scheme}://{settings.federation.listen}"
    return Api(url or os.environ.get(URL_VARIABLE) or default, key or os.environ.get(KEY_VARIABLE))


def _rows(reply: object, name: str) -> list[dict[str, Any]]:
    rows = reply.get(name) if isinstance(reply, dict) else None
    if not isinstance(rows, list):
        raise CommandFailed(
            Exit.NOT_RUNNING, "the answer is not one of a federation server", "Check the address."
        )
    return rows
