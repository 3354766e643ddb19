"""What can be wrong with the settings, as values and as one exception.

Exceptions::

    SettingsError            the settings were refused; carries one problem for each wrong setting
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class SettingProblem:
    """One wrong setting: name, value (secrets masked), origin, what is wrong, a way out, what is allowed."""

    name: str
    value: str
    origin: str
    reason: str
    suggestion: str = ""
    allowed: str = ""

    def at(self, origin: str) -> SettingProblem:
        """The same problem, found in a value that came from ``origin``."""
        return replace(self, origin=origin)

    def __str__(self) -> str:
        value = f" = {self.value!r}" if self.value else ""
        lines = [f"{self.name}{value} ({self.origin}): {self.reason}"]
        if self.allowed:
            lines.append(f"    allowed: {self.allowed}")
        if self.suggestion:
            lines.append(f"    {self.suggestion}")
        return "\n".join(lines)


class SettingsError(Exception):
    """The settings were refused; ``problems`` names each wrong one."""

    def __init__(self, problems: tuple[SettingProblem, ...]) -> None:
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))
