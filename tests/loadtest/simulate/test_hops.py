"""Promises of replicas behind a proxy: its delays are seen in first tokens, and requests go elsewhere for them."""

from __future__ import annotations

from statistics import median

import pytest

from loadtest.simulate.engine.world import Result, Simulation
from loadtest.simulate.policies import ROWS
from loadtest.simulate.results.race import shorten_workload
from loadtest.simulate.scenarios import hops
from loadtest.simulate.scenarios.registry import GROUPS, HOPS
from loadtest.simulate.scenarios.scenario import Scenario
from router.core.estimators.first_token_delay import FirstTokenDelay


def run(made: Scenario, row: str, requests: int) -> Result:
    """The first requests of a scenario."""
    return Simulation(shorten_workload(made.workload, requests), made.setting, ROWS[row].make).run()


def behind(made: Scenario, result: Result, *, hop: bool) -> list[tuple[float, float]]:
    """Seconds until the first token and until the end, of requests to the replica behind the proxy or of the others."""
    name = made.setting.name(0)
    return [(s.ttft_s or 0.0, s.e2e_s) for s in result.sent if s.lease and (s.lease.replica == name) is hop]


@pytest.mark.parametrize(
    ("name", "least_s"), [("hop_late_requests", 3.0), ("hop_late_tokens", 3.0), ("hop_nagle", 0.04)]
)
def test_first_tokens_are_late_by_the_delay(name: str, least_s: float) -> None:
    """None comes earlier, and the answer is none the shorter for it."""
    made = HOPS[name]("light", 1)
    result = run(made, "round_robin", 60)
    there = behind(made, result, hop=True)
    assert len(there) == 15
    assert min(ttft_s for ttft_s, _ in there) > least_s
    assert all(end_s > ttft_s for ttft_s, end_s in there)
    assert min(ttft_s for ttft_s, _ in behind(made, result, hop=False)) < 3.0


def test_a_gathered_answer_comes_at_once() -> None:
    """The first token when all is there, and at every other replica as it is computed."""
    made = hops.hop_gathers("light", 1)
    result = run(made, "round_robin", 60)
    assert all(ttft_s == end_s for ttft_s, end_s in behind(made, result, hop=True))
    assert all(ttft_s < end_s for ttft_s, end_s in behind(made, result, hop=False))
    assert not any(sent.failure for sent in result.sent)


def test_long_prompts_take_longer_over_a_thin_link() -> None:
    """By their bytes."""
    hop = hops.hop_thin("light", 1).setting.machines[0].hop
    assert hop.request_delay_s(250_000) == pytest.approx(1.0)
    assert hop.request_delay_s(25_000) == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["hop_late_requests", "hop_late_tokens", "hop_gathers"])
def test_requests_go_elsewhere(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a light load nine of ten clients wait a good part less than with a price that does not know the delay, and the
    middle one as long."""
    made = HOPS[name]("light", 6)
    known = run(made, "warm", 500)
    with monkeypatch.context() as patch:
        patch.setattr(FirstTokenDelay, "observe", lambda *_: None)
        unknown = run(made, "warm", 500)
    times = [sorted(sent.ttft_s or 0.0 for sent in result.sent[100:]) for result in (unknown, known)]
    assert len(behind(made, known, hop=True)) < 0.8 * len(behind(made, unknown, hop=True))
    assert median(times[1]) <= 1.05 * median(times[0])
    assert times[1][380] < times[0][380], "the slowest in twenty"


def test_they_are_a_group_without_claims_about_all_rules() -> None:
    """To be run together."""
    assert GROUPS["hops"] == tuple(HOPS)
