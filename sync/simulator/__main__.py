"""``python -m sync.simulator --seeds 0:10000``: random histories, one by one; a failing seed replays exactly."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from sync.errors import SyncError
from sync.simulator.history import History, Outcome
from sync.simulator.invariants import Broken


def main(arguments: list[str] | None = None) -> int:
    """Run the histories that were asked for; 1 if one broke."""
    parser = argparse.ArgumentParser(prog="python -m sync.simulator", description=__doc__)
    parser.add_argument("--seeds", default="0:100", metavar="FROM:TO", help="which histories (default 0:100)")
    parser.add_argument("--seed", type=int, help="one history only")
    parser.add_argument("--keep-going", action="store_true", help="go on after a broken history")
    parser.add_argument("-v", "--verbose", action="store_true", help="say what happens")
    asked = parser.parse_args(arguments)
    first, _, last = asked.seeds.partition(":")
    seeds = range(int(first), int(last)) if asked.seed is None else range(asked.seed, asked.seed + 1)
    broken, did, begun_s, shown_s = 0, Counter[str](), time.monotonic(), time.monotonic()
    for seed in seeds:
        fault, outcome = run(seed, verbose=asked.verbose)
        did.update(
            outcome.did | {"writes": outcome.writes, "events": outcome.events, "checks": outcome.checks}
        )
        if fault:
            broken += 1
            print(f"seed {seed}: {fault}\n  again: python -m sync.simulator --seed {seed} -v", flush=True)
            if not asked.keep_going:
                return 1
        now_s = time.monotonic()
        if now_s - shown_s > (0.2 if sys.stderr.isatty() else 60.0):
            shown_s = now_s
            line = f"{seed + 1 - seeds.start} of {len(seeds)}, {broken} broken"
            print(
                *([f"\r{line}"] if sys.stderr.isatty() else [line, "\n"]), end="", file=sys.stderr, flush=True
            )
    took_s = time.monotonic() - begun_s
    print(f"{len(seeds)} histories, {broken} broken, {took_s:.1f} s")
    print(", ".join(f"{what} {count}" for what, count in sorted(did.items())))
    return int(broken > 0)


def run(seed: int, *, verbose: bool = False) -> tuple[str, Outcome]:
    """One history: what broke, or an empty text, and what happened."""
    history = History(seed, print if verbose else lambda line: None)
    try:
        return "", history.run()
    except (Broken, SyncError) as fault:
        return f"{type(fault).__name__}: {fault}", history.outcome


if __name__ == "__main__":
    sys.exit(main())
