"""LEAF's JSON (Caldas et al. 2018), as FEMNIST comes: users with their rows, in ``train/`` and ``test/`` or alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from services.datasets.errors import DatasetDamaged, DatasetError
from services.datasets.federations.owned import Owned, coded

_MAX_BYTES: Final = 2 * 2**30


def leaf_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Files of training and of test rows, in order of name; both empty where the folder is no LEAF folder."""
    training = sorted((folder / "train").glob("*.json")) or sorted(folder.glob("*.json"))
    return training, sorted((folder / "test").glob("*.json")) if training else []


def read_leaf(folder: Path) -> Owned:
    """Users with their rows. A user's rows in ``test/`` are what it holds out; those of users who have none in
    ``train/`` are the test rows of all. Raises DatasetError, DatasetDamaged."""
    training, test = leaf_files(folder)
    if not training:
        raise DatasetError(f"{folder} has no .json, neither in it nor in train/")
    users: dict[str, int] = {}
    inputs: list[npt.NDArray[np.float32]] = []
    labels: list[object] = []
    owners: list[npt.NDArray[np.int64]] = []
    held: list[npt.NDArray[np.bool_]] = []
    for path, is_test in [(path, False) for path in training] + [(path, True) for path in test]:
        for user, rows, row_labels in _users(path):
            if inputs and inputs[0].shape[1] != rows.shape[1]:
                raise DatasetDamaged(
                    f"{path}: user {user} has rows of {rows.shape[1]} features, others of {inputs[0].shape[1]}"
                )
            owner = users.get(user, -1) if is_test else users.setdefault(user, len(users))
            inputs.append(rows)
            labels.extend(row_labels)
            owners.append(np.full(len(rows), owner))
            held.append(np.full(len(rows), is_test))
    if not users:
        raise DatasetDamaged(f"{training[0]} has no users with rows")
    codes, names = coded(labels, str(folder))
    table, owner_of, marks = np.concatenate(inputs), np.concatenate(owners), np.concatenate(held)
    strangers = owner_of < 0
    return Owned(
        folder.name,
        table[~strangers],
        codes[~strangers],
        len(names),
        owner_of[~strangers],
        tuple(users),
        held_out=marks[~strangers] if marks[~strangers].any() else None,
        test=(table[strangers], codes[strangers]) if strangers.any() else None,
        source=str(folder),
    )


def _users(path: Path) -> list[tuple[str, npt.NDArray[np.float32], list[object]]]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise DatasetError(f"{path} is larger than {_MAX_BYTES} bytes; split it as LEAF's scripts do")
        read: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DatasetDamaged(f"{path} is not JSON: {error}") from error
    data = read.get("user_data") if isinstance(read, dict) else None
    if not isinstance(data, dict):
        raise DatasetDamaged(f"{path} has no object 'user_data'; LEAF's files have it beside 'users'")
    found = []
    for user, rows in data.items():
        where = f"{path}: user {user}"
        if (
            not isinstance(rows, dict)
            or not isinstance(rows.get("x"), list)
            or not isinstance(rows.get("y"), list)
        ):
            raise DatasetDamaged(f"{where} lacks the lists 'x' and 'y'")
        if len(rows["x"]) != len(rows["y"]):
            raise DatasetDamaged(f"{where} has {len(rows['x'])} rows and {len(rows['y'])} labels")
        if not rows["x"]:
            continue
        try:
            inputs = np.array(rows["x"], np.float32)
        except (ValueError, TypeError) as error:
            raise DatasetDamaged(
                f"{where}: 'x' is not rows of numbers of one length; for text give the play as .txt"
            ) from error
        if not np.isfinite(inputs).all():
            raise DatasetDamaged(f"{where}: 'x' has a value that is no finite number")
        found.append((str(user), inputs.reshape(len(inputs), -1), list(rows["y"])))
    return found
