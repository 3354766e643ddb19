"""How long the API's loops rest between their rounds."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest

from services.api.serving.follow import LINGER_S, REST, Follower


def test_a_loop_rests_for_its_own_work_and_not_because_the_machine_is_busy() -> None:
    worked_s = 7.0
    nothing = cast(Any, None)
    follower = Follower(nothing, nothing, nothing, nothing, "main", lambda: 0, worked_s=lambda: worked_s)
    before_s = worked_s
    time.sleep(0.02)
    assert follower._pause_s(LINGER_S, before_s) == LINGER_S
    worked_s += 0.1
    assert follower._pause_s(LINGER_S, before_s) == pytest.approx(REST * 0.1)
