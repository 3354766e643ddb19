"""Whether this region's parameter servers answer now, as a list would need them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final, Protocol

import numpy as np

from models.parameters import RETRIEVAL
from services.api.health import CHECK_S, Dependency
from services.parameter_server.types import Keys, ModelUnknown, ParameterError, ParametersUnavailable, Pulled

ANSWER_S: Final = 0.7 * CHECK_S
"""Less than a check may take, so that it can still say who did not answer."""
_KEYS: Final[Keys] = np.arange(256, dtype=np.uint64)
"""So many that every server of a region is asked: that one of twenty with equal shares is not has a chance of 4e-5."""

log = logging.getLogger(__name__)


class Pulls(Protocol):
    """Reads rows, as the parameter servers' client does."""

    async def pull(
        self, model: str, keys: Mapping[str, Keys], *, deadline_s: float | None = None
    ) -> Pulled: ...


class Reach:
    """Asks the parameter servers of ``region`` for a few rows of ``model``, through a client that keeps none."""

    def __init__(self, parameters: Pulls, model: str, region: str) -> None:
        self._parameters = parameters
        self._model = model
        self._region = region

    async def check(self) -> Dependency:
        """Whether all that hold a shard answer, or replicas in their place where these may be read."""
        try:
            await self._parameters.pull(self._model, {RETRIEVAL: _KEYS}, deadline_s=ANSWER_S)
        except ModelUnknown:
            return Dependency(False, f"region {self._region}: no model is declared yet")
        except ParametersUnavailable as error:
            who = ", ".join(error.servers) or "any parameter server"
            return Dependency(False, f"region {self._region}: no answer from {who}")
        except ParameterError as error:
            log.warning("the parameter servers are not well: %s", error)
            return Dependency(False, f"region {self._region}: the parameter servers refuse to answer")
        return Dependency(True, f"region {self._region}: all answer")
