"""Headwater's own processes under a supervisor, from settings alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

from services.settings.checks import parse_address
from services.settings.model import DataSettings, Settings
from services.settings.problems import SettingProblem, SettingsError
from services.settings.show import to_toml
from services.supervisor.folder import RunFolder
from services.supervisor.membership import MembershipProbe
from services.supervisor.orphans import end_orphans
from services.supervisor.places import PlaceBook
from services.supervisor.plan import ChildSpec, plan
from services.supervisor.regions import Wanted, lay_out
from services.supervisor.supervisor import Supervisor


@contextmanager
def supervised(settings: Settings, wanted: Wanted | None = None) -> Iterator[Supervisor]:
    """Run every process that ``settings`` ask for within the block, in the regions ``wanted`` (home alone by default).

    The children read the settings from a file in the run folder of their region, so that what was resolved here,
    whatever it came from, is what all of them see. Raises AlreadyRunning, SettingsError for what only suits one
    process a machine, PlacesUnreadable, OSError where no port is free, or what the coordination backend raises.
    """
    _check(settings)
    from services.backends import open_coordination

    resolved = _absolute(settings)
    folder = RunFolder(resolved.data.dir)
    with ExitStack() as stack:
        stack.enter_context(folder.locked())
        # Before ports are looked for: what a killed supervisor left behind holds them still.
        end_orphans(folder)
        book = PlaceBook(folder.places())
        regions = lay_out(resolved, wanted or Wanted((resolved.region.name,)), book)
        folder.write_places(book.places)
        specs: list[ChildSpec] = []
        for region in regions:
            own = RunFolder(region.settings.data.dir)
            if not region.home:
                stack.enter_context(own.locked())
            own.forget_announced()
            own.write_settings(to_toml(region.settings))
            specs += plan(region, own.settings_file)
        stores = [stack.enter_context(closing(open_coordination(region.settings))) for region in regions]
        yield stack.enter_context(Supervisor(specs, folder, MembershipProbe(*stores)))


def _absolute(settings: Settings) -> Settings:
    """With folders that mean the same to every child, wherever it runs."""
    data = settings.data
    shared = None if data.shared is None else data.shared.absolute()
    return settings.model_copy(update={"data": DataSettings(dir=data.dir.absolute(), shared=shared)})


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
