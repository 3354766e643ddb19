"""Towers, the top and the losses, by torch; the same modules in the split network and in the undivided one."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from federated.vertical.parties import PeerFault
from federated.vertical.split.options import SplitOptions
from federated.vertical.wire import Arr, Expected, Int, pack, unpack
from models.losses import binary_cross_entropy, sampled_softmax

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

MOST_PARAMETERS: Final = 2**28
_NORM_FLOOR: Final = 1e-12
_BETAS: Final = (0.9, 0.999)
_ADAM_FLOOR: Final = 1e-8
_FLAT: Final = Arr("<f4", (None,), MOST_PARAMETERS)
_STATE: Final[dict[str, Expected]] = {
    "epoch": Int(0, 10_000),
    "weights": _FLAT,
    "first": _FLAT,
    "second": _FLAT,
    "steps": Int(0),
}


class Tower(nn.Module):
    """Features [N, F] to [N, width]; each row cut to the norm ``most`` where that is given: under noise, and where
    activations leave (``leaves``) encrypted, as bounded numbers."""

    def __init__(self, features: int, options: SplitOptions, leaves: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(features, options.hidden)
        self.second = nn.Linear(options.hidden, options.width)
        bounded = options.noise or (options.encrypted and leaves)
        self.most = options.activation_clip if bounded else None

    def forward(self, features: Tensor) -> Tensor:
        found: Tensor = self.second(torch.relu(self.first(features)))
        if self.most is not None:
            norms = found.norm(dim=1, keepdim=True).clamp(min=_NORM_FLOOR)
            found = found * (self.most / norms).clamp(max=1.0)
        return found


class GuestNet(nn.Module):
    """The label party's tower and the top over it and ``hosts`` others; without hosts a network of its own."""

    def __init__(self, features: int, hosts: int, outputs: int, options: SplitOptions) -> None:
        super().__init__()
        self.tower = Tower(features, options, leaves=False)
        self.dot = options.top == "dot" and hosts > 0
        if self.dot:
            # A constant cancels among a batch's own candidates: its gradient would be rounding alone.
            self.bias = nn.Parameter(torch.zeros(1)) if options.loss != "in_batch" else None
        else:
            self.first = nn.Linear(options.width + hosts * options.share, options.hidden)
            self.second = nn.Linear(options.hidden, outputs)

    def forward(self, features: Tensor, shares: Sequence[Tensor]) -> Tensor:
        """Logits [N, outputs] of ``features`` [N, F] and each host's share [N, options.share]."""
        own = self.tower(features)
        if self.dot:
            scores: Tensor = (own * shares[0]).sum(dim=1, keepdim=True)
            return scores if self.bias is None else scores + self.bias
        found: Tensor = self.second(torch.relu(self.first(torch.cat([own, *shares], dim=1))))
        return found

    def pairs(self, features: Tensor, shares: Sequence[Tensor]) -> Tensor:
        """Scores [N, N] of each row's own vector with every row's at the host."""
        found: Tensor = self.tower(features) @ shares[0].T
        return found


def loss_of(
    net: GuestNet, features: Tensor, shares: Sequence[Tensor], labels: Tensor, options: SplitOptions
) -> Tensor:
    """Mean loss of a batch. ``labels`` [N]: 0 and 1, classes' places, or numbers."""
    if options.loss == "in_batch" and net.dot:
        scores, count = net.pairs(features, shares) / options.temperature, len(labels)
        # Column 0 is the row's own partner, then the other rows' in turn.
        order = (torch.arange(count)[:, None] + torch.arange(count)[None, :]) % count
        turned = scores.gather(1, order)
        return sampled_softmax(turned, torch.zeros_like(turned), labels) / count
    return loss_of_logits(net(features, shares), labels, options)


def loss_of_logits(logits: Tensor, labels: Tensor, options: SplitOptions) -> Tensor:
    """Mean loss of ``logits`` [N, outputs]; for ``in_batch`` that of single pairs, as a network alone has it."""
    if options.loss == "classes":
        return functional.cross_entropy(logits, labels.long())
    if options.loss == "squared":
        return functional.mse_loss(logits[:, 0], labels)
    return binary_cross_entropy(logits[:, 0], labels, torch.ones_like(labels)) / len(labels)


