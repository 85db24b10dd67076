"""Log lines of a grade that falls again and again, in a whole router."""

from __future__ import annotations

import logging
import time

import pytest

from router.core.fleet.flap_filter import STEADY_S
from router.core.types.placements import Confidence
from tests.support.fakes import FakeEngine, running

EVENTS = ("grade_changed", "grade_flaps", "grade_steady")


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Event and level of each line about a grade so far."""
    return [(each.event, each.levelname) for each in caplog.records if getattr(each, "event", "") in EVENTS]  # type: ignore[attr-defined]


async def test_a_grade_that_flaps_has_one_line_and_one_more_when_it_is_steady(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two falls are logged as they come. With the third one there is a warning, and nothing more at the usual level
    until the grade has been steady for five minutes; after that a fall is logged again."""
    async with FakeEngine() as engine, running(engine) as app:
        lifecycle = app.control.lifecycle

        def change(*grades: Confidence) -> None:
            for grade in grades:
                lifecycle.on_grade_changed(engine.url, grade, "replay is not answered")

        with caplog.at_level(logging.INFO):
            for _ in range(40):
                change(Confidence.EXACT, Confidence.ESTIMATED)
                lifecycle.check(time.monotonic())
            usual = [("grade_changed", "INFO"), ("grade_changed", "WARNING")] * 2
            begins = [*usual, ("grade_changed", "INFO"), ("grade_flaps", "WARNING")]
            assert lines(caplog) == begins
            (fields,) = (each.fields for each in caplog.records if getattr(each, "event", "") == "grade_flaps")  # type: ignore[attr-defined]
            assert (fields["replica"], fields["falls"]) == (engine.url, 3)
            assert fields["why"] == "replay is not answered"
            for after_s in (STEADY_S - 1, STEADY_S + 1, STEADY_S + 2):
                lifecycle.check(time.monotonic() + after_s)
            assert lines(caplog) == [*begins, ("grade_steady", "INFO")]
            change(Confidence.EXACT)
            assert lines(caplog)[-1] == ("grade_changed", "INFO")
