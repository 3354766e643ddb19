"""Anybody's numbers as clients: a folder with a CSV or npz for each, or one CSV with a column that names the client."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from services.datasets.errors import BadRows, DatasetDamaged, DatasetError, RowError
from services.datasets.federations.owned import Owned, coded
from services.datasets.rows import read_rows

CLIENT_COLUMNS: Final = ("client", "client_id", "user", "user_id")
LABEL_COLUMNS: Final = ("label", "target", "y")
_SHOWN: Final = 20
_TEST: Final = "test"
_LARGEST: Final = float(np.finfo(np.float32).max)

Floats = npt.NDArray[np.float32]


def client_files(folder: Path) -> list[Path]:
    """The CSV and npz files of a folder, in order of name."""
    return sorted(path for path in folder.iterdir() if path.suffix in (".csv", ".npz"))


def read_folder(folder: Path) -> Owned:
    """One client for each file, named like it; ``test.csv`` or ``test.npz`` are the test rows of all.

    CSV: a column ``label`` (or ``target``, ``y``), and all others are features, the same in each file. npz: arrays
    ``inputs`` [n, ...] and ``labels`` [n]. Raises DatasetError, DatasetDamaged, BadRows.
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
            rows, row_labels, _, found = _read_csv(path, client_column=None)
        else:
            rows, row_labels = _read_npz(path)
            found = tuple(f"feature {column}" for column in range(rows.shape[1]))
        if columns is not None and found != columns:
            raise DatasetDamaged(
                f"{path} has the features {_few(found)}, but {files[0].name} {_few(columns)}"
            )
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
    rows, labels, clients, _ = _read_csv(path, client_column=CLIENT_COLUMNS)
    number: dict[str, int] = {}
    owners = np.array([number.setdefault(client, len(number)) for client in clients], np.int64)
    return _owned(path, rows, labels, owners, list(number))


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


def _read_csv(
    path: Path, client_column: Sequence[str] | None
) -> tuple[Floats, list[object], list[str], tuple[str, ...]]:
    """Features [N, F], labels, clients (empty without ``client_column``), and the features' names."""
    header = _header(path)
    label = _one_of(path, header, LABEL_COLUMNS)
    client = _one_of(path, header, client_column) if client_column is not None else None
    features = tuple(name for name in header if name not in (label, client))
    if not features:
        raise DatasetError(f"{path}:1: there is no column beside {label!r}; a row needs at least one feature")
    values: list[list[float]] = []
    labels: list[object] = []
    clients: list[str] = []
    wrong: list[RowError] = []
    total = 0
    for line, cells in read_rows(path):
        problem: str | None = None
        if isinstance(cells, RowError):
            problem = cells.message
        else:
            missing = [name for name in header if name not in cells]
            if missing:
                problem = f"column {missing[0]!r} is empty"
            else:
                try:
                    row = [float(str(cells[name])) for name in features]
                    # False for NaN too.
                    if not all(abs(value) <= _LARGEST for value in row):
                        problem = "a feature is no finite 32-bit number"
                except ValueError as error:
                    problem = f"a feature is no number: {error}"
        if problem is not None:
            total += 1
            if len(wrong) < _SHOWN:
                wrong.append(RowError(path.name, line, problem))
            continue
        assert not isinstance(cells, RowError)
        values.append(row)
        labels.append(cells[label])
        if client is not None:
            clients.append(str(cells[client]))
    if total:
        raise BadRows(tuple(wrong), total)
    if not values:
        raise DatasetError(f"{path} has a header but no row")
    return np.array(values, np.float32), labels, clients, features


def _header(path: Path) -> list[str]:
    import csv

    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return next(csv.reader(file), [])
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DatasetError(f"{path}:1: {error}") from error


def _one_of(path: Path, header: Sequence[str], wanted: Sequence[str]) -> str:
    for name in wanted:
        if name in header:
            return name
    raise DatasetError(
        f"{path}:1: has the columns {_few(header)}, but none of {', '.join(wanted)}; name one of them so"
    )


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


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
