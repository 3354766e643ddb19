"""The parts of a trained split network, each at its own party."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from federated.vertical.linear.solver import Scaling
from federated.vertical.parties import PeerFault
from federated.vertical.split.network import MOST_PARAMETERS, GuestNet, Tower, fill, flat
from federated.vertical.split.options import SplitOptions
from federated.vertical.split.protection import noised_rows
from federated.vertical.split.repeated import KEY_BYTES, RepeatedNoise
from federated.vertical.tables import MOST_COLUMNS
from federated.vertical.wire import Arr, Bytes, Expected, Text, pack, unpack

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]

_FILE: Final = "this model"
_FORMS: Final = ("split host 2", "split guest 1", "split layered host 2")
ANSWERS: Final = -1
"""The place of the noise of answers: no epoch's."""
_VECTOR: Final = Arr("<f8", (None,), MOST_COLUMNS)
_COMMON: Final[dict[str, Expected]] = {
    "form": Text(100),
    "options": Text(10_000),
    "mean": _VECTOR,
    # Columns that were constant have an infinite deviation.
    "deviation": Arr("<f8", (None,), MOST_COLUMNS, finite=False),
    "weights": Arr("<f4", (None,), MOST_PARAMETERS),
}
_HOST: Final[dict[str, Expected]] = _COMMON | {"key": Bytes(KEY_BYTES)}
_LAYERED: Final[dict[str, Expected]] = _HOST | {"layer": Arr("<f8", (None, None), MOST_PARAMETERS)}
_GUEST: Final[dict[str, Expected]] = _COMMON | {
    "alone": Arr("<f4", (None,), MOST_PARAMETERS),
    "values": Arr("<f8", (None,), 1_000),
    "hosts": Text(10_000),
}


def as_input(scaling: Scaling, rows: Floats) -> torch.Tensor:
    """``rows`` [N, F] scaled, float32."""
    return torch.from_numpy(scaling.apply(rows).astype(np.float32))


@dataclass(frozen=True, slots=True)
class HostModel:
    """A host's tower, and the weights [width, interactive] of an encrypted layer (``layer``), which are the host's own
    when training is over. ``net`` is not to be changed. ``key``: of noise, where training had some."""

    options: SplitOptions
    scaling: Scaling
    net: Tower
    layer: Floats | None = None
    key: bytes = b""

    def partial(self, rows: Floats) -> Singles:
        """Activations [N, width] of ``rows`` [N, F], float32, with noise where training had some; or what the layer
        makes of them, [N, interactive]. The noise of a row is the same whenever the row is: who asks again learns
        nothing more. Raises ValueError for a model with noise that has no key."""
        with torch.no_grad():
            found: Singles = self.net(as_input(self.scaling, rows)).numpy()
        if self.layer is not None:
            return (found @ self.layer).astype(np.float32)
        return self._noised(found) if self.options.host_noise else found

    def _noised(self, activations: Singles) -> Singles:
        if len(self.key) != KEY_BYTES:
            raise ValueError("a model with noise and without its key")
        found, noise = np.empty_like(activations), RepeatedNoise(self.key)
        for place in range(len(activations)):
            row = activations[place : place + 1]
            noise.begin(ANSWERS)
            noise.about("answer", row)
            found[place] = noised_rows(row, self.options.activation_clip, self.options, noise)
        return found

    def dump(self) -> bytes:
        form = _FORMS[0 if self.layer is None else 2]
        fields = _fields(form, self.options, self.scaling, flat(self.net)) | {"key": self.key}
        return pack(fields | ({} if self.layer is None else {"layer": self.layer}))


