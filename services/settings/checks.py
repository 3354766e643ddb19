"""Checks that no single setting's type can express: addresses, keys, what belongs together."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from pydantic import SecretStr

from services.settings.model import FederationSettings, ModelSettings, ParameterSettings, Settings
from services.settings.problems import SettingProblem
from services.settings.shards import ALLOWED as SHARDS
from services.settings.shards import written_shards
from services.wan.conditions import FORM as LINK_FORM
from services.wan.conditions import parse_conditions

SCOPES: Final = ("read", "write", "admin")
MAX_EXPIRY_S: Final = 2**31 - 1
MIN_FTRL_RATE: Final = 1e-6
_HASHED_KEY: Final = re.compile(rf"({'|'.join(SCOPES)}):[0-9a-f]{{64}}")
_ADDRESS: Final = "HOST:PORT, such as 127.0.0.1:8080 or [::1]:8080; port 0 lets the system choose"
_REACHED: Final = "HOST:PORT of a parameter server, each once"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a process listens or is reached."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Read ``HOST:PORT``. Raises ValueError saying what is wrong."""
    host, colon, port = text.rpartition(":")
    if not colon or not host:
        raise ValueError("is not HOST:PORT")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("an IPv6 host needs brackets, as in [::1]:8080")
    if not port.isascii() or not port.isdecimal() or int(port) > 65_535:
        raise ValueError(f"{port!r} is not a port between 0 and 65535")
    return Address(host, int(port))


def check(settings: Settings) -> Iterator[SettingProblem]:
    """What is wrong in ``settings`` beyond the types; the origin is left for the caller to fill in."""
    addresses = {
        "api.listen": settings.api.listen,
        "api.advertise": settings.api.advertise,
        "parameters.listen": settings.parameters.listen,
        "parameters.advertise": settings.parameters.advertise,
        "wan.control": settings.wan.control,
        "wan.advertise": settings.wan.advertise,
        "federation.listen": settings.federation.listen,
        "federation.advertise": settings.federation.advertise,
    }
    for name, text in addresses.items():
        if text is not None and "://" not in text:
            try:
                parse_address(text)
            except ValueError as error:
                yield SettingProblem(name, text, "", str(error), allowed=_ADDRESS)
    yield from _check_keys(settings)
    yield from _check_rpc(settings)
    yield from _check_model(settings.model)
    yield from _check_replicas(settings.parameters)
    yield from _check_sync(settings)
    yield from _check_links(settings)
    yield from _check_federation(settings.federation)
    if settings.trainer.count > settings.log.partitions:
        yield SettingProblem(
            "trainer.count",
            str(settings.trainer.count),
            "",
            f"each trainer reads a partition of its own, and log.partitions is {settings.log.partitions}",
            f"set log.partitions={settings.trainer.count} before the first start, or fewer trainers",
            "a whole number from 1 to log.partitions",
        )


def _check_keys(settings: Settings) -> Iterator[SettingProblem]:
    yield from _check_hashed("api.keys", settings.api.keys)
    try:
        open_to_others = not parse_address(settings.api.listen).loopback
    except ValueError:
        return
    if open_to_others and not settings.api.keys:
        yield SettingProblem(
            "api.listen",
            settings.api.listen,
            "",
            "others could reach this address, and no key is set",
            "make a key with `headwater config new-key admin` and put it into api.keys",
            "a loopback address such as 127.0.0.1:8080, or any address together with api.keys",
        )


def _check_hashed(name: str, keys: Iterable[SecretStr]) -> Iterator[SettingProblem]:
    for number, key in enumerate(keys, 1):
        if not _HASHED_KEY.fullmatch(key.get_secret_value()):
            yield SettingProblem(
                name,
                "**********",
                "",
                f"entry {number} is not a hashed key",
                "make one with `headwater config new-key read`",
                f"SCOPE:SHA256 with a scope of {', '.join(SCOPES)} and 64 lower-case hexadecimal digits",
            )


