"""Anybody's numbers as clients: a folder with a CSV or npz for each, or one CSV with a column that names the client.

``federated.labelled`` has the format of the CSVs, which a device reads of its own, too.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from federated.labelled import LabelledRows, RowsRefused, few, read_labelled
from services.datasets.errors import BadRows, DatasetDamaged, DatasetError, RowError
from services.datasets.federations.owned import Owned, coded

_TEST: Final = "test"

Floats = npt.NDArray[np.float32]


def client_files(folder: Path) -> list[Path]:
    """The CSV and npz files of a folder, in order of name."""
    return sorted(path for path in folder.iterdir() if path.suffix in (".csv", ".npz"))


def read_folder(folder: Path) -> Owned:
    """One client for each file, named like it; ``test.csv`` or ``test.npz`` are the test rows of all.

    CSV: the same features in each file. npz: arrays ``inputs`` [n, ...] and ``labels`` [n]. Raises DatasetError,
    DatasetDamaged, BadRows.
    """
    files = client_files(folder)
    if not [path for path in files if path.stem != _TEST]:
        raise DatasetError(f"{folder} has no client's .csv or .npz")
    names: list[str] = []
    inputs: list[Floats] = []
    labels: list[object] = []
    owners: list[npt.NDArray[np.int64]] = []
    columns: tuple[str, ...] | None = None
    for path in files:
        if path.suffix == ".csv":
            read = _read_csv(path)
            rows, row_labels, found = read.inputs, list[object](read.labels), read.features
        else:
            rows, row_labels = _read_npz(path)
            found = tuple(f"feature {column}" for column in range(rows.shape[1]))
        if columns is not None and found != columns:
            raise DatasetDamaged(f"{path} has the features {few(found)}, but {files[0].name} {few(columns)}")
        columns = found
        if path.stem == _TEST:
            owner = -1
        else:
            if path.stem in names:
                raise DatasetError(f"{folder} has {path.stem}.csv and {path.stem}.npz; keep one")
            owner = len(names)
            names.append(path.stem)
        inputs.append(rows)
        labels.extend(row_labels)
        owners.append(np.full(len(rows), owner, np.int64))
    return _owned(folder, np.concatenate(inputs), labels, np.concatenate(owners), names)


def read_table(path: Path) -> Owned:
    """One client for each value of the column ``client`` (or ``client_id``, ``user``, ``user_id``), in order of first
    appearance. Raises DatasetError, BadRows."""
    read = _read_csv(path, by_client=True)
    number: dict[str, int] = {}
    owners = np.array([number.setdefault(client, len(number)) for client in read.clients], np.int64)
    return _owned(path, read.inputs, read.labels, owners, list(number))


def _owned(
    path: Path,
    inputs: Floats,
    labels: Sequence[object],
    owners: npt.NDArray[np.int64],
    names: Sequence[str],
) -> Owned:
    codes, classes = coded(labels, str(path))
    test = owners < 0
    return Owned(
        path.stem,
        inputs[~test],
        codes[~test],
        len(classes),
        owners[~test],
        tuple(names),
        test=(inputs[test], codes[test]) if test.any() else None,
        source=str(path),
    )


def _read_csv(path: Path, *, by_client: bool = False) -> LabelledRows:
    try:
        return read_labelled(path, by_client=by_client)
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror or error}") from error
    except RowsRefused as error:
        if error.problems[0][0] <= 1:  # the first line or the whole file
            raise DatasetError(str(error)) from error
        wrong = tuple(RowError(path.name, line, what) for line, what in error.problems)
        raise BadRows(wrong, error.total) from error


def _read_npz(path: Path) -> tuple[Floats, list[object]]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays: dict[str, npt.NDArray[Any]] = {
                name: archive[name] for name in ("inputs", "labels") if name in archive
            }
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DatasetDamaged(f"{path} is no npz of plain arrays: {error}") from error
    if len(arrays) < 2:
        raise DatasetDamaged(
            f"{path} needs the arrays 'inputs' and 'labels'; np.savez(path, inputs=x, labels=y)"
        )
    inputs, labels = arrays["inputs"], arrays["labels"]
    if labels.ndim != 1 or inputs.ndim < 2 or len(inputs) != len(labels) or len(labels) == 0:
        raise DatasetDamaged(
            f"{path}: inputs {inputs.shape} and labels {labels.shape} are not [n, ...] and [n]"
        )
    if inputs.dtype.kind not in "fiub":
        raise DatasetDamaged(f"{path}: inputs are of type {inputs.dtype}, not numbers")
    with np.errstate(over="ignore"):
        rows = inputs.reshape(len(inputs), -1).astype(np.float32)
    if not np.isfinite(rows).all():
        raise DatasetDamaged(f"{path}: inputs have a value that is no finite 32-bit number")
    return rows, labels.tolist()
