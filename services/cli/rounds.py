"""``headwater fl serve``, ``list``, ``log``, ``token``, ``stop``, ``resume``: rounds with real devices."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar
from urllib.parse import quote

import typer

from services.cli.context import Options
from services.cli.exits import Exit
from services.cli.failures import CommandFailed
from services.cli.job_keys import KEYS_STEP

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from federated.data import Federation
    from federated.job import FederatedJob
    from services.cli.client import Api
    from services.settings.model import Settings

T = TypeVar("T")

URL_VARIABLE: Final = "HEADWATER_FL_URL"
KEY_VARIABLE: Final = "HEADWATER_FL_KEY"
CA_VARIABLE: Final = "HEADWATER_FL_CA"
"""Names the file with the authority of the servers' certificates, where the system does not know it."""
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
    app.command("begin")(begin)
    app.command("list")(list_)
    app.command("log")(log)
    app.command("token")(token)
    app.command("stop")(stop)
    app.command("resume")(resume)


def serve(
    context: typer.Context,
    job: Annotated[
        Path | None,
        typer.Option(
            "--job", metavar="FILE", help="Begin the job of this file (TOML; `headwater fl keys`), too."
        ),
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


def begin(
    context: typer.Context,
    job: Annotated[Path, typer.Argument(metavar="FILE", help="The job's file (TOML; `headwater fl keys`).")],
) -> None:
    """Begin a job on the servers that share the settings' store. The same file again changes nothing.

    Like `fl serve --job`, without a server: a job that goes into a stack begins with the items that it serves now.
    """
    _begin(context.obj.settings(), job)


def list_(context: typer.Context, url: Url = None, key: Key = None) -> None:
    """Show the jobs, where they stand, and the servers that live."""
    from services.cli.output import print_json, print_table

    api = _api(context.obj.settings(), url, key)
    jobs = rows_in(api.get("fl", "jobs"), "jobs")
    servers = rows_in(api.get("fl", "servers"), "servers")
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
        for text in (*_privacy(row), *_over(row)):
            print(text)
    print()
    print_table(
        ("server", "role", "address", "process"),
        [(row["name"], row["role"], row["address"], row["pid"]) for row in servers],
    )


def log(context: typer.Context, job: JobName, url: Url = None, key: Key = None) -> None:
    """Show how each iteration of a job ended, and why the job is over, if it is."""
    from services.cli.output import print_json, print_table

    api = _api(context.obj.settings(), url, key)
    rows = rows_in(api.get("fl", "jobs", job, "rounds"), "rounds")
    states = [row for row in rows_in(api.get("fl", "jobs"), "jobs") if row["job"] == job]
    if context.obj.json:
        print_json({"rounds": rows, "over": next((row.get("over", "") for row in states), "")})
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
    for row in states:
        for text in _over(row):
            print(text)


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

    found = PrivacyStatement(**{**row["privacy"], "warnings": tuple(row["privacy"]["warnings"])})
    return [f"{row['job']}: {line}" for line in found.lines(over=bool(row.get("over")))]


def _over(row: dict[str, Any]) -> list[str]:
    """Why a job is over, if it is."""
    why = row.get("over")
    if why == "budget":
        return [f"{row['job']}: over: another iteration would exceed the privacy budget"]
    return [f"{row['job']}: over: iteration {row['iterations']} was its last"] if why else []


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

    from federated.job import load_job
    from federated.job_sections import JobRefused
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
            Exit.BAD_INPUT, str(error), f"Mend the job's file, or name the job differently; {KEYS_STEP}"
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
    federation = federation_of(job, job.data.name)
    data = replace(job.data, features=federation.features, classes=federation.classes)
    return replace(job, data=data)


def federation_of(job: FederatedJob, name: str) -> Federation:
    """The data set ``name`` among as many clients as ``job`` says. Raises DatasetError."""
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


def _api(settings: Settings, url: str | None, key: str | None) -> Api:
    scheme = "https" if settings.federation.certificate else "http"
    default = f"{scheme}://{settings.federation.listen}"
    return operators(url or os.environ.get(URL_VARIABLE) or default, key)


def operators(url: str, key: str | None = None, ca: str | None = None) -> Api:
    """The server at ``url`` as operators see it; key and authority are those of the environment unless given."""
    from services.cli.client import Api

    return Api(url, key or os.environ.get(KEY_VARIABLE), ca or os.environ.get(CA_VARIABLE))


def from_any(
    urls: Sequence[str], ask: Callable[[Api], T], key: str | None = None, ca: str | None = None
) -> T:
    """What the first server of ``urls`` that answers says to an operator. Raises CommandFailed: of the last one where
    none answers."""
    for url in urls[:-1]:
        try:
            return ask(operators(url, key, ca))
        except CommandFailed as error:
            if error.code != Exit.NOT_RUNNING:
                raise
    return ask(operators(urls[-1], key, ca))


def rows_in(reply: object, name: str) -> list[dict[str, Any]]:
    """The list ``name`` of a server's answer. Raises CommandFailed where there is none."""
    rows = reply.get(name) if isinstance(reply, dict) else None
    if not isinstance(rows, list):
        raise CommandFailed(
            Exit.NOT_RUNNING, "the answer is not one of a federation server", "Check the address."
        )
    return rows
