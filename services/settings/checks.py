"""Checks that no single setting's type can express: addresses, keys, what belongs together."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from services.settings.model import Settings
from services.settings.problems import SettingProblem

SCOPES: Final = ("read", "write", "admin")
_HASHED_KEY: Final = re.compile(rf"({'|'.join(SCOPES)}):[0-9a-f]{{64}}")
_ADDRESS: Final = "HOST:PORT, such as 127.0.0.1:8080 or [::1]:8080; port 0 lets the system choose"


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
    }
    for name, text in addresses.items():
        if text is not None and "://" not in text:
            try:
                parse_address(text)
            except ValueError as error:
                yield SettingProblem(name, text, "", str(error), allowed=_ADDRESS)
    yield from _check_keys(settings)
    yield from _check_rpc(settings)
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
    for number, key in enumerate(settings.api.keys, 1):
        if not _HASHED_KEY.fullmatch(key.get_secret_value()):
            yield SettingProblem(
                "api.keys",
                "**********",
                "",
                f"entry {number} is not a hashed key",
                "make one with `headwater config new-key read`",
                f"SCOPE:SHA256 with a scope of {', '.join(SCOPES)} and 64 lower-case hexadecimal digits",
            )
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


def _check_rpc(settings: Settings) -> Iterator[SettingProblem]:
    """Where our processes can be reached from elsewhere, calls need keys."""
    if settings.rpc.create_keys and settings.rpc.keys is None:
        yield SettingProblem(
            "rpc.create_keys", "true", "", "no folder is named", "set rpc.keys=FOLDER", "true beside rpc.keys"
        )
    if settings.rpc.keys is not None or settings.rpc.insecure:
        return
    addresses = {
        "parameters.listen": settings.parameters.listen,
        "parameters.advertise": settings.parameters.advertise,
    }
    for name, text in addresses.items():
        try:
            if text is None or parse_address(text).loopback:
                continue
        except ValueError:
            continue
        yield SettingProblem(
            name,
            text,
            "",
            "others could reach this address, and calls between processes have no keys",
            "make keys with `headwater keys create FOLDER` and set rpc.keys=FOLDER",
            "a loopback address, any address together with rpc.keys, or rpc.insecure = true where a network "
            "of their own keeps everybody else away",
        )
