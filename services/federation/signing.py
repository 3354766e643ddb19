"""Signing keys of devices, for jobs that do not trust their servers: certified once, at enrolment.

The registrar's key is made of the job's secret, unless the job names one of its operator: then the servers certify
nothing. Servers that are their own registrar can enrol as many devices as they like and play them themselves. A device
whose registrar was told to it by somebody else (``--registrar``) is safe against that only if the registrar is nobody
who runs the servers.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from federated.rounds import Keys, Store
from federated.secagg.keys import Registrar


class KeyTaken(ValueError):
    """The client has enrolled another signing key."""


def registrar_of(key: bytes) -> Registrar:
    """Who certifies for the servers: made of the job's secret ``key``, the same on all of them."""
    return Registrar(hmac.digest(key, b"registrar of signing keys", "sha256"))


def certify(store: Store, keys: Keys, key: bytes, client: str, public: bytes) -> bytes:
    """The registrar's signature (64 bytes) that ``client`` signs with ``public`` (32 bytes), and its own public key (32
    bytes). The first key that a client enrols is its key for good. Raises KeyTaken."""
    place = f"{keys.all}signing/{client}"

    def step(values: Mapping[str, bytes | None]) -> tuple[Mapping[str, bytes | None], bool]:
        known = values[place]
        return ({}, known == public) if known is not None else ({place: public}, True)

    if not store.transact([place], step):
        raise KeyTaken(f"{client} has enrolled another signing key")
    registrar = registrar_of(key)
    return registrar.certify(keys.job, client, public).signature + registrar.public