@dataclass(frozen=True, slots=True)
class GuestModel:
    """The top, the guest's tower, and a network of its own (``net_alone``) for answers without hosts.

    ``values``: the labels in rising order, or mean and deviation of numbers."""

    options: SplitOptions
    scaling: Scaling
    net: GuestNet
    net_alone: GuestNet
    values: Floats
    hosts: tuple[str, ...]

    def combine(self, rows: Floats, partials: Mapping[str, npt.NDArray[Any]]) -> Floats:
        """Probabilities [N] or [N, C], numbers [N], or scores of pairs [N] (``in_batch``). Raises PeerFault for a share
        that is none, ValueError where one is missing."""
        if missing := [name for name in self.hosts if name not in partials]:
            raise ValueError(f"no share of {', '.join(missing)}")
        shares = []
        for name in self.hosts:
            share = partials[name]
            if share.dtype != np.float32 or share.shape != (len(rows), self.options.share):
                raise PeerFault(
                    name, "malformed", f"a share of {share.dtype} {share.shape} for {len(rows)} rows"
                )
            if not np.isfinite(share).all():
                raise PeerFault(name, "malformed", "a share that is not finite")
            shares.append(torch.from_numpy(share.copy()))
        return self._answer(self.net, rows, shares)

    def alone(self, rows: Floats) -> Floats:
        """The answers of the network that was trained on the guest's columns only."""
        return self._answer(self.net_alone, rows, [])

    def dump(self) -> bytes:
        fields = _fields(_FORMS[1], self.options, self.scaling, flat(self.net)) | {
            "alone": flat(self.net_alone),
            "values": self.values,
            "hosts": "\n".join(self.hosts),
        }
        return pack(fields)

    def _answer(self, net: GuestNet, rows: Floats, shares: list[torch.Tensor]) -> Floats:
        with torch.no_grad():
            logits: torch.Tensor = net(as_input(self.scaling, rows), shares)
            if self.options.loss == "classes":
                logits = torch.softmax(logits, dim=1)
            elif self.options.loss == "logistic":
                logits = torch.sigmoid(logits[:, 0])
            else:
                logits = logits[:, 0]
        found: Floats = logits.numpy().astype(np.float64)
        if self.options.loss == "squared":
            found = self.values[0] + self.values[1] * found
        return found


def outputs_of(options: SplitOptions, values: Floats) -> int:
    """Columns of the top's output."""
    return len(values) if options.loss == "classes" else 1


def load(body: bytes) -> HostModel | GuestModel:
    """The part that ``dump`` gave. Raises PeerFault (of ``this model``), ValueError."""
    fields = _unpacked(body)
    guest = "hosts" in fields
    if fields["form"] != _FORMS[1 if guest else 2 if "layer" in fields else 0]:
        raise ValueError(f"{fields['form'][:40]!r} is no form of model that this version knows")
    try:
        options = SplitOptions(**json.loads(fields["options"]))
    except (TypeError, ValueError) as error:
        raise PeerFault(_FILE, "malformed", "options that are none") from error
    if fields["mean"].shape != fields["deviation"].shape:
        raise PeerFault(_FILE, "malformed", "means and deviations of different columns")
    scaling, columns = Scaling(fields["mean"], fields["deviation"], options.clip), len(fields["mean"])
    if not guest:
        tower = Tower(columns, options)
        fill(tower, fields["weights"], _FILE)
        layer = fields.get("layer")
        if (None if layer is None else layer.shape) != (
            (options.width, options.interactive) if options.encrypted else None
        ):
            raise PeerFault(_FILE, "malformed", "a layer of other widths")
        return HostModel(options, scaling, tower, layer, fields["key"])
    hosts, values = tuple(fields["hosts"].split("\n")), fields["values"]
    if options.loss == "squared" and values.shape != (2,):
        raise PeerFault(_FILE, "malformed", f"{len(values)} numbers for a mean and a deviation")
    nets = []
    for count, name in ((len(hosts), "weights"), (0, "alone")):
        net = GuestNet(columns, count, outputs_of(options, values), options)
        fill(net, fields[name], _FILE)
        nets.append(net)
    return GuestModel(options, scaling, nets[0], nets[1], values, hosts)


def _unpacked(body: bytes) -> dict[str, Any]:
    for expected in (_HOST, _LAYERED):
        try:
            return unpack(body, _FILE, expected)
        except PeerFault:
            # It has other fields; the last form says what is wrong with it.
            continue
    return unpack(body, _FILE, _GUEST)


def _fields(form: str, options: SplitOptions, scaling: Scaling, weights: Singles) -> dict[str, Any]:
    return {
        "form": form,
        "options": json.dumps(asdict(options)),
        "mean": scaling.mean,
        "deviation": scaling.deviation,
        "weights": weights,
    }
