"""The experiments that show a person that Headwater learns: a burst, newcomers; and how long a list takes.

Each asks the running API and nothing else. A list that changes proves nothing by itself: a change counts from
the first reply that names the posted event and parameters trained on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from services.demo.rest import Accepted, Recommendations, Rest, RestError
from services.events import Interaction

_WAIT_S = 10.0
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Visible:
    """The first list that contains the event, and how long after its acceptance it was there (ms)."""

    reply: Recommendations
    after_ms: float


def like(user_id: str, item_id: str) -> Interaction:
    """A like, as an app would post it."""
    return Interaction(user_id, item_id, "like")


def until_visible(rest: Rest, user_id: str, accepted: Accepted, n: int, gone: str | None = None) -> Visible:
    """Ask for lists until one names the event, rests on parameters that saw it, and lacks item ``gone``.

    The time counts from ``accepted_at_ms`` (the API's clock) to the arrival of the list (this machine's).
    Raises RestError when that takes longer than ten seconds.
    """
    deadline = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline:
        reply = rest.recommend(user_id, n, min_freshness=accepted.token)
        after_ms = time.time() * 1e3 - accepted.accepted_at_ms
        named = (
            reply.newest_event is not None and reply.newest_event.accepted_at_ms >= accepted.accepted_at_ms
        )
        learned = (reply.parameters_as_of_ms or 0) >= accepted.accepted_at_ms
        if named and learned and gone not in reply.item_ids:
            return Visible(reply, after_ms)
    raise RestError(f"event {accepted.event_id} of user {user_id} is not visible after {_WAIT_S:g} s")


@dataclass(frozen=True, slots=True)
class Burst:
    """A user's list before and after a burst of likes."""

    user_id: str
    liked: tuple[str, ...]
    before: Recommendations
    after: Visible

    @property
    def entered(self) -> list[str]:
        """Items that the second list has and the first had not."""
        return [item for item in self.after.reply.item_ids if item not in self.before.item_ids]


def burst(rest: Rest, user_id: str, liked: Sequence[str], n: int = 10) -> Burst:
    """Post a like for each of ``liked`` and wait for the list that knows of the last."""
    before = rest.recommend(user_id, n)
    receipts = rest.send([like(user_id, item) for item in liked])
    newest = max(receipts, key=lambda receipt: receipt.accepted_at_ms)
    return Burst(user_id, tuple(liked), before, until_visible(rest, user_id, newest, n))


@dataclass(frozen=True, slots=True)
class Newcomers:
    """Share of a category in the unseen items of the top ten: of new users who liked it, and of controls.

    The users take the ``categories`` in turn, and each control is asked for the category of its counterpart.
    """

    categories: tuple[str, ...]
    users: int
    liked_before: float
    liked_after: float
    control_before: float
    control_after: float
    after_ms: float
    control_kept: float
    """Share of the controls' lists that stayed the same items: what reshuffles by itself proves nothing."""


def newcomers(
    rest: Rest,
    categories: Mapping[str, Sequence[str]],
    popular_by_category: Mapping[str, Sequence[str]],
    users: int = 20,
    likes: int = 5,
    wait_s: float = 1.0,
    seed: int = 7,
    n: int = 10,
) -> Newcomers:
    """``users`` new users like ``likes`` items of one category each; as many others like nothing.

    ``categories`` gives the categories by item; ``popular_by_category`` the categories that are liked, and what
    the likes are drawn from.
    """
    generator = np.random.default_rng(seed)
    tag = f"{int(time.time() * 1e3):x}"
    names = list(popular_by_category)
    wanted = [names[index % len(names)] for index in range(users)]
    liked = [
        [str(item) for item in generator.choice(np.array(popular_by_category[name]), likes, replace=False)]
        for name in wanted
    ]
    fans = [f"new-{tag}-{index}" for index in range(users)]
    controls = [f"control-{tag}-{index}" for index in range(users)]

    def share(replies: Sequence[Recommendations], seen: Sequence[Sequence[str]]) -> float:
        shares = []
        for reply, name, items in zip(replies, wanted, seen, strict=True):
            unseen = [item for item in reply.item_ids if item not in items]
            shares.append(sum(name in categories.get(item, ()) for item in unseen) / max(len(unseen), 1))
        return float(np.mean(shares))

    nothing: list[list[str]] = [[] for _ in range(users)]
    fans_before = [rest.recommend(user, n) for user in fans]
    controls_before = [rest.recommend(user, n) for user in controls]
    for user, items in zip(fans, liked, strict=True):
        rest.send([like(user, item) for item in items])
    posted = time.monotonic()
    time.sleep(wait_s)
    fans_after = [rest.recommend(user, n) for user in fans]
    after_ms = (time.monotonic() - posted) * 1e3
    controls_after = [rest.recommend(user, n) for user in controls]
    kept = [
        len(set(a.item_ids) & set(b.item_ids)) / max(len(a.item_ids), 1)
        for a, b in zip(controls_before, controls_after, strict=True)
    ]
    return Newcomers(
        tuple(names),
        users,
        share(fans_before, liked),
        share(fans_after, liked),
        share(controls_before, nothing),
        share(controls_after, nothing),
        after_ms,
        float(np.mean(kept)),
    )


def latencies(rest: Rest, user_ids: Sequence[str], count: int, progress: Progress) -> Iterator[float]:
    """``count`` times for a list of ten (ms), from the client's side, one request after the other."""
    for index in range(count):
        start = time.perf_counter()
        rest.recommend(user_ids[index % len(user_ids)], 10)
        yield (time.perf_counter() - start) * 1e3
        progress(1)
