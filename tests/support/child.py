"""A tiny service for tests of the supervisor: ``child.py FOLDER NAME [deaf|fail|slow]``.

It writes its process id to ``NAME.here``, and its name to ``ended`` when it is told to stop.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path


def main() -> int:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    how = sys.argv[3] if len(sys.argv) > 3 else ""
    if how == "fail":
        print("out of luck", flush=True)
        return 3
    stop = threading.Event()

    def parent_ends() -> None:
        while os.read(0, 4096):
            pass
        if how == "slow":
            time.sleep(1.0)
        os._exit(9)

    threading.Thread(target=parent_ends, daemon=True).start()
    signal.signal(signal.SIGTERM, (lambda *_: None) if how == "deaf" else (lambda *_: stop.set()))
    for variable, value in os.environ.items():
        print(f"{variable}={value}", flush=True)
    (folder / f"{name}.here").write_text(str(os.getpid()))
    while not stop.wait(0.02):
        pass
    with (folder / "ended").open("a") as ended:
        ended.write(f"{name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