def _check_federation(federation: FederationSettings) -> Iterator[SettingProblem]:
    """Whom federation's servers let in, and what an edge needs."""
    yield from _check_hashed("federation.keys", federation.keys)
    for name, given, needs, other in (
        ("certificate", federation.certificate, "certificate_key", federation.certificate_key),
        ("certificate_key", federation.certificate_key, "certificate", federation.certificate),
        ("client_ca", federation.client_ca, "certificate", federation.certificate),
        ("create_certificate", federation.create_certificate or None, "certificate", federation.certificate),
    ):
        if given is not None and other is None:
            yield SettingProblem(
                f"federation.{name}", str(given), "", f"without federation.{needs} it is of no use",
                f"set federation.{needs}", f"a file, together with federation.{needs}",
            )  # fmt: skip
    store = federation.store.get_secret_value()
    if store and not store.startswith(("sqlite:", "redis://", "rediss://")):
        allowed = "sqlite:FOLDER, redis://HOST:PORT/DB, rediss://..., or nothing"
        yield SettingProblem("federation.store", "**********", "", "is no store", allowed=allowed)
    if federation.role == "edge" and not federation.parent.startswith(("http://", "https://")):
        reason = "an edge needs the address of its parent"
        yield SettingProblem("federation.parent", federation.parent, "", reason, allowed="https://HOST:PORT")
    if federation.role == "edge" and federation.token_file is None:
        reason, step = "an edge needs its token", "make one with `headwater fl token JOB NAME --edge`"
        yield SettingProblem("federation.token_file", "", "", reason, step, "a file")
    if federation.role == "edge" and not federation.job:
        yield SettingProblem("federation.job", "", "", "an edge serves one job", allowed="a job's name")
    try:
        open_to_others = not parse_address(federation.listen).loopback
    except ValueError:
        return
    lacking = [
        what
        for what, there in (
            ("federation.certificate", federation.certificate is not None),
            (
                "federation.tokens or federation.client_ca",
                federation.tokens or federation.client_ca is not None,
            ),
            ("federation.keys", bool(federation.keys) or federation.role == "edge"),
        )
        if not there
    ]
    if open_to_others and lacking:
        yield SettingProblem(
            "federation.listen",
            federation.listen,
            "",
            f"others could reach this address, and there is no {', no '.join(lacking)}",
            f"set {', '.join(lacking)}",
            "a loopback address, or any address with TLS, tokens or client certificates, and an operator's key",
        )


def _check_replicas(parameters: ParameterSettings) -> Iterator[SettingProblem]:
    if parameters.replicas > parameters.servers:
        yield SettingProblem(
            "parameters.replicas",
            str(parameters.replicas),
            "",
            f"each replica of a shard is on a server of its own, and parameters.servers is {parameters.servers}",
            f"set parameters.servers={parameters.replicas}, or fewer replicas",
            "a whole number from 1 to parameters.servers",
        )
    elif parameters.replication == "quorum" and parameters.replicas == 2:
        yield SettingProblem(
            "parameters.replicas",
            "2",
            "",
            "with replication = quorum, pushes stop when either of two replicas dies",
            "set parameters.replicas=3, or parameters.replication=chain",
            "1, or 3 and more, with parameters.replication=quorum",
        )


def _check_sync(settings: Settings) -> Iterator[SettingProblem]:
    """Whom a region follows, and what it writes."""
    sync, seen = settings.sync, set[Address]()
    for text in sync.upstreams:
        try:
            address = parse_address(text)
        except ValueError as error:
            yield SettingProblem("sync.upstreams", text, "", str(error), allowed=_REACHED)
            continue
        if address.port == 0 or address in seen:
            reason = "stands here twice" if address.port else "is no address to connect to"
            yield SettingProblem("sync.upstreams", text, "", reason, allowed=_REACHED)
        elif text in (settings.parameters.listen, settings.parameters.advertise):
            reason = "is this region's own parameter server"
            yield SettingProblem("sync.upstreams", text, "", reason, allowed=_REACHED)
        seen.add(address)
    try:
        written = written_shards(settings)
    except ValueError as error:
        yield SettingProblem("sync.writes", sync.writes, "", str(error), allowed=SHARDS)
        return
    if not sync.upstreams and len(written) < settings.parameters.shards:
        yield SettingProblem(
            "sync.writes",
            sync.writes,
            "",
            "the other shards come from nowhere, since sync.upstreams names no region that writes them",
            "set sync.upstreams to the parameter servers of a region that does",
            "auto or all, where there are no upstreams",
        )


