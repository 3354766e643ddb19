from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.api import Harness, running_api


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """An API shared by the tests of a module: they must not depend on each other's users and items."""
    with running_api(tmp_path_factory.mktemp("api")) as harness:
        yield harness
