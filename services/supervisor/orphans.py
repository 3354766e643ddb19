"""Children of a supervisor that was killed: they end by themselves, and are waited for."""

from __future__ import annotations

import logging
from typing import Final

import psutil

from services.supervisor.folder import RunFolder

_ORPHANS_S: Final = 15.0

log = logging.getLogger(__name__)


def end_orphans(folder: RunFolder) -> None:
    """Wait until no child of the supervisor before this one runs, since they hold ports and files; end by force those
    that take too long. The caller holds ``folder``."""
    before = folder.state()
    ids = [child.process for child in before.children if child.process] if before else []
    left = [process for id_ in ids if (process := id_.process()) is not None]
    if not left:
        return
    log.warning("waiting for %d processes of a supervisor that was killed", len(left))
    _gone, alive = psutil.wait_procs(left, timeout=_ORPHANS_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=_ORPHANS_S)
