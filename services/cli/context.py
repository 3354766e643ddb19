"""What every command shares: the global options, wherever on the command line they stand."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from services.settings.load import Loaded
    from services.settings.model import Settings

Format = Literal["table", "json"]
DEFAULT_FILE: Final = Path("headwater.toml")
FILE_VARIABLE: Final = "HEADWATER_CONFIG"
_GLOBAL: Final = ("--config", "--set", "--format")


@dataclass(frozen=True, slots=True)
class Options:
    """The global options, as given."""

    config: Path | None
    overrides: tuple[str, ...]
    format: Format

    @property
    def json(self) -> bool:
        """Whether standard output is JSON alone."""
        return self.format == "json"

    def load(self) -> Loaded:
        """Read the settings. Raises SettingsError."""
        from services.settings.load import load_settings

        return load_settings(self.file(os.environ), os.environ, self.overrides)

    def settings(self) -> Settings:
        """The settings alone. Raises SettingsError."""
        return self.load().settings

    def file(self, environ: Mapping[str, str]) -> Path | None:
        """The settings file: as given, else of the environment, else ``headwater.toml`` if there is one."""
        if self.config is not None:
            return self.config
        if environ.get(FILE_VARIABLE):
            return Path(environ[FILE_VARIABLE])
        return DEFAULT_FILE if DEFAULT_FILE.exists() else None


def hoist(arguments: Sequence[str]) -> list[str]:
    """``arguments`` with the global options moved to the front, where the parser expects them.

    So ``headwater demo --format json`` and ``headwater --format json demo`` mean the same.
    """
    front: list[str] = []
    rest: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--":
            rest += [argument, *remaining]
        elif argument in _GLOBAL:
            front += [argument, *(value for value in [next(remaining, None)] if value is not None)]
        elif argument.startswith(tuple(f"{name}=" for name in _GLOBAL)):
            front.append(argument)
        else:
            rest.append(argument)
    return front + rest
