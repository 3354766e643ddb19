from services.settings.checks import Address, parse_address
from services.settings.load import Loaded, Origin, load_settings
from services.settings.model import Settings
from services.settings.problems import SettingProblem, SettingsError

__all__ = [
    "Address",
    "Loaded",
    "Origin",
    "SettingProblem",
    "Settings",
    "SettingsError",
    "load_settings",
    "parse_address",
]
