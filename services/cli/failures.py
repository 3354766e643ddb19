"""Expected failures: which exit code each has, and how it is told without a traceback."""

from __future__ import annotations

import errno
import sys
from typing import Final

from services.cli.exits import HELP, Exit


class CommandFailed(Exception):
    """A command cannot go on for a reason that its user can do something about."""

    def __init__(self, code: Exit, message: str, next_step: str = "") -> None:
        self.code = code
        self.next_step = next_step
        super().__init__(message)


# By name, so that no command has to import what another one may raise.
_CODES: Final = {
    "services.settings.problems.SettingsError": Exit.SETTINGS,
    "services.supervisor.folder.AlreadyRunning": Exit.ALREADY_RUNNING,
    "services.supervisor.folder.PlacesUnreadable": Exit.SETTINGS,
    "services.supervisor.supervisor.NotReady": Exit.NOT_READY,
    "services.demo.stack.StackFailed": Exit.NOT_READY,
    "services.datasets.errors.BadRows": Exit.BAD_INPUT,
    "services.datasets.importer.NotProcessed": Exit.NOT_PROCESSED,
    "services.datasets.errors.DatasetUnsuited": Exit.SETTINGS,
    "services.datasets.errors.DatasetError": Exit.DATA_UNAVAILABLE,
    "services.demo.rest.RestError": Exit.REFUSED,
    "services.freshness.measure.MeasurementFailed": Exit.NOT_RUNNING,
    "services.messagelog.contract.LogError": Exit.BACKEND_UNAVAILABLE,
    "services.coordination.contract.CoordinationError": Exit.BACKEND_UNAVAILABLE,
    "services.rpc.errors.KeysError": Exit.SETTINGS,
    "services.wan.types.AddressUnusable": Exit.SETTINGS,
    "services.parameter_server.types.ParametersUnavailable": Exit.BACKEND_UNAVAILABLE,
    "federated.job_sections.JobRefused": Exit.BAD_INPUT,
    "services.federation.edge.EdgeRefused": Exit.SETTINGS,
    "services.federation.certificates.CertificateFailed": Exit.SETTINGS,
    "federated.rounds.store.StoreUnavailable": Exit.BACKEND_UNAVAILABLE,
    "featurestore.online.StoreError": Exit.BACKEND_UNAVAILABLE,
    "featurestore.feature.SchemaError": Exit.SETTINGS,
}


_EXTRAS: Final = {
    "cryptography": "privacy",
    "dp_accounting": "privacy",
    "gmpy2": "vertical",
    "ray": "ray",
    "rbcl": "vertical",
    "sklearn": "datasets",
    "tenseal": "vertical",
}
"""Packages that only some commands need, and the extra that brings each."""


def code_of(error: BaseException) -> Exit | None:
    """The exit code of an expected failure (the nearest class that has one), None for an unexpected one."""
    if isinstance(error, CommandFailed):
        return error.code
    if isinstance(error, KeyboardInterrupt):
        return Exit.INTERRUPTED
    if _extra_of(error):
        return Exit.SETTINGS
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return Exit.ADDRESS_IN_USE
    names = (f"{base.__module__}.{base.__qualname__}" for base in type(error).__mro__)
    return next((_CODES[name] for name in names if name in _CODES), None)


def tell(error: BaseException, code: Exit) -> None:
    """Print the cause and the next step on standard error."""
    step = error.next_step if isinstance(error, CommandFailed) and error.next_step else HELP[code]
    text = str(error)
    if extra := _extra_of(error):
        text, step = f"this needs a package that is not there: {text}", f"pip install 'headwater[{extra}]'"
    if text:
        print(f"error: {text}", file=sys.stderr)
    print(f"({code.value}) {step}", file=sys.stderr)


def _extra_of(error: BaseException) -> str:
    """The extra that brings the package which ``error`` misses, "" if it is another error."""
    missing = error.name if isinstance(error, ModuleNotFoundError) and error.name else ""
    return _EXTRAS.get(missing.split(".")[0], "")
