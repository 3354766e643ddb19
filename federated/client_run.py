"""A device's loop over HTTP: ``python -m federated.client --server URL --job JOB --client ID --data FILE``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import numpy as np

from federated.client_agreed import keep_terms, require_terms
from federated.client_device import Device, summary
from federated.client_folder import DeviceFolder
from federated.client_http import Call, Clock, HttpTransport, NetworkLost
from federated.client_identity import IdentityRefused, certified_by_server, identity_of
from federated.client_secure import SecureTerms
from federated.client_steps import Budget, Done, Terms, Train, Wait
from federated.client_trainer import NumpyTrainer, client_number
from federated.job import FederatedJob, load_job, read_job
from federated.job_sections import JobRefused
from federated.labelled import read_labelled
from federated.models import Inputs, Labels

_RETRY_S = 1.0
_NOT_WELCOME = frozenset({401, 403})
"""Statuses that asking again does not change."""


class JobUnreachable(ConnectionError):
    """No server told what the job is, in the time there was or to this device."""


def fetch_job(transport: HttpTransport, job: str, clock: Clock, seconds: float) -> FederatedJob:
    """The job's file, from a server. Raises JobUnreachable after ``seconds``, or at once where the token is not taken,
    and JobRefused for what is no job."""
    ends, why = clock.now() + seconds, ""
    while True:
        try:
            answer = transport.send(Call("GET", f"/v1/fl/jobs/{quote(job, safe='')}/definition"))
            if answer.status == 200:
                return load_job(tomllib.loads(answer.body.decode()))
            if answer.status in _NOT_WELCOME:
                raise JobUnreachable(
                    f"status {answer.status}: job {job!r} takes only devices with a token of its own"
                )
            why = (
                f"status {answer.status}: no job {job!r}"
                if answer.status == 404
                else f"status {answer.status}"
            )
        except NetworkLost as error:
            why = str(error)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise JobRefused(f"the server's definition of {job} is not TOML: {error}") from error
        if clock.now() + _RETRY_S > ends:
            raise JobUnreachable(why)
        clock.sleep(_RETRY_S)


def terms_of(job: FederatedJob) -> Terms:
    """What ``job`` says that concerns its devices. Where it does not trust its servers, ``with_identity`` has the rest.
    Raises JobRefused."""
    layout = job.make_model().layout()
    masked = job.make_masked(layout)
    if masked is not None and not _has("cryptography"):
        raise JobRefused(
            f"job {job.job.name} asks for secure aggregation, which needs the package cryptography: "
            "pip install cryptography"
        )
    return Terms(
        job.job.name,
        job.job.seed,
        job.make_scheme(),
        job.make_grid(layout),
        job.servers.part_bytes,
        job.make_protection(),
        None if masked is None else SecureTerms(masked, job.rounds.come_back_min_s),
    )


def _has(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def with_identity(
    terms: Terms,
    job: FederatedJob,
    client: str,
    folder: DeviceFolder,
    transport: HttpTransport,
    clock: Clock,
    *,
    registrar: str = "",
    certificate: str = "",
    seconds: float = 30.0,
) -> Terms:
    """``terms`` with this device's signing key, for a job that does not trust its servers; others as they are.
    ``registrar`` and ``certificate`` are in hexadecimal, as the operator gave them ("": as the job's file and the
    servers say). Raises IdentityRefused and ValueError."""
    if terms.secure is None or not terms.secure.masked.plan.malicious:
        return terms
    told = registrar or job.secure_aggregation.registrar
    if registrar and job.secure_aggregation.registrar not in ("", registrar):
        raise IdentityRefused(f"the job names another registrar, {job.secure_aggregation.registrar}")
    identity, by = identity_of(
        folder,
        terms.job,
        client,
        certified_by_server(transport, terms.job, client, clock, seconds),
        bytes.fromhex(told) if told else None,
        bytes.fromhex(certificate) if certificate else None,
    )
    return replace(terms, secure=replace(terms.secure, identity=identity, registrar=by))


def numpy_trainer(job: FederatedJob, client: str, inputs: Inputs, labels: Labels) -> NumpyTrainer:
    """Trains ``job``'s model on this client's rows."""
    return NumpyTrainer(job.make_model(), inputs, labels, job.training, job.job.seed, client_number(client))


def run_device(
    device: Device,
    transport: HttpTransport,
    clock: Clock,
    ends: float,
    told: Callable[[str], None] = lambda text: None,
) -> Done:
    """Run the loop until it ends; ``ends`` bounds every wait."""
    while True:
        step = device.next(clock.now())
        if isinstance(step, Done):
            return step
        if isinstance(step, Wait):
            told(f"waits: {step.why}")
            clock.sleep(max(0.0, min(step.until, ends) - clock.now()))
        elif isinstance(step, Train):
            device.train(clock.now())
            told("trained")
        else:
            try:
                answer = transport.send(step)
            except NetworkLost as error:
                device.lost(str(error), clock.now())
                continue
            if answer.status >= 500:
                transport.turn()
            device.received(answer, clock.now())


def own_rows(job: FederatedJob, path: Path) -> tuple[Inputs, Labels]:
    """This device's rows for ``job``'s model, from its own file. Raises ValueError for one that does not fit."""
    if job.model.name != "items":
        return fitting(job, path, *load_rows(path))
    # Not every device recommends: imported where it is asked for.
    from federated.recommendation.model import load_known

    return load_known(path, job.data.items, job.make_model().layout().fields[0].shape[0])


def fitting(job: FederatedJob, path: Path, inputs: Inputs, labels: Labels) -> tuple[Inputs, Labels]:
    """Inputs [N, ...] as [N, F], and their labels [N]. Raises ValueError where the job's model has other sizes: before
    the device starts, since one that starts and fails takes the place of another in the iteration."""
    inputs = inputs.reshape(len(inputs), -1)
    features, classes = job.data.features, job.data.classes
    if features is not None and inputs.shape[1] != features:
        raise ValueError(f"{path} has rows of {inputs.shape[1]} features, the job's model takes {features}")
    if classes is not None and not 0 <= labels.min() <= labels.max() < classes:
        raise ValueError(
            f"{path} has labels from {labels.min()} to {labels.max()}, the job's model tells 0 to {classes - 1} apart"
        )
    return inputs, labels


def load_rows(path: Path) -> tuple[Inputs, Labels]:
    """This device's rows: ``.npz`` with ``inputs`` [N, ...] and ``labels`` [N], or ``.csv`` as ``federated.labelled``
    has it. Raises ValueError for anything else."""
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            if not {"inputs", "labels"} <= set(arrays.files):
                raise ValueError(f"{path} has no arrays inputs and labels")
            inputs, labels = arrays["inputs"], arrays["labels"]
    elif path.suffix == ".csv":
        rows = read_labelled(path)
        inputs, labels = rows.inputs, rows.numbers(path)
    else:
        raise ValueError(f"{path} is neither .npz nor .csv")
    if len(inputs) != len(labels) or not len(labels):
        raise ValueError(f"{path} has {len(inputs)} inputs and {len(labels)} labels")
    return inputs, labels.astype(np.int64)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one device and print what came of it, as JSON. Ends with 1 where the job refused it or cannot be reached."""
    parser = argparse.ArgumentParser(
        "python -m federated.client", description="One device of a federated job."
    )
    parser.add_argument(
        "--server", action="append", required=True, help="http(s)://HOST:PORT; may be repeated"
    )
    parser.add_argument("--job", required=True, help="the job's name")
    parser.add_argument("--client", required=True, help="this device's id")
    parser.add_argument(
        "--data",
        required=True,
        type=Path,
        help=".npz with inputs and labels, or .csv (a column label; without a header the last one); of items .npz "
        "with items, or .txt, an id a line",
    )
    parser.add_argument("--state", type=Path, help="folder for what is kept between rounds")
    parser.add_argument("--token-file", type=Path, help="file with this device's token")
    parser.add_argument("--ca", help="authority of the servers' certificates (PEM)")
    parser.add_argument("--certificate", help="this device's certificate (PEM)")
    parser.add_argument("--key", help="its key (PEM)")
    parser.add_argument("--rounds", type=int, help="end after so many accepted updates")
    parser.add_argument("--budget-seconds", type=float, default=float("inf"), help="end after so long")
    parser.add_argument(
        "--budget-bytes",
        type=float,
        default=float("inf"),
        help="end before more than this is sent and received",
    )
    parser.add_argument(
        "--agreed", type=Path, help="the job's file as this device agreed to it; servers must protect it so"
    )
    parser.add_argument(
        "--registrar", default="", help="public key (hex) of who certifies signing keys, as its operator told"
    )
    parser.add_argument(
        "--signing-certificate",
        default="",
        help="this device's, from that operator (hex); else a server is asked",
    )
    given = parser.parse_args(arguments)
    clock = Clock()
    began = clock.now()
    try:
        token = given.token_file.read_text(encoding="ascii").strip() if given.token_file else ""
        connected = HttpTransport(
            given.server, token, ca=given.ca, certificate=given.certificate, key=given.key,
            first=client_number(given.client),
        )  # fmt: skip
    except (OSError, ValueError) as error:  # an address that is none, a file that cannot be read
        parser.exit(1, f"error: {error}\n")
    with connected as transport:
        place = given.state or Path(".headwater-device") / given.job / quote(given.client, safe="")
        try:
            job = fetch_job(transport, given.job, clock, min(given.budget_seconds, 30.0))
            agreed = None if given.agreed is None else read_job(given.agreed)
            inputs, labels = own_rows(job, given.data)
            folder = DeviceFolder(place)
            require_terms(job, folder, agreed)
            terms = with_identity(
                terms_of(job), job, given.client, folder, transport, clock,
                registrar=given.registrar, certificate=given.signing_certificate,
            )  # fmt: skip
            keep_terms(job, folder)
        except (OSError, ValueError) as error:  # no such job, no such file, or rows that do not fit
            parser.exit(1, f"error: {error}\n")
        device = Device(
            given.client, terms, numpy_trainer(job, given.client, inputs, labels), folder, began,
            random.SystemRandom().random, budget=Budget(given.rounds, given.budget_seconds, given.budget_bytes),
        )  # fmt: skip
        done = run_device(device, transport, clock, began + given.budget_seconds)
    print(json.dumps(summary(device, done)))
    if done.why == "refused":
        sys.exit(1)
