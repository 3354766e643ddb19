"""Noise over what one row can change, and the statement that it makes.

A party's row goes into two things in each epoch, and into nothing else that leaves: its own activations (a host) or
gradients (the guest, to all hosts together), and the step of the party's network over its batch. Both are cut to an L2
norm C for each row, so replacing a row moves either by at most 2C, and both get Gaussian noise of ``noise`` · 2C. What
the others do with them, and all that follows, is post-processing. So E epochs are 2E Gaussian releases, each of
multiplier ``noise`` (``federated.privacy.composition``). Batches are public, so sampling hides nothing and is not
counted.

With the encrypted layer the same holds for the guest's rows alone: its noise is in the gradients along what it sees of
hosts, before they enter the layer, and all that a host gets of them is post-processing. Hosts add none.

A restart repeats what was sent with the noise that it had (``repeated``), which is no release more.

Not in it: the columns' means and deviations, by which features are scaled; a peer that sends something else after a
restart than before, which makes each batch a release more; a job that is begun again from nothing; and answers to
queries later, which add one release for the row that was asked for, however often it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from federated.privacy.clipping import NotFinite, Part, clip_rows
from federated.privacy.composition import gaussian_epsilon
from federated.privacy.gaussian import add_gaussian
from federated.privacy.randomness import Randomness
from federated.vertical.split.options import SplitOptions

Singles = npt.NDArray[np.float32]

MEANINGLESS: Final = 20.0
"""An ε above it promises nothing."""


def noised_rows(rows: Singles, bound: float, options: SplitOptions, randomness: Randomness) -> Singles:
    """``rows`` [N, D], each cut to ``bound`` and with noise of its own."""
    try:
        cut, _ = clip_rows(rows, (Part(slice(0, rows.shape[1]), bound),), "l2")
    except NotFinite as error:
        raise ValueError("training diverged: not finite; a smaller rate may help") from error
    return add_gaussian(cut, 2 * bound * options.noise, randomness)


def noised_step(
    net: nn.Module,
    of_row: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    options: SplitOptions,
    randomness: Randomness,
) -> None:
    """Set ``net``'s gradients to the mean over rows of the gradients of ``of_row(parameters, *row)``, each row's cut to
    ``step_clip``, with noise. ``inputs``: tensors whose first dimension is the rows'."""
    weights = {name: one.detach() for name, one in net.named_parameters()}
    found = vmap(grad(of_row), in_dims=(None, *(0 for _ in inputs)))(weights, *inputs)
    count = len(inputs[0])
    rows = torch.cat([found[name].reshape(count, -1) for name in weights], dim=1).numpy()
    bound = options.step_clip
    try:
        cut, _ = clip_rows(rows, (Part(slice(0, rows.shape[1]), bound),), "l2")
    except NotFinite as error:
        raise ValueError("training diverged: not finite; a smaller rate may help") from error
    total = add_gaussian(cut.sum(axis=0), 2 * bound * options.noise, randomness) / np.float32(count)
    at = 0
    for one in net.parameters():
        one.grad = torch.from_numpy(total[at : at + one.numel()].copy()).reshape(one.shape)
        at += one.numel()


def epsilon_of(options: SplitOptions, releases: int) -> float:
    """ε at ``options.delta`` of so many releases of one row."""
    return gaussian_epsilon(options.noise, releases, options.delta)


def statement(options: SplitOptions, *, guest: bool) -> dict[str, float | int | str]:
    """What a party shows of how its rows are protected."""
    if options.encrypted and not guest:
        return {
            "protection": f"activations encrypted; the guest, if it follows the protocol, sees {options.share} numbers "
            f"of each row and epoch made of {options.width} activations",
            "numbers of a row at the guest": options.share * options.epochs,
        }
    if not options.noise:
        seen = (
            "gradients tell of labels"
            if options.encrypted
            else "activations and gradients tell of features and labels"
        )
        return {"protection": f"none: {seen}"}
    epsilon = epsilon_of(options, 2 * options.epochs)
    weak = "; no meaningful privacy" if epsilon > MEANINGLESS else ""
    found: dict[str, float | int | str] = {
        "protection": f"Gaussian noise; a row replaced by another is the neighbour{weak}",
        "noise": options.noise,
        "epsilon": round(epsilon, 4),
        "delta": options.delta,
    }
    # Hosts alone answer, and with the encrypted layer their answers have no noise.
    return found if options.encrypted else found | {"epsilon of an answer": round(epsilon_of(options, 1), 4)}
