"""What is said where two regions write the same shards. Pure text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers as people write them: ``0-3, 8``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[1]}" for run in runs)


def contest(shards: Sequence[int], region: str, other: str) -> str:
    """What is wrong where two regions write ``shards``, and what to do about it."""
    what = f"shard {shards[0]} is" if len(shards) == 1 else f"shards {ranges(shards)} are"
    return (
        f"{what} written in region {region} and in region {other} alike, so that what one learns never reaches the "
        "other: set sync.writes so that one region alone writes each shard, and start anew those that wrote too much"
    )
