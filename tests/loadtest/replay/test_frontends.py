"""What is judged of the two faces."""

from __future__ import annotations

import pytest

from loadtest.common.report import Row
from loadtest.replay import frontends
from loadtest.replay.frontends import goals
from router.extproc.response_tracker import FULL_SAMPLING_UNTIL


def test_what_counts_begins_where_a_sample_does() -> None:
    """The first answers, all of which the picker is shown, are those that do not count."""
    assert frontends.SHOWN_MIN == FULL_SAMPLING_UNTIL


@pytest.mark.parametrize(
    ("hits", "ttft_s", "kept"),
    [(0.8, 1.0, [True] * 3), (0.776, 1.03, [True] * 3), (0.775, 1.04, [False] * 3), (None, None, [False] * 3)],
)
def test_a_gateway_is_held_against_the_edge(hits: float | None, ttft_s: float | None, kept: list[bool]) -> None:
    """Within 3 % of the edge's hit rate and time is as promised; less, more, and what was not measured are missed."""
    edge = Row(workload="agent", policy="edge", token_hit_rate=0.8, ttft_life_p90_s=1.0, ttft_engine_p90_s=1.0)
    times = {"ttft_life_p90_s": ttft_s, "ttft_engine_p90_s": ttft_s}
    gateway = Row(workload="agent", policy="gateway", token_hit_rate=hits, **times)  # type: ignore[arg-type]  # fields
    judged = goals([edge, gateway])
    assert [row.ok for row in judged] == kept
    assert [row.timed for row in judged] == [False, True, True]
