"""How commands reach the parameter servers, and how they tell sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from services.cli.exits import Exit
from services.cli.failures import CommandFailed

if TYPE_CHECKING:
    from services.parameter_server.client.survey import Survey, Surveyor
    from services.settings.model import Settings

_START = "Start them with `headwater up`, or name their settings with --config."


@contextmanager
def surveying(settings: Settings) -> Iterator[Surveyor]:
    """What looks at the parameter servers. Raises CommandFailed (NOT_RUNNING) where none ever started."""
    from services.backends import open_coordination, open_security
    from services.parameter_server.client.directory import MapMissing
    from services.parameter_server.client.survey import Surveyor
    from services.rpc.client import RpcClient

    if settings.coordination.backend == "sqlite" and not settings.data.dir.is_dir():
        raise CommandFailed(Exit.NOT_RUNNING, f"nothing runs on {settings.data.dir}", _START)
    with closing(open_coordination(settings)) as store, closing(RpcClient(open_security(settings))) as rpc:
        try:
            yield Surveyor(store, rpc)
        except MapMissing as error:
            raise CommandFailed(Exit.NOT_RUNNING, str(error), _START) from error


def answered(surveyor: Surveyor) -> Survey:
    """What all servers say. Raises CommandFailed (NOT_RUNNING) where none answers."""
    survey = surveyor.look()
    if not survey.servers:
        raise CommandFailed(
            Exit.NOT_RUNNING, f"no parameter server answers ({', '.join(survey.silent)})", _START
        )
    return survey


def size(count: int | None) -> str:
    """Bytes for people."""
    if count is None:
        return ""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1_024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1_024
    return f"{value:.1f} TiB"
