"""One party as a process: ``python -m services.vertical.main FILE``. Lines of JSON on standard output tell how it goes.

{"listening": PORT} · {"done": n, "total": n, "what": "..."} · {"report": {...}} · {"error": "..."}
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Final

from services.processes import configure_logging, interrupted_by_sigterm, limit_threads

STOPPED: Final = "start it again, and all go on from their last common checkpoint"
"""What becomes of a party that was told to end: the others wait for it."""


def main(arguments: list[str]) -> int:
    """Run the party of the file; 0 when all is done, 1 after a failure that was told, 130 when it was interrupted."""
    limit_threads(os.environ)
    from services.vertical.config import load_party
    from services.vertical.party import prepare, run_party
    from services.vertical.workers import workers

    told_s = [0.0]

    def tell(line: object) -> None:
        print(json.dumps(line, allow_nan=False), flush=True)

    def progress(step: object) -> None:
        from federated.vertical.parties import Progress

        assert isinstance(step, Progress)
        now = time.monotonic()
        if now - told_s[0] >= 0.1 or step.done == step.total:
            told_s[0] = now
            tell({"done": step.done, "total": step.total, "what": step.what})

    try:
        config = load_party(Path(arguments[0]))
        configure_logging(config.party.name)
        with interrupted_by_sigterm(), workers(config.party.workers) as several:
            report = run_party(
                prepare(config, several), progress=progress, listening=lambda port: tell({"listening": port})
            )
    except KeyboardInterrupt:
        tell({"error": f"Interrupted: {STOPPED}"})
        return 130
    except Exception as error:
        tell({"error": f"{type(error).__name__}: {error}"})
        from services.vertical.failures import EXPECTED

        if not isinstance(error, EXPECTED):
            raise
        return 1
    tell({"report": report})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
