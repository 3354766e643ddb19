"""A certificate for servers that share a folder, made by the first of them, with an authority of its own::

    server.pem    the servers' certificate
    server.key    its key: whoever has it can pass for a server
    ca.pem        the authority's certificate, which devices and operators are given

The authority's key is thrown away: it has nothing more to sign, and nobody can steal it. New names, or a new key, are
a new folder. Where devices come from elsewhere, servers want a certificate of an authority that devices know already.
"""

from __future__ import annotations

import datetime
import ipaddress
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from services.settings.model import FederationSettings

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

AUTHORITY: Final = "ca.pem"
VALID_DAYS: Final = 5 * 365
_EARLY: Final = datetime.timedelta(days=1)
"""Devices' clocks may be behind."""

log = logging.getLogger(__name__)


class CertificateFailed(OSError):
    """No certificate could be made where the settings want one."""


def ensure_certificate(federation: FederationSettings) -> None:
    """Make the certificate's folder if it is not there and ``create_certificate`` names anybody. Several processes may
    do so at once: all find the files of one of them. Raises CertificateFailed."""
    if not federation.create_certificate or federation.certificate is None:
        return
    folder = federation.certificate.parent
    if folder.exists():
        return
    key = federation.certificate_key
    if key is None or key.parent != folder:
        raise CertificateFailed(f"federation.certificate_key must lie in {folder}, which is made with it")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as beside:
            made = Path(beside) / "made"
            # Only the key is a secret: who watches the servers may read the authority's certificate.
            made.mkdir(mode=0o755)
            _fill(made, federation.certificate.name, key.name, federation.create_certificate)
            # Fails where there are files already: of two processes that make the same folder, one does.
            made.rename(folder)
    except OSError as error:
        if not folder.exists():
            raise CertificateFailed(f"{folder} cannot be made: {error.strerror}") from error
        return
    log.info("made a certificate for %s in %s", ", ".join(federation.create_certificate), folder)


def _fill(folder: Path, certificate: str, key: str, names: Sequence[str]) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    authority, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    root = _authority(authority)
    _write(folder / AUTHORITY, root.public_bytes(Encoding.PEM), 0o644)
    _write(folder / certificate, _server(own, authority, root, names).public_bytes(Encoding.PEM), 0o644)
    _write(folder / key, own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)


def _authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import NameOID

    # Two authorities of the same name would be taken for each other.
    name = f"Headwater federation {x509.random_serial_number():x}"[:64]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    return (
        _dated(x509.CertificateBuilder(subject, subject, key.public_key()))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _server(
    key: ec.EllipticCurvePrivateKey,
    authority: ec.EllipticCurvePrivateKey,
    root: x509.Certificate,
    names: Sequence[str],
) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    of_root = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    return (
        _dated(x509.CertificateBuilder(root.subject, subject, key.public_key()))
        .add_extension(x509.SubjectAlternativeName([_general(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(of_root, critical=False)
        .sign(authority, hashes.SHA256())
    )


def _dated(builder: x509.CertificateBuilder) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    ends = now + datetime.timedelta(days=VALID_DAYS)
    return (
        builder.serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLY)
        .not_valid_after(ends)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general(name: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write(path: Path, content: bytes, mode: int) -> None:
    # Not "open, then chmod": nobody may read a key in between.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
