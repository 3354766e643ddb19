"""How activations and gradients pass between guest and hosts: as they are, or through the encrypted layer.

clear       hosts ► guest   ``activations``: [B, width], float32
            guest ► hosts   ``gradients`` of the mean loss along them: [B, width], float32

encrypted   hosts ► guest   ``keys``: a public key; once, and again after a restart
(``layer``) hosts ► guest   ``sealed``: Enc(activations), Enc(the host's share of the weights)
            guest ► hosts   ``masked``: Enc(activations x the guest's share + masks)
            hosts ► guest   ``products``: z + masks
            guest ► hosts   ``turned``: Enc(activations x gradient + masks), Enc(host's share x gradient + masks)
            guest ► hosts   ``weights``: the guest's share, when training is over; the host answers with both
"""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from federated.vertical.parties import Draw, Effect, Incoming, PeerFault, Send, gather, receive
from federated.vertical.split.layer import GuestLayer, HostLayer, Plan
from federated.vertical.split.options import SplitOptions
from federated.vertical.split.protection import noised_rows
from federated.vertical.split.repeated import KEY_BYTES, RepeatedNoise
from federated.vertical.split.ring import MOST_KEY, PLAIN, Ints
from federated.vertical.wire import Arr, Bytes, pack, unpack

Singles = npt.NDArray[np.float32]
Exchange = Generator[Effect, Incoming | None, Any]

_CHECKPOINT: Final = "this checkpoint"


class HostSide(Protocol):
    """What a host's activations go through."""

    def meet(self) -> Exchange:
        """Before the first batch of this run."""
        ...

    def gradients(self, activations: Singles) -> Exchange:
        """Gradients [B, width] of the mean loss along ``activations`` [B, width]. Raises PeerFault."""
        ...

    def state(self) -> bytes:
        """For a checkpoint."""
        ...

    def end(self) -> Exchange:
        """After the last batch: the layer's weights [width, share], None without a layer."""
        ...


class GuestSide(Protocol):
    """Where the guest's shares of the hosts come from."""

    def meet(self) -> Exchange:
        """Before the first batch of this run."""
        ...

    def shares(self, rows: int) -> Exchange:
        """Each host's share [B, options.share] of a batch of so many rows. Raises PeerFault."""
        ...

    def tell(self, gradients: Sequence[Singles]) -> Exchange:
        """Gradients of the mean loss along each host's share."""
        ...

    def state(self) -> bytes:
        """For a checkpoint."""
        ...

    def end(self) -> Exchange:
        """After the last batch."""
        ...


class ClearHost:
    """Activations as they are, with noise where the options say so."""

    def __init__(self, options: SplitOptions, guest: str, noise: RepeatedNoise) -> None:
        self._options, self._guest, self._noise = options, guest, noise

    def meet(self) -> Exchange:
        """Nothing to agree on."""
        yield from ()

    def gradients(self, activations: Singles) -> Exchange:
        """See ``HostSide``."""
        shown, options = activations, self._options
        self._noise.about("activations", activations)
        if options.noise:
            shown = noised_rows(shown, options.activation_clip, options, self._noise)
        yield Send(self._guest, "activations", pack({"rows": shown}))
        body = yield from receive(self._guest, "gradients")
        found = read_rows(body, self._guest, len(activations), options.width)
        self._noise.about("gradients", found)
        return found

    def state(self) -> bytes:
        """Nothing."""
        return b""

    def end(self) -> Exchange:
        """No layer."""
        yield from ()


class ClearGuest:
    """Hosts' activations as they are."""

    def __init__(self, options: SplitOptions, hosts: tuple[str, ...], noise: RepeatedNoise) -> None:
        self._options, self._hosts, self._noise = options, hosts, noise

    def meet(self) -> Exchange:
        """Nothing to agree on."""
        yield from ()

    def shares(self, rows: int) -> Exchange:
        """See ``GuestSide``."""
        bodies = yield from gather(self._hosts, "activations")
        found = [read_rows(body, name, rows, self._options.width) for name, body in bodies.items()]
        for share in found:
            self._noise.about("share", share)
        return found

    def tell(self, gradients: Sequence[Singles]) -> Exchange:
        """See ``GuestSide``."""
        for name, rows in zip(self._hosts, gradients, strict=True):
            yield Send(name, "gradients", pack({"rows": rows}))

    def state(self) -> bytes:
        """Nothing."""
        return b""

    def end(self) -> Exchange:
        """Nothing to hand over."""
        yield from ()


