"""A device's signing key, for jobs that do not trust their servers, and the registrar's word for it.

The key is made here and stays here. It is certified once: by the servers' registrar when the device first joins, or by
the operator's, who is handed the public key and gives back a certificate. A device keeps the registrar that it was told
(``registrar``), else the first one it saw: another one later is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import quote

from federated.client_folder import DeviceFolder
from federated.client_http import Call, Clock, HttpTransport, NetworkLost

if TYPE_CHECKING:
    from federated.secagg.client import Identity

_KEY_BYTES = 32
_SIGNATURE_BYTES = 64
_RETRY_S = 1.0


class IdentityRefused(ValueError):
    """This device cannot sign for the job: no certificate, one of another registrar, or damaged files."""


def public_key(folder: DeviceFolder) -> bytes:
    """The public key of this device's signing key, which is made if there is none."""
    from federated.secagg.keys import SigningKey

    return SigningKey(_seed(folder)).public


def identity_of(
    folder: DeviceFolder,
    job: str,
    client: str,
    ask: Callable[[bytes], bytes],
    registrar: bytes | None = None,
    certificate: bytes | None = None,
) -> tuple[Identity, bytes]:
    """This device's identity, and the registrar's public key that it goes by.

    ``registrar``: the one that was told, None for the first that is seen. ``certificate``: its signature (64 bytes), as
    the operator gave it; else ``ask`` gets the public key certified by a server, which replies with the signature and
    the registrar's public key. Raises IdentityRefused, and what ``ask`` raises.
    """
    from federated.secagg.client import Identity
    from federated.secagg.keys import Certificate, CertificateRefused, SigningKey

    signing = SigningKey(_seed(folder))
    kept = folder.certificate()
    if certificate is not None:
        if registrar is None:
            raise IdentityRefused("a certificate needs the registrar that signed it")
        kept = certificate + registrar
    elif kept is None:
        kept = ask(signing.public)
    if len(kept) != _SIGNATURE_BYTES + _KEY_BYTES:
        raise IdentityRefused(f"{len(kept)} bytes are no certificate")
    signature, by = kept[:_SIGNATURE_BYTES], kept[_SIGNATURE_BYTES:]
    if registrar is not None and by != registrar:
        raise IdentityRefused(f"the certificate is of registrar {by.hex()}, not of {registrar.hex()}")
    found = Certificate(job, client, signing.public, signature)
    try:
        found.check(by, job, client)
    except CertificateRefused as error:
        raise IdentityRefused(str(error)) from error
    folder.keep_certificate(kept)
    return Identity(signing, found), by


def certified_by_server(
    transport: HttpTransport, job: str, client: str, clock: Clock, seconds: float
) -> Callable[[bytes], bytes]:
    """An ``ask`` that tries for ``seconds``. It raises IdentityRefused."""
    path = f"/v1/fl/jobs/{quote(job, safe='')}/clients/{quote(client, safe='')}/certificate"

    def ask(public: bytes) -> bytes:
        ends = clock.now() + seconds
        while True:
            try:
                answer = transport.send(Call("POST", path, public))
                if answer.status == 200:
                    return answer.body
                if answer.status < 500 and answer.status not in (408, 429):
                    raise IdentityRefused(
                        f"status {answer.status}: no server certifies this device's signing key"
                    )
                why = f"status {answer.status}"
                transport.turn()
            except NetworkLost as error:
                why = str(error)
            if clock.now() + _RETRY_S > ends:
                raise IdentityRefused(f"no server certifies this device's signing key: {why}")
            clock.sleep(_RETRY_S)

    return ask


def _seed(folder: DeviceFolder) -> bytes:
    seed = folder.signing_seed()
    if seed is None:
        seed = os.urandom(_KEY_BYTES)
        folder.keep_signing_seed(seed)
    if len(seed) != _KEY_BYTES:
        raise IdentityRefused("the file signing-key is damaged: it has other than 32 bytes")
    return seed
