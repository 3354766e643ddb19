"""One door to every federation: digits, breast cancer and MovieLens by name, or files of several known forms."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from federated.data import Federation, Table, federate, federate_augmented
from federated.partition import PartitionImpossible, parse_partition
from services.datasets import movielens
from services.datasets.errors import DatasetError, DatasetUnsuited
from services.datasets.federations import scikit
from services.datasets.federations.owned import BY_USER, Owned

if TYPE_CHECKING:
    from services.datasets.federations.movies import View

NAMES: Final = (scikit.DIGITS, scikit.BREAST_CANCER, movielens.NAME)
DIGITS_DIVIDED_UP_TO: Final = 50
"""Among more clients the 1,438 training digits would leave too few to each, so they are augmented."""
_CONTEXT: Final = 8
_DEFAULT_CLIENTS: Final = 10
_ROWS_AUGMENTED_BELOW: Final = 25


def open_federation(
    name: str,
    cache: Path,
    *,
    clients: int | None = None,
    seed: int = 0,
    partition: str | None = None,
    context: int = _CONTEXT,
    view: View = "genres",
) -> tuple[Federation, tuple[str, ...]]:
    """The federation called ``name``, or in the file or folder ``name``, and what its user must be told.

    ``partition`` is as ``make_partition`` reads it, or ``user``: by default ``user`` where rows belong to somebody,
    then of all of them unless ``clients`` says how many; else ``iid`` over ``clients`` (10). ``context`` is the window
    of text, ``view`` what ratings are seen as. The same arguments give the same federation on every machine. Raises
    DatasetError and its kinds.
    """
    try:
        _require_partition(partition)
        found, notes = _find(name, cache, context, view)
        if isinstance(found, Owned):
            return found.federation(clients, seed, partition), notes
        if partition == BY_USER:
            raise DatasetUnsuited(
                f"nobody owns the rows of {found.name}; partition it by iid, dirichlet:0.5, ..."
            )
        count = _DEFAULT_CLIENTS if clients is None else clients
        return _divided(found, count, seed, partition or "iid"), notes
    except PartitionImpossible as error:
        raise DatasetUnsuited(f"{name}: {error}") from error
    except ValueError as error:
        raise DatasetError(str(error)) from error


def _require_partition(partition: str | None) -> None:
    if partition is None or partition == BY_USER:
        return
    try:
        parse_partition(partition)
    except ValueError as error:
        raise DatasetUnsuited(str(error)) from error


def _divided(table: Table, clients: int, seed: int, partition: str) -> Federation:
    most = DIGITS_DIVIDED_UP_TO if table.name == scikit.DIGITS else len(table.labels) // _ROWS_AUGMENTED_BELOW
    if table.image is not None and clients > most:
        return federate_augmented(table, clients, seed, partition)
    return federate(table, clients, seed, partition)


def _find(name: str, cache: Path, context: int, view: View) -> tuple[Table | Owned, tuple[str, ...]]:
    if name == scikit.DIGITS:
        return scikit.digits(), ()
    if name == scikit.BREAST_CANCER:
        return scikit.breast_cancer(), ()
    if name == movielens.NAME:
        from services.datasets.federations.movies import read_ratings
        from services.datasets.open import open_dataset

        dataset, notes = open_dataset(name, cache)
        return read_ratings(dataset, view), notes
    return _read(Path(name), context), ()


def _read(path: Path, context: int) -> Table | Owned:
    from services.datasets.federations import idx, leaf, tables, text

    if path.is_file() and path.suffix == ".csv":
        return tables.read_table(path)
    if path.is_file() and path.suffix == ".txt":
        return text.read_text(path, context)
    if not path.is_dir():
        raise DatasetError(
            f"{str(path)!r} is neither a data set ({', '.join(NAMES)}) nor a folder, a .csv or a .txt"
        )
    if idx.is_mnist(path):
        return idx.read_mnist(path)
    if leaf.leaf_files(path)[0]:
        return leaf.read_leaf(path)
    if tables.client_files(path):
        return tables.read_folder(path)
    if text.text_files(path):
        return text.read_text(path, context)
    raise DatasetError(
        f"{path} holds no data that are known: a .csv or .npz for each client, MNIST's train-images-idx3-ubyte, "
        "LEAF's train/*.json, or plays as .txt"
    )
