"""Models that another region declared are written to this region's coordination store, so that its clients find them.

The store may be slow or away, so a thread of its own does it, and tries again until it is done.
"""

from __future__ import annotations

import logging
import queue
import threading
from typing import Final

from services.coordination.contract import Coordination, CoordinationError
from services.parameter_server.declarations import Declaration, settle_declaration
from services.parameter_server.types import ModelMismatch

RETRY_S: Final = 1.0
MISMATCHES: Final = 2
"""How often it is tried again where the store has another declaration."""
_log = logging.getLogger(__name__)


class Declarer:
    """Runs until ``close``."""

    def __init__(self, store: Coordination) -> None:
        self._store = store
        self._queue: queue.SimpleQueue[Declaration | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="declarer", daemon=True)
        self._thread.start()

    def settle(self, declaration: Declaration) -> None:
        """Write it down, soon. Never waits."""
        self._queue.put(declaration)

    def close(self) -> None:
        """End, and wait for it."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            declaration = self._queue.get()
            tries = 0
            while declaration is not None and not self._written(declaration, tries):
                tries += 1
                if self._closing.wait(RETRY_S):
                    return

    def _written(self, declaration: Declaration, tries: int) -> bool:
        try:
            settle_declaration(self._store, declaration)
        except CoordinationError as error:
            _log.warning("model %s cannot be declared in this region now: %s", declaration.model, error)
            return False
        except ModelMismatch as error:
            if tries < MISMATCHES:
                # A client whose declaration is being refused elsewhere takes it back.
                return False
            _log.error("this region declared model %s otherwise: %s", declaration.model, error)
        return True
