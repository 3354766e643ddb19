"""Which steps make sense together: asked once, when a job starts."""

from __future__ import annotations

from collections.abc import Sequence

from federated.compression.errors import UnsoundScheme
from federated.compression.quantise import Quantise
from federated.compression.step import Kind, Step

_SPARSER = "one choice of coordinates is enough: take a smaller share"
_SCATTERED = "it would spread the few chosen values over all coordinates again"
# (earlier, later): why not.
CLASHES = {
    ("top_k", "top_k"): _SPARSER,
    ("top_k", "random_mask"): _SPARSER,
    ("random_mask", "random_mask"): _SPARSER,
    ("random_mask", "top_k"): _SPARSER,
    ("top_k", "rotate"): _SCATTERED,
    ("random_mask", "rotate"): _SCATTERED,
    ("top_k", "sketch"): _SCATTERED,
    ("random_mask", "sketch"): _SCATTERED,
    ("rotate", "top_k"): "after a rotation no coordinate stands out, and the largest are noise",
    (
        "sketch",
        "top_k",
    ): "buckets are sums of coordinates, and the largest are not those of large coordinates",
    ("sketch", "random_mask"): "a sketch is as small as wanted: take a smaller share",
    ("sketch", "sketch"): "a sketch is as small as wanted: take a smaller share",
    ("rotate", "sketch"): "a sketch has random signs of its own, and gains nothing from a rotation",
    ("sketch", "rotate"): "a sketch's buckets are of like size already, and gain nothing from a rotation",
    ("rotate", "rotate"): "one rotation is as random as two",
    ("quantise", "quantise"): "two quantisers: the second would round what the first rounded",
    ("quantise", "rotate"): "it works on values, not on codes: put it before quantise",
    ("quantise", "sketch"): "it works on values, not on codes: put it before quantise",
    ("quantise", "top_k"): "it works on values, not on codes: put it before quantise",
    ("quantise", "random_mask"): "it works on values, not on codes: put it before quantise",
}


def require_sound(steps: Sequence[Step], feedback: bool, coded: bool) -> None:
    """Raise UnsoundScheme, with the reason, for a chain that makes no sense. ``feedback``: the client remembers
    what was not sent. ``coded``: the sections are deflated."""
    names = [step.name for step in steps]
    for place, later in enumerate(names):
        for earlier in names[:place]:
            if reason := CLASHES.get((earlier, later)):
                raise UnsoundScheme(f"{later} after {earlier}: {reason}")
    kind: Kind = "dense"
    for step in steps:
        if kind not in step.takes:
            raise UnsoundScheme(
                f"{step.name} works on {', '.join(sorted(step.takes))} values, and gets {kind} ones"
            )
        kind = step.gives
    if coded and kind == "dense":
        raise UnsoundScheme(
            "deflate without quantise or a choice of coordinates before it: the bits of float32 are noise, "
            "and nothing shrinks"
        )
    if "rotate" in names and kind != "codes":
        raise UnsoundScheme("rotate without quantise after it: a rotation alone saves nothing")
    drives = [step for step in steps if isinstance(step, Quantise) and step.rounding == "drive"]
    if drives and "rotate" not in names:
        raise UnsoundScheme(
            "quantise:1:drive without rotate before it: only a random rotation makes its mean right"
        )
    if feedback:
        for step in steps:
            if reason := step.grows():
                raise UnsoundScheme(f"error feedback with {step.name}: {reason}")