def initialise(net: nn.Module, seed: int) -> None:
    """Weights uniform within 1/√inputs, biases 0, all drawn from ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in net.parameters():
            bound = 1 / math.sqrt(weight.shape[1]) if weight.dim() == 2 else 0.0
            weight.uniform_(-bound, bound, generator=generator)


def batches(rows: int, options: SplitOptions, seed: int, epoch: int) -> Iterator[Integers]:
    """A public partition of all rows, a new one in each epoch."""
    name = hashlib.sha256(f"split {seed} {epoch}".encode()).digest()
    order = np.random.default_rng(int.from_bytes(name[:16], "little")).permutation(rows).astype(np.int64)
    yield from np.array_split(order, -(-rows // min(options.batch, rows)))


class Adam:
    """Kingma and Ba 2015, with their betas, over all parameters of ``net``. torch's own loads its compiler first, which
    takes as long as a small job."""

    def __init__(self, net: nn.Module, rate: float) -> None:
        self._weights, self._rate = list(net.parameters()), rate
        self.first = [torch.zeros_like(one) for one in self._weights]
        self.second = [torch.zeros_like(one) for one in self._weights]
        self.steps = 0

    def zero_grad(self) -> None:
        """Forget gradients."""
        for one in self._weights:
            one.grad = None

    def step(self) -> None:
        """Along the gradients; weights without one stay."""
        self.steps += 1
        scale = self._rate / (1 - _BETAS[0] ** self.steps)
        correction = math.sqrt(1 - _BETAS[1] ** self.steps)
        with torch.no_grad():
            for one, first, second in zip(self._weights, self.first, self.second, strict=True):
                if one.grad is None:
                    continue
                first.lerp_(one.grad, 1 - _BETAS[0])
                second.mul_(_BETAS[1]).addcmul_(one.grad, one.grad, value=1 - _BETAS[1])
                one.addcdiv_(first, second.sqrt().div_(correction).add_(_ADAM_FLOOR), value=-scale)


def flat(net: nn.Module) -> Singles:
    """All parameters [P], one after another."""
    parts = [one.detach().reshape(-1).numpy() for one in net.parameters()]
    return np.concatenate(parts).astype(np.float32)


def fill(net: nn.Module, values: Singles, sender: str) -> None:
    """The parameters that ``flat`` gave. Raises PeerFault of ``sender`` for another count."""
    count = sum(one.numel() for one in net.parameters())
    if values.shape != (count,):
        raise PeerFault(sender, "malformed", f"{values.size} parameters, the network has {count}")
    with torch.no_grad():
        for one, part in zip(net.parameters(), _split(net, values), strict=True):
            one.copy_(part)


def save(net: nn.Module, optimiser: Adam, epoch: int) -> bytes:
    """A checkpoint's state."""
    moments = {
        name: np.concatenate([one.reshape(-1).numpy() for one in kept])
        for name, kept in (("first", optimiser.first), ("second", optimiser.second))
    }
    return pack({"epoch": epoch, "weights": flat(net), **moments, "steps": optimiser.steps})


def restore(net: nn.Module, optimiser: Adam, state: bytes) -> int:
    """Put ``state`` back; its epoch. Raises PeerFault (of ``this checkpoint``)."""
    fields = unpack(state, "this checkpoint", _STATE)
    fill(net, fields["weights"], "this checkpoint")
    if fields["first"].shape != fields["weights"].shape or fields["second"].shape != fields["weights"].shape:
        raise PeerFault("this checkpoint", "malformed", "moments of other parameters")
    optimiser.first, optimiser.second = _split(net, fields["first"]), _split(net, fields["second"])
    optimiser.steps = fields["steps"]
    epoch: int = fields["epoch"]
    return epoch


def _split(net: nn.Module, values: Singles) -> list[Tensor]:
    """``values`` [P] as new tensors of the parameters' shapes."""
    whole = torch.from_numpy(values.copy())
    parts = torch.split(whole, [one.numel() for one in net.parameters()])
    return [part.reshape(one.shape).clone() for part, one in zip(parts, net.parameters(), strict=True)]
