"""Headwater's own processes under a supervisor, from settings alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from services.settings.checks import parse_address
from services.settings.model import Settings
from services.settings.problems import SettingProblem, SettingsError
from services.settings.show import to_toml
from services.supervisor.folder import RunFolder
from services.supervisor.membership import MembershipProbe
from services.supervisor.plan import plan
from services.supervisor.supervisor import Supervisor


@contextmanager
def supervised(settings: Settings) -> Iterator[Supervisor]:
    """Run every process that ``settings`` ask for within the block.

    The children read the settings from a file in the run folder, so that what was resolved here, whatever it
    came from, is what all of them see. Raises AlreadyRunning, SettingsError for what only suits one process a
    machine, or what the coordination backend raises.
    """
    _check(settings)
    from services.backends import open_coordination

    data_dir = settings.data.dir.absolute()
    resolved = settings.model_copy(update={"data": settings.data.model_copy(update={"dir": data_dir})})
    folder = RunFolder(data_dir)
    with folder.locked(), closing(open_coordination(resolved)) as coordination:
        folder.forget_announced()
        folder.write_settings(to_toml(resolved))
        specs = plan(resolved, folder.settings_file)
        with Supervisor(specs, folder, MembershipProbe(coordination)) as supervisor:
            yield supervisor


def _check(settings: Settings) -> None:
    """Several parameter servers on one machine cannot share a port."""
    chosen = settings.parameters
    if chosen.servers > 1 and parse_address(chosen.listen).port:
        raise SettingsError(
            (
                SettingProblem(
                    "parameters.listen",
                    chosen.listen,
                    "settings",
                    f"{chosen.servers} parameter servers on one machine cannot share a port",
                    "let the system choose: parameters.listen=127.0.0.1:0",
                ),
            )
        )
