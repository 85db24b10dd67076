"""Times to first token that routers predict, against those of simulated replicas under load."""

from __future__ import annotations

import pytest

from loadtest.simulate.command import main
from loadtest.simulate.results.predictions import HEADS, PredictionJob, lines, run_predictions


@pytest.mark.long
@pytest.mark.parametrize("name", ["claude_code", "working_set_3x"])
@pytest.mark.parametrize("load", ["below", "at"])
def test_nine_in_ten_first_tokens_come_within_the_predicted_p90(name: str, load: str) -> None:
    """Between 85 and 95 % do, where replicas are idle and where they are full."""
    found = run_predictions(PredictionJob(name, load, 1))
    print("", HEADS, *lines([found]), sep="\n")
    assert found.streams > 500
    assert found.ok
    assert 0.35 <= found.within_p50 <= 0.65
    assert found.ratio_p50 <= 1.2 <= found.ratio_p90 * 1.2


def test_the_command_prints_how_good_predictions_are(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each scenario and load, and what it cannot be combined with is told."""
    asked = ["--predictions", "--scenario", "working_set_3x", "--load", "below", "--requests", "300"]
    assert main(asked) == 0
    assert "within p90" in capsys.readouterr().out
    assert main([*asked, "--race"]) == 2
    assert "--predictions cannot be combined with --race" in capsys.readouterr().err