class SealedHost:
    """A host's side of the encrypted layer. ``seed``: secret, of its half of the first weights."""

    def __init__(self, plan: Plan, guest: str, seed: int, state: bytes | None, noise: RepeatedNoise) -> None:
        self._plan, self._guest, self._noise = plan, guest, noise
        share = first_share(plan, seed, 0) if state is None else _read_shares(state, _CHECKPOINT, plan, 1)[0]
        self._layer = HostLayer(plan, guest, share, noise)

    def meet(self) -> Exchange:
        """The key."""
        yield Send(self._guest, "keys", pack({"public": self._layer.key}))

    def gradients(self, activations: Singles) -> Exchange:
        """See ``HostSide``."""
        layer, guest = self._layer, self._guest
        # Neither masks nor shares of the weights: they are others in each run, and what they hide is the same.
        self._noise.about("activations", activations)
        yield Send(guest, "sealed", layer.sealed(activations))
        yield Send(guest, "products", layer.products((yield from receive(guest, "masked"))))
        found = layer.gradients((yield from receive(guest, "turned")))
        self._noise.about("gradients", found)
        return found

    def state(self) -> bytes:
        """The share of the weights."""
        return _kept([self._layer.share])

    def end(self) -> Exchange:
        """See ``HostSide``."""
        body = yield from receive(self._guest, "weights")
        (other,) = _read_shares(body, self._guest, self._plan, 1)
        return self._plan.weights(self._layer.share, other, self._guest)


class SealedGuest:
    """The guest's side of the encrypted layers of all ``hosts``. ``seed``: secret, of its halves of first weights."""

    def __init__(
        self,
        plan: Plan,
        hosts: tuple[str, ...],
        seed: int,
        state: bytes | None,
        noise: RepeatedNoise,
        draw: Draw = os.urandom,
    ) -> None:
        self._plan, self._noise, self._draw = plan, noise, draw
        first = (
            [first_share(plan, seed, 1 + place) for place in range(len(hosts))]
            if state is None
            else _read_shares(state, _CHECKPOINT, plan, len(hosts))
        )
        self._first = dict(zip(hosts, first, strict=True))
        self._layers: dict[str, GuestLayer] = {}

    def meet(self) -> Exchange:
        """The hosts' keys."""
        bodies = yield from gather(self._first, "keys")
        for name, body in bodies.items():
            key: bytes = unpack(body, name, {"public": Bytes(MOST_KEY)})["public"]
            self._layers[name] = GuestLayer(self._plan, name, key, self._first[name], self._draw, self._noise)

    def shares(self, rows: int) -> Exchange:
        """See ``GuestSide``."""
        bodies = yield from gather(self._layers, "sealed")
        for name, body in bodies.items():
            yield Send(name, "masked", self._layers[name].masked(body))
        bodies = yield from gather(self._layers, "products")
        found = [self._layers[name].shares(body, rows) for name, body in bodies.items()]
        for share in found:
            self._noise.about("share", share)
        return found

    def tell(self, gradients: Sequence[Singles]) -> Exchange:
        """See ``GuestSide``."""
        for (name, layer), rows in zip(self._layers.items(), gradients, strict=True):
            self._noise.about("gradients", rows)
            yield Send(name, "turned", layer.turned(rows))

    def state(self) -> bytes:
        """The shares of the weights."""
        # Before the first keys came there are no layers.
        return _kept([layer.share for layer in self._layers.values()] or list(self._first.values()))

    def end(self) -> Exchange:
        """Each host gets the guest's share of its layer: it answers alone from now on."""
        for name, layer in self._layers.items():
            yield Send(name, "weights", _kept([layer.share]))


def first_share(plan: Plan, seed: int, place: int) -> Ints:
    """A party's half of small first weights [d, k], drawn from its secret ``seed``."""
    return plan.initial(np.random.default_rng([seed, place]))


def read_rows(body: bytes, sender: str, rows: int, width: int) -> Singles:
    """A batch of activations or gradients [rows, width]. Raises PeerFault."""
    found: Singles = unpack(body, sender, {"rows": Arr("<f4", (rows, width))})["rows"]
    return found.copy()


def joined(net: bytes, layer: bytes, noise: RepeatedNoise) -> bytes:
    """A checkpoint's state of a network, of its layer and of the key of the noise."""
    return pack({"net": net, "layer": layer, "key": noise.key})


def apart(state: bytes) -> tuple[bytes, bytes, RepeatedNoise]:
    """What ``joined`` put together. Raises PeerFault (of ``this checkpoint``)."""
    fields = unpack(
        state, _CHECKPOINT, {"net": Bytes(2**31), "layer": Bytes(2**31), "key": Bytes(KEY_BYTES, KEY_BYTES)}
    )
    return fields["net"], fields["layer"], RepeatedNoise(fields["key"])


def _kept(shares: Sequence[Ints]) -> bytes:
    return pack({"shares": np.array(shares)})


def _read_shares(body: bytes, sender: str, plan: Plan, count: int) -> list[Ints]:
    """``count`` shares of weights [d, k]. Raises PeerFault."""
    found: Ints = unpack(body, sender, {"shares": Arr("<i8", (count, plan.width, plan.share))})["shares"]
    if found.min() < 0 or found.max() >= PLAIN:
        raise PeerFault(sender, "malformed", "a share beyond the modulus")
    return list(found)
