"""The version of the model that a device holds: what it downloaded last, from which servers send differences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from federated.client_folder import DeviceFolder
from federated.compression import BaseUnknown, BodyRefused, Grid, Held, difference, receive
from federated.weights import Array
from federated.wire import ReceivedModel, digest_of


@dataclass(frozen=True, slots=True)
class _Plain:
    """A version held in float32."""

    version: int
    vector: Array


class HeldModel:
    """Kept in ``folder``, of ``size`` weights; on a ``grid`` where downloads are rounded to one."""

    def __init__(self, folder: DeviceFolder, grid: Grid | None, size: int) -> None:
        self._folder, self._grid, self._size = folder, grid, size
        self._held = self._read()

    @property
    def version(self) -> int | None:
        """None for no version."""
        return None if self._held is None else self._held.version

    @property
    def most_bytes(self) -> int:
        """The longest model there may be."""
        return 4 * self._size if self._grid is None else self._grid.most_bytes()

    def take(self, found: ReceivedModel) -> Array:
        """The weights [D] of a download, which is kept. Raises BodyRefused, and BaseUnknown for a difference from a
        version that is not held: then there is none any more, and the whole model has to be asked for."""
        try:
            if self._grid is None:
                return self._plain(found.version, found.base, found.model)
            held = receive(self._grid, found.model, self._held if isinstance(self._held, Held) else None)
        except BaseUnknown:
            self._held = None
            self._folder.keep_held(None)
            raise
        vector = held.vector(self._grid)
        self._held = held
        self._folder.keep_held(difference(self._grid, held, None))
        return vector

    def _plain(self, version: int, base: int, model: bytes) -> Array:
        if base:
            # A damaged file, or a job of this name that began anew, would else be trained from for ever.
            if (
                not isinstance(self._held, _Plain)
                or self._held.version != base - 1
                or digest_of(self._held.vector.astype("<f4").tobytes()) != model
            ):
                raise BaseUnknown(f"version {base - 1} is not held, or not as the server has it")
            return self._held.vector
        if len(model) != 4 * self._size:
            raise BodyRefused(f"{len(model)} bytes are not {self._size} float32")
        vector = np.frombuffer(model, "<f4").astype(np.float32)
        if not np.isfinite(vector).all():
            raise BodyRefused("the model holds NaN or infinity")
        self._held = _Plain(version, vector)
        self._folder.keep_held(version.to_bytes(8, "little") + vector.astype("<f4").tobytes())
        return vector

    def _read(self) -> Held | _Plain | None:
        body = self._folder.held()
        if body is None:
            return None
        try:
            if self._grid is not None:
                return receive(self._grid, body)
        except BodyRefused:
            return None
        if len(body) != 8 + 4 * self._size:
            return None
        return _Plain(
            int.from_bytes(body[:8], "little"), np.frombuffer(body, "<f4", offset=8).astype(np.float32)
        )
