"""A strategy together with a job's protection, as servers run them: the same in the simulator and on real ones."""

from __future__ import annotations

from dataclasses import replace

from federated.device import Instructions
from federated.layout import Layout
from federated.privacy.protection import Protection
from federated.privacy.randomness import Randomness
from federated.strategies.strategy import ServerState, Strategy
from federated.sums import Sum
from federated.weights import Array


def first_state(strategy: Strategy, protection: Protection, layout: Layout, weights: Array) -> ServerState:
    """The state before the first iteration, from ``weights`` [D]. Raises ValueError for a layout that the mechanism
    does not protect."""
    protection.require_layout(layout)
    state = strategy.init(layout, weights)
    return replace(state, scalars={**state.scalars, **protection.first_scalars()})


def instructions_of(strategy: Strategy, protection: Protection, state: ServerState) -> Instructions:
    """What devices are asked for in the iteration that begins."""
    instructions = strategy.instructions(state)
    threshold = protection.threshold(state.scalars)
    return instructions if threshold is None else replace(instructions, threshold=threshold)


def apply_sum(
    strategy: Strategy, protection: Protection, state: ServerState, total: Sum, randomness: Randomness
) -> tuple[ServerState, Sum]:
    """The state after an iteration whose contributions are ``total``, and the sum that it was made of, released. Raises
    StateRefused."""
    released = protection.release(total, state.layout, randomness, protection.threshold(state.scalars))
    following = strategy.apply(state, released)
    scalars = {**following.scalars, **protection.follow(state.scalars, released)}
    return replace(following, scalars=scalars), released
