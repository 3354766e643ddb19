"""A command of ``headwater`` run in the test's own process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from services.cli.app import main
from services.processes import limit_threads

Run = Callable[..., tuple[int, str, str]]


def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str
) -> Run:
    """Runs the command ``words`` with more arguments, in ``folder``, and gives its code, output and errors."""
    monkeypatch.chdir(folder)
    for name in [name for name in os.environ if name.startswith("HEADWATER")]:
        monkeypatch.delenv(name)
    environ: dict[str, str] = {}
    limit_threads(environ)
    for name, value in environ.items():  # the command sets them for its process: put them back
        monkeypatch.setenv(name, value)

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main((*words, *arguments))
        printed = capsys.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), printed.out, printed.err

    return run