def _check_model(model: ModelSettings) -> Iterator[SettingProblem]:
    """What the parameter servers would refuse in a model's tables."""
    if 0.0 < model.guard < 1.0:
        reason = "would refuse ordinary gradients"
        yield SettingProblem("model.guard", str(model.guard), "", reason, allowed="0, or at least 1")
    if model.expiry is not None and model.expiry > MAX_EXPIRY_S:
        reason, allowed = "is longer than 68 years", "a duration, or nothing for never"
        yield SettingProblem("model.expiry", str(model.expiry), "", reason, allowed=allowed)
    kinds = {
        "embedding": (model.embedding_optimiser, model.embedding_rate, model.embedding_l2),
        "dense": (model.dense_optimiser, model.dense_rate, model.dense_l2),
    }
    for what, (kind, rate, l2) in kinds.items():
        if kind == "sgd" and rate * l2 > 1.0:
            reason = f"sgd's rate of {rate:g} times it is above 1: each step would jump over 0"
            yield SettingProblem(
                f"model.{what}_l2", str(l2), "", reason, f"at most {1 / rate:g} with this rate"
            )
        if kind == "ftrl" and rate < MIN_FTRL_RATE:
            reason = "ftrl divides by it"
            yield SettingProblem(
                f"model.{what}_rate", str(rate), "", reason, allowed="at least 1e-6 with ftrl"
            )


def _check_links(settings: Settings) -> Iterator[SettingProblem]:
    """Emulated links: each of its own name and address, with conditions that can be."""
    names, places = set[str](), set[Address]()
    for link in settings.wan.links:
        found = [_unlike(link.conditions), _unlike(link.back or ""), _unreached(link.target)]
        if link.name in names:
            found.append("another link has this name")
        try:
            listen = parse_address(link.listen)
            if listen.port and listen in places:
                found.append(f"another link listens at {listen}")
            places.add(listen)
        except ValueError as error:
            found.append(f"listen = {link.listen!r} {error}")
        names.add(link.name)
        for reason in filter(None, found):
            yield SettingProblem("wan.links", link.name, "", reason, allowed=f"conditions: {LINK_FORM}")


def _unlike(conditions: str) -> str:
    """Why ``conditions`` are none of a link; an empty text where they are."""
    try:
        parse_conditions(conditions)
    except ValueError as error:
        return str(error)
    return ""


def _unreached(target: str) -> str:
    try:
        port = parse_address(target).port
    except ValueError as error:
        return f"target = {target!r} {error}"
    return "" if port else f"target = {target!r} has no port"


def _check_rpc(settings: Settings) -> Iterator[SettingProblem]:
    """Where our processes can be reached from elsewhere, or reach elsewhere, calls need keys."""
    if settings.rpc.create_keys and settings.rpc.keys is None:
        yield SettingProblem(
            "rpc.create_keys", "true", "", "no folder is named", "set rpc.keys=FOLDER", "true beside rpc.keys"
        )
    if settings.rpc.keys is not None or settings.rpc.insecure:
        return
    addresses = [
        ("parameters.listen", settings.parameters.listen, "others could reach this address"),
        ("parameters.advertise", settings.parameters.advertise, "others could reach this address"),
        *(("sync.upstreams", address, "this is another machine") for address in settings.sync.upstreams),
        ("wan.control", settings.wan.control, "others could reach this address"),
        ("wan.advertise", settings.wan.advertise, "others could reach this address"),
        *(("wan.links", link.listen, "others could reach this address") for link in settings.wan.links),
    ]
    for name, text, why in addresses:
        try:
            if text is None or parse_address(text).loopback:
                continue
        except ValueError:
            continue
        yield SettingProblem(
            name,
            text,
            "",
            f"{why}, and calls between processes have no keys",
            "make keys with `headwater keys create FOLDER` and set rpc.keys=FOLDER",
            "a loopback address, any address together with rpc.keys, or rpc.insecure = true where a network "
            "of their own keeps everybody else away",
        )
