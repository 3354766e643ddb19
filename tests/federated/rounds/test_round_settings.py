from decimal import Decimal
from typing import Any

import pytest

from federated.rounds import RoundSettings, SettingsRefused, Thresholds
from federated.rounds.settings import share_of


@pytest.mark.parametrize(
    ("count", "ratio", "needed"),
    [
        (25, "0.28", 7),
        (100, "0.8", 80),
        (10, "0.75", 8),
        (3, "0.34", 2),
        (1, "0.01", 1),
        (50, "0.58", 29),
        (7, "1", 7),
    ],
)
def test_thresholds_are_exact_decimals(count: int, ratio: str, needed: int) -> None:
    assert share_of(count, Decimal(ratio)) == needed
    settings = RoundSettings(start_fl_job_threshold=count, update_model_ratio=float(ratio))  # type: ignore[arg-type]
    assert settings.thresholds == Thresholds(count, count, needed, needed)


def test_over_selection_starts_126_for_80_uploads() -> None:
    settings = RoundSettings(
        start_fl_job_threshold=100, mode="over_selection", over_selection=Decimal("1.575")
    )
    assert settings.thresholds == Thresholds(126, 100, 80, 80)


def test_defaults_are_those_of_mindspore_with_a_ratio_that_bears_dropouts() -> None:
    settings = RoundSettings(start_fl_job_threshold=1)
    assert (settings.start_fl_job_time_window_s, settings.update_model_time_window_s) == (300, 300)
    assert (settings.global_iteration_time_window_s, settings.fl_iteration_num) == (3600, 20)
    assert settings.update_model_ratio == Decimal("0.8")


def test_a_silo_takes_its_members_as_threshold() -> None:
    banks = ("a", "b", "c")
    assert RoundSettings(kind="cross_silo", members=banks).thresholds == Thresholds(3, 3, 3, 3)
    proceed = RoundSettings(
        kind="cross_silo", members=banks, absent="proceed", update_model_ratio=Decimal("0.6")
    )
    assert proceed.thresholds == Thresholds(3, 2, 3, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "start_fl_job_threshold must be at least 1"),
        ({"update_model_ratio": "0"}, "update_model_ratio must be positive"),
        ({"update_model_ratio": "1.1"}, "update_model_ratio must be in"),
        ({"update_model_ratio": "many"}, "must be a decimal number"),
        ({"update_model_ratio": float("nan")}, "must be positive"),
        ({"update_model_time_window_s": 0}, "must be a positive number of seconds"),
        ({"global_iteration_time_window_s": float("inf")}, "must be a positive number of seconds"),
        ({"fl_iteration_num": 0}, "fl_iteration_num must be at least 1"),
        ({"mode": "turbo"}, "mode is sync, over_selection or buffered"),
        ({"mode": "over_selection", "over_selection": "1.1"}, "fewer than start_fl_job_threshold 10"),
        ({"mode": "buffered", "max_concurrency": 5}, "can never fill a buffer of 10"),
        ({"mode": "buffered", "max_staleness": 1_001}, "max_staleness must be in"),
        ({"mode": "buffered", "staleness_exponent": 10}, "weighs less than 2..-30"),
        ({"kind": "cross_silo", "members": ("a", "a")}, "members are named twice"),
        ({"kind": "cross_silo", "members": ("a",)}, "differs from the 1 members"),
        ({"kind": "cross_silo", "members": ("a",), "mode": "buffered"}, "cross_silo rounds are synchronous"),
        ({"members": ("a",)}, "members are named for kind cross_silo only"),
        ({"start_fl_job_threshold": 2_000_000}, "at most 1000000 clients"),
    ],
)
def test_senseless_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    threshold = {} if not settings else {"start_fl_job_threshold": 10}
    with pytest.raises(SettingsRefused, match=message):
        RoundSettings(**(threshold | settings))


def test_a_stale_upload_weighs_less_and_a_lie_about_examples_gains_no_more_than_the_cap() -> None:
    settings = RoundSettings(start_fl_job_threshold=1, max_examples=100)
    assert settings.weight(40) == 40
    assert settings.weight(10**9) == 100
    assert settings.weight(40, staleness=3) == 20
