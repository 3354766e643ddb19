"""Run as a program: write entities to a store and name each on stdout once its write returned.

Arguments: backend, where, prefix of the ids, how many (0: until killed).
"""

from __future__ import annotations

import itertools
import sys

from featurestore import Cell, EntityKey, open_store


def main() -> None:
    backend, where, prefix, count = sys.argv[1:]
    assert backend in ("sqlite", "redis")
    store = open_store("sqlite" if backend == "sqlite" else "redis", where)
    print("ready", flush=True)
    sys.stdin.readline()
    for n in range(int(count)) if int(count) else itertools.count():
        own = EntityKey("user", f"{prefix}{n}")
        shared = EntityKey("user", f"shared{n % 7}")
        store.write({own: {"n": Cell(n, n)}, shared: {prefix: Cell(n, n)}})
        print(own.id, flush=True)
    store.close()


if __name__ == "__main__":
    main()
