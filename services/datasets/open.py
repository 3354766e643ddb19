"""One door to every data set: MovieLens-100K by name, the generated one by name, or a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from services.datasets import generated, movielens
from services.datasets.dataset import Dataset
from services.datasets.download import obtain_movielens
from services.datasets.errors import DatasetError, DatasetUnavailable

if TYPE_CHECKING:
    from featurestore.schema import Schema

NAMES: Final = (movielens.NAME, generated.NAME)
GENERATED_WARNING: Final = (
    "THIS IS NOT MOVIELENS: no source could be reached, so the data set is GENERATED. "
    "Figures on it say nothing about real people."
)


def open_dataset(
    name: str,
    cache: Path,
    *,
    schema: Schema | None = None,
    skip_bad: bool = False,
    allow_generated: bool = True,
) -> tuple[Dataset, tuple[str, ...]]:
    """The data set called ``name``, or in the folder ``name``, and what its user must be told.

    ``schema`` (the built-in one if None) tells which attributes of a folder are numbers and lists.
    Where MovieLens cannot be reached and ``allow_generated``, a generated one of the same shape stands in,
    and the notes say so. Raises DatasetUnavailable, BadRows, or DatasetError for a name that nothing has.
    """
    if name == generated.NAME:
        return generated.generate(), ()
    if name == movielens.NAME:
        try:
            return obtain_movielens(cache), ()
        except DatasetUnavailable as error:
            if not allow_generated:
                raise
            return generated.generate(), (GENERATED_WARNING, str(error))
    folder = Path(name)
    if not folder.is_dir():
        raise DatasetError(f"{name!r} is neither a data set ({', '.join(NAMES)}) nor a folder")
    from featurestore.schema import default_schema
    from services.datasets.folder import read_folder

    return read_folder(folder, schema or default_schema(), skip_bad=skip_bad)
