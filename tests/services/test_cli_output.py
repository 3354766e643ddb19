"""What a long command says while it works, where standard error is no terminal."""

from __future__ import annotations

import pytest

from services.cli.output import EVERY_S, Lines, progress


class Clock:
    """Stands still until told otherwise."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_what_ends_soon_leaves_no_line(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("games", 3, clock) as advance:
        for _ in range(3):
            clock.now += EVERY_S / 4
            advance(1)
    assert capsys.readouterr() == ("", "")


def test_long_work_says_now_and_then_how_far_it_is(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("events", 5_000, clock) as advance:
        for _ in range(100):
            clock.now += 1.0
            advance(50)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "events 1,500/5,000 (30 s)",
        "events 3,000/5,000 (60 s)",
        "events 4,500/5,000 (90 s)",
    ]


def test_work_without_a_known_end_has_none_in_its_line(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress("rounds", None, clock) as advance:
        clock.now += 45.0
        advance(7)
    assert capsys.readouterr().err == "rounds 7 (45 s)\n"


def test_after_a_long_silence_there_is_one_line_not_all_that_were_due(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    tell = Lines(clock)
    clock.now += 10 * EVERY_S
    for text in ("one", "two"):
        tell(text)
    clock.now += EVERY_S
    tell("three")
    assert capsys.readouterr().err == "one (300 s)\nthree (330 s)\n"
