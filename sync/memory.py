"""Arrays that grow in place without a pause.

An array here lies in an anonymous mapping of its own. Growing asks the kernel to move the mapping's pages
(mremap) and to add pages that it zeroes when they are first touched: neither a copy nor a zero-fill, however
large the array. Mappings start on a page, so rows of 64 bytes lie on cache lines; where the C library puts a
large array, 16 bytes past the page, a row of 128 bytes touches three lines and a random read of rows
is a third slower.

A mapping cannot move while a view of it is alive. Growth then copies instead, and the view keeps the old
pages: it is stale, never dangling.
"""

from __future__ import annotations

import math
import mmap
from typing import Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

S = TypeVar("S", bound=np.generic)

_PAGE: Final = mmap.PAGESIZE
_FIRST: Final = 256


def grown(capacity: int, wanted: int, slab: int) -> int:
    """The next capacity after ``capacity``, at least ``wanted``: it doubles up to one slab, from there on it
    grows by whole slabs."""
    if wanted > slab // 2:
        return -(-wanted // slab) * slab
    return min(max(_FIRST, capacity, 1 << (wanted - 1).bit_length()), slab)


class GrowingArray(Generic[S]):
    """An array of zeros whose first axis grows; ``array`` [rows, ...] is the whole of it."""

    __slots__ = ("_dtype", "_map", "_row_shape", "array")

    def __init__(self, dtype: type[S], row_shape: tuple[int, ...] = ()) -> None:
        self._dtype = np.dtype(dtype)
        self._row_shape = row_shape
        self._map: mmap.mmap | None = None
        self.array: npt.NDArray[S] = np.zeros((0, *row_shape), self._dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of address space held: whole pages, those never touched included."""
        return len(self._map) if self._map is not None else 0

    def grow(self, rows: int) -> None:
        """Have ``rows`` rows, at least as many as before; new ones are 0. Raises MemoryError, and then
        nothing changed."""
        count = rows * math.prod(self._row_shape)
        wanted = -(-count * self._dtype.itemsize // _PAGE) * _PAGE
        if wanted > self.nbytes:
            self._map = self._moved(wanted)
        if self._map is None:
            self.array = np.zeros((rows, *self._row_shape), self._dtype)
        else:
            self.array = self._view(self._map, rows)

    def _moved(self, size: int) -> mmap.mmap:
        """A mapping of ``size`` bytes with the contents of the present one."""
        old, rows = self._map, len(self.array)
        if old is None:
            return _mapping(size)
        # Our own view must go, or it would keep the mapping where it is.
        self.array = np.zeros((0, *self._row_shape), self._dtype)
        try:
            old.resize(size)
            return old
        except (BufferError, SystemError):  # a view is alive, or the system cannot move mappings
            new = _mapping(size)
            new[: len(old)] = memoryview(old)
            return new
        except OSError as error:
            raise MemoryError(f"{size} bytes are not to be had: {error}") from error
        finally:
            self.array = self._view(old, rows)

    def _view(self, mapping: mmap.mmap, rows: int) -> npt.NDArray[S]:
        count = rows * math.prod(self._row_shape)
        flat: npt.NDArray[S] = np.frombuffer(mapping, self._dtype, count)
        return flat.reshape(rows, *self._row_shape)


def _mapping(size: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes are not to be had: {error}") from error
