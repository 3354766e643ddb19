"""What all parties of a split network agree on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

MOST_WIDTH: Final = 4_096
MOST_EPOCHS: Final = 10_000
MOST_SEALED: Final = 8_192
"""Rows of a batch that fit one ciphertext."""


@dataclass(frozen=True, slots=True)
class SplitOptions:
    """Raises ValueError for what cannot be.

    ``loss``: ``logistic`` (two labels), ``classes``, ``squared``, or ``in_batch``: rows with a label above 0 are pairs
    that belong together, told from the batch's other rows at the host. ``top``: ``mlp`` over all towers' outputs, or
    ``dot``, the inner product of the guest's and one host's, as a recommender of two towers has it. ``hidden``: units
    of the hidden layer of each tower and of the top. ``width``: of a tower's output. ``rate``: Adam's. ``temperature``:
    scores of ``in_batch`` are divided by it. ``clip``: standardised features beyond it are cut.

    ``noise``: standard deviation of Gaussian noise over what one row can change, in everything that a party's own rows
    go into: the activations or gradients it sends and its own steps; 0 for none. Then each row's activations are cut to
    the norm ``activation_clip``, its gradients to ``gradient_clip``, its part in a step to ``step_clip``, all L2.
    ``delta``: of the statement that comes of it.

    ``layer``: ``clear``, hosts send their activations; or ``encrypted``, each host's pass a layer to ``interactive``
    numbers whose weights are shared between it and the guest (``layer.py``): the guest sees those numbers and not the
    activations, each of at most the norm ``activation_clip``. ``layer_rate``: of gradient descent on the layer's
    weights, to within a factor of √2. Then ``noise`` protects labels alone: it is in what goes back to hosts and in the
    guest's steps, and hosts' rows have the encryption.
    """

    loss: Literal["logistic", "classes", "squared", "in_batch"] = "logistic"
    top: Literal["mlp", "dot"] = "mlp"
    hidden: int = 32
    width: int = 8
    epochs: int = 20
    batch: int = 128
    rate: float = 3e-3
    temperature: float = 1.0
    clip: float = 3.0
    noise: float = 0.0
    activation_clip: float = 1.0
    gradient_clip: float = 0.1
    step_clip: float = 1.0
    delta: float = 1e-5
    layer: Literal["clear", "encrypted"] = "clear"
    interactive: int = 2
    layer_rate: float = 0.5

    def __post_init__(self) -> None:
        for name, largest in (
            ("hidden", MOST_WIDTH),
            ("width", MOST_WIDTH),
            ("epochs", MOST_EPOCHS),
            ("batch", 2**16),
            ("interactive", MOST_WIDTH),
        ):
            if not 1 <= getattr(self, name) <= largest:
                raise ValueError(f"{name} is {getattr(self, name)}, not within 1 and {largest}")
        for name, least, most in (
            ("rate", 1e-9, 10.0),
            ("temperature", 1e-6, 1e6),
            ("clip", 0.1, 100.0),
            ("noise", 0.0, 1e6),
            ("activation_clip", 1e-6, 1e6),
            ("gradient_clip", 1e-6, 1e6),
            ("step_clip", 1e-6, 1e6),
            ("delta", 1e-100, 0.1),
            ("layer_rate", 1e-6, 1e6),
        ):
            value = getattr(self, name)
            if not math.isfinite(value) or not least <= value <= most:
                raise ValueError(f"{name} is {value}, not within {least} and {most}")
        if self.loss == "in_batch" and self.top != "dot":
            raise ValueError("the loss in_batch needs the top dot")
        if self.loss == "classes" and self.top == "dot":
            raise ValueError("an inner product gives one score; classes need the top mlp")
        if self.loss == "in_batch" and self.noise:
            raise ValueError(
                "with in_batch a row goes into the gradients of its whole batch: noise made for one row's would "
                "promise too much; use the loss logistic"
            )
        if self.encrypted:
            self._check_encrypted()

    def _check_encrypted(self) -> None:
        if self.top == "dot":
            raise ValueError(
                "an inner product needs the host's own vector, which the encrypted layer keeps from the guest; use the "
                "top mlp, or noise"
            )
        if self.interactive >= self.width:
            raise ValueError(
                f"interactive is {self.interactive} and width {self.width}: from as many numbers as activations the "
                "guest could solve for all of them; interactive must be smaller"
            )
        if self.batch > MOST_SEALED:
            raise ValueError(f"batch is {self.batch}; the encrypted layer takes at most {MOST_SEALED} rows")

    @property
    def encrypted(self) -> bool:
        """Whether activations pass the encrypted layer."""
        return self.layer == "encrypted"

    @property
    def share(self) -> int:
        """Numbers of a row that the guest has from each host."""
        return self.interactive if self.encrypted else self.width

    @property
    def host_noise(self) -> float:
        """``noise`` in what hosts send."""
        return 0.0 if self.encrypted else self.noise
