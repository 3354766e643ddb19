"""The OpenAPI document of joint inference, as it is kept in the repository."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

import numpy as np

from federated.psi.ids import IdRule
from federated.vertical.tables import Table
from services.api.documents import Json
from services.rpc.security import KeyPair
from services.vertical.config import ServeSection
from services.vertical.serving.app import PredictionRoutes, Terms, assemble
from services.vertical.serving.audit import AuditLog
from services.vertical.serving.callers import Callers
from services.vertical.serving.guest import ServingGuest
from services.vertical.serving.metrics import ServingMetrics
from services.vertical.serving.parts import Loaded, Parts

PATH: Final = Path(__file__).with_name("openapi.json")


def document() -> Json:
    """The document that the code describes now. Needs no party."""
    settings, callers, metrics = ServeSection(), Callers(()), ServingMetrics()
    guest = ServingGuest(
        KeyPair.generate(), {}, Parts(Loaded("", None)), Table((), np.empty((0, 0)), ()), IdRule()
    )
    with tempfile.TemporaryDirectory() as folder:
        audit = AuditLog(Path(folder) / "audit.jsonl", settings.audit_bytes)
        try:
            terms = Terms("", IdRule(), settings.deadline, settings.most_ids)
            routes = PredictionRoutes(guest, audit, metrics, callers, terms)
            return assemble(routes, callers, metrics).document()
        finally:
            audit.close()
