"""What all servers share beside the rounds: the jobs there are, and the servers that live."""

from __future__ import annotations

import json
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from federated.job import FederatedJob, load_job
from federated.rounds import Desk, JobUnknown, Keys, Store, read
from federated.weights import Array
from services.federation.assembly import assemble_job
from services.federation.hosted import HostedJob
from services.federation.versions import first_record, first_state, keep_first, publish

# No job's name begins with a dot.
_JOBS: Final = ".federation/jobs"
_MEMBERS: Final = ".federation/members"
_KEY_BYTES: Final = 32
MOST_JOBS: Final = 64
SILENT: Final = 5
"""A server that has missed so many heartbeats is no longer listed."""

Values = Mapping[str, bytes | None]


class JobConflict(ValueError):
    """A job of this name is there with another definition, or there are too many."""


@dataclass(frozen=True, slots=True)
class Member:
    """A server that lives. Times are seconds since 1970 by its own clock."""

    name: str
    role: str
    address: str
    pid: int
    started_at: float
    seen_at: float
    heartbeat_s: float


class Registry:
    """Jobs and members in ``store``. Raises StoreUnavailable throughout."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def create(self, job_file: FederatedJob, first: Array | None = None) -> tuple[HostedJob, bool]:
        """Begin the job that ``job_file`` describes, from the weights ``first`` [D] or those that its seed draws; False
        when it is there already with the same definition. May be repeated after a crash at any point: the weights
        that were told first are the job's. Raises JobConflict and JobRefused."""
        job = assemble_job(job_file, secrets.token_bytes(_KEY_BYTES))
        body = job_file.to_toml().encode()
        first_key = b"" if first is None else keep_first(self._store, job.keys, first).encode()
        keys = (definition_key(job.keys), secret_key(job.keys))

        def write(values: Values) -> tuple[Values, bytes]:
            there, secret = values[keys[0]], values[keys[1]]
            if there is not None and there != body:
                raise JobConflict(
                    f"job {job.name} is there with another definition; name this one differently"
                )
            if there is not None and secret is not None:
                return {}, secret
            return {keys[0]: body, keys[1]: job.key, first_record(job.keys): first_key}, job.key

        def announce(values: Values) -> tuple[Values, None]:
            names = _list(values[_JOBS])
            if job.name in names:
                return {}, None
            if len(names) >= MOST_JOBS:
                raise JobConflict(f"there are {MOST_JOBS} jobs already; drop one")
            return {_JOBS: json.dumps([*names, job.name]).encode()}, None

        job = assemble_job(job_file, self._store.transact(keys, write))
        desk = Desk(self._store, job.rounds)
        try:
            desk.header()
            created = False
        except JobUnknown:
            publish(self._store, job, 0, 0, first_state(self._store, job), 0)
            created = desk.create()
        self._store.transact([_JOBS], announce)
        return job, created

    def names(self) -> list[str]:
        """The jobs there are, oldest first."""
        return self._store.transact([_JOBS], lambda values: ({}, _list(values[_JOBS])))

    def definition(self, name: str) -> str:
        """``name``'s file. Raises JobUnknown."""
        return self._read(name)[0]

    def job(self, name: str) -> HostedJob:
        """The job ``name``. Raises JobUnknown."""
        definition, secret = self._read(name)
        return assemble_job(load_job(tomllib.loads(definition)), secret)

    def find(self, name: str) -> FederatedJob | None:
        """``name``'s file as a job, None where there is no such job."""
        try:
            return load_job(tomllib.loads(self.definition(name)))
        except JobUnknown:
            return None

    def drop(self, name: str) -> None:
        """Forget a job and all that belongs to it."""

        def forget(values: Values) -> tuple[Values, None]:
            names = [other for other in _list(values[_JOBS]) if other != name]
            return {_JOBS: json.dumps(names).encode()}, None

        self._store.transact([_JOBS], forget)
        self._store.delete(Keys(name).all)

    def beat(self, member: Member) -> None:
        """``member`` lives; those that have been silent for too long are struck off."""

        def write(values: Values) -> tuple[Values, None]:
            living = {other.name: other for other in _members(values[_MEMBERS], member.seen_at)}
            living[member.name] = member
            return {_MEMBERS: json.dumps([asdict(other) for other in living.values()]).encode()}, None

        self._store.transact([_MEMBERS], write)

    def leave(self, name: str) -> None:
        """Strike ``name`` off."""

        def write(values: Values) -> tuple[Values, None]:
            left = [asdict(other) for other in _members(values[_MEMBERS], 0.0) if other.name != name]
            return {_MEMBERS: json.dumps(left).encode()}, None

        self._store.transact([_MEMBERS], write)

    def members(self, now: float) -> list[Member]:
        """The servers that live, by name."""
        found = read(self._store, [_MEMBERS])[0]
        return sorted(_members(found, now), key=lambda member: member.name)

    def _read(self, name: str) -> tuple[str, bytes]:
        try:
            keys = Keys(name)
        except ValueError as error:
            raise JobUnknown(str(error)) from None
        places = (definition_key(keys), secret_key(keys), keys.header)
        found = read(self._store, places)
        definition, secret, header = found
        if definition is None or secret is None or header is None:
            raise JobUnknown(f"no job {name}")
        return definition.decode(), secret


def definition_key(keys: Keys) -> str:
    """Record: the job's file."""
    return f"{keys.all}definition"


def secret_key(keys: Keys) -> str:
    """Record: the key that signs tickets and enrolments. Whoever reads the store can be anybody: it is as secret as
    the store is."""
    return f"{keys.all}secret"


def _list(body: bytes | None) -> list[str]:
    return [] if body is None else [str(name) for name in json.loads(body)]


def _members(body: bytes | None, now: float) -> list[Member]:
    found = [] if body is None else [Member(**row) for row in json.loads(body)]
    return [member for member in found if now - member.seen_at <= SILENT * member.heartbeat_s]
