"""``headwater fl registrar``, ``identity``, ``certify``: signing keys of devices, certified by an operator.

For jobs that do not trust their servers (``secure_aggregation.malicious``). Who runs the registrar must not run the
servers: a registrar can enrol devices that it plays itself.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import quote

import typer

from services.cli.exits import Exit
from services.cli.failures import CommandFailed

_SEED_BYTES: Final = 32


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command("registrar")(registrar)
    app.command("identity")(identity)
    app.command("certify")(certify)


def registrar(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where its secret key is, or is to be.")],
) -> None:
    """Make a registrar's key, or read it, and print its public key.

    The public key goes into the job's file (secure_aggregation.registrar) and to the devices (`fl join --registrar`).
    The file stays with whoever certifies, away from the servers.
    """
    from federated.secagg.keys import Registrar

    if not file.exists():
        try:
            with open(file, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as made:
                made.write(os.urandom(_SEED_BYTES))
        except OSError as error:
            raise CommandFailed(Exit.BAD_INPUT, f"{file} cannot be written: {error.strerror}") from error
    _tell(context, "registrar", Registrar(_seed(file)).public)


def identity(
    context: typer.Context,
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job's name.")],
    client: Annotated[str, typer.Argument(metavar="CLIENT", help="This device's id.")],
    state: Annotated[Path | None, typer.Option(help="Folder for what is kept between rounds.")] = None,
) -> None:
    """Make this device's signing key for a job, if it has none, and print the public key: what is to be certified."""
    from federated.client_folder import DeviceFolder
    from federated.client_identity import IdentityRefused, public_key

    folder = state or context.obj.settings().data.dir / "devices" / job / quote(client, safe="")
    try:
        public = public_key(DeviceFolder(folder))
    except (IdentityRefused, OSError) as error:
        raise CommandFailed(
            Exit.BAD_INPUT, str(error), f"Make a new one: remove it from {folder}."
        ) from error
    _tell(context, "public", public)


def certify(
    context: typer.Context,
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job's name.")],
    client: Annotated[str, typer.Argument(metavar="CLIENT", help="The device's id.")],
    public: Annotated[
        str, typer.Argument(metavar="HEX", help="Its public key: what `fl identity` printed there.")
    ],
    key: Annotated[Path, typer.Option("--registrar-key", metavar="FILE", help="The registrar's secret key.")],
) -> None:
    """Certify a device's signing key, and print the certificate (`fl join --signing-certificate`).

    Make sure that the key is really that device's: everybody in the job goes by this.
    """
    from federated.secagg.keys import KeyRefused, Registrar

    try:
        found = Registrar(_seed(key)).certify(job, client, bytes.fromhex(public))
    except (KeyRefused, ValueError) as error:
        raise CommandFailed(
            Exit.USAGE, f"{public!r} is no public key: {error}", "`headwater fl identity` prints one."
        ) from error
    _tell(context, "certificate", found.signature)


def _seed(file: Path) -> bytes:
    try:
        seed = file.read_bytes()
    except OSError as error:
        raise CommandFailed(
            Exit.BAD_INPUT,
            f"{file} cannot be read: {error.strerror}",
            "`headwater fl registrar FILE` makes one.",
        ) from error
    if len(seed) != _SEED_BYTES:
        raise CommandFailed(
            Exit.BAD_INPUT, f"{file} is no registrar's key: it has {len(seed)} bytes, not {_SEED_BYTES}"
        )
    return seed


def _tell(context: typer.Context, name: str, value: bytes) -> None:
    from services.cli.output import print_json

    if context.obj.json:
        print_json({name: value.hex()})
    else:
        print(value.hex())
