"""A run's state in one file: numbers as JSON, columns as they are; written whole or not at all, nothing executable."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FORMAT = 1
_VALUES = "values"

Columns = dict[str, npt.NDArray[Any]]


class CheckpointRefused(ValueError):
    """A file that is no checkpoint of this run: damaged, of another format, or of other settings."""


def write_checkpoint(path: Path, run: str, values: Mapping[str, Any], columns: Columns) -> None:
    """Replace ``path`` by a checkpoint of the run with fingerprint ``run``, durably. A crash leaves the old one."""
    body = io.BytesIO()
    header = json.dumps({"format": FORMAT, "run": run, "values": values}, allow_nan=False).encode()
    np.savez(body, **{_VALUES: np.frombuffer(header, np.uint8)}, **columns)  # type: ignore[arg-type]
    write_whole(path, body.getvalue())


def read_checkpoint(path: Path, run: str) -> tuple[dict[str, Any], Columns] | None:
    """The values and columns of ``path``; None when there is none. Raises CheckpointRefused."""
    try:
        body = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
            columns = {name: arrays[name] for name in arrays.files}
        header = json.loads(columns.pop(_VALUES).tobytes())
        found, made_for, values = header["format"], header["run"], dict(header["values"])
    except (ValueError, KeyError, TypeError, OSError, zipfile.BadZipFile) as error:
        raise CheckpointRefused(f"{path} is no checkpoint: {error}") from error
    if found != FORMAT:
        raise CheckpointRefused(f"{path} is of format {found}, this program reads {FORMAT}")
    if made_for != run:
        raise CheckpointRefused(
            f"{path} belongs to a run with other settings: resume with the settings it was made with, or choose "
            "another folder"
        )
    return values, columns


def write_whole(path: Path, body: bytes) -> None:
    """Replace ``path`` by ``body``: readers and crashes see the old file or the new one."""
    beside = path.with_name(path.name + ".new")
    with open(beside, "wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
