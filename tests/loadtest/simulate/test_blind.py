"""Routers of a race know nothing of answers that have not ended."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from loadtest.common.traces import Request
from loadtest.fake_engine.request import EngineRequest
from loadtest.simulate.engine.cluster_spec import ClusterSpec
from loadtest.simulate.engine.workload import SimRequest, Workload, open_workload, prepare
from loadtest.simulate.engine.world import Result, Simulation
from loadtest.simulate.policies import ROWS

BLOCK, REQUESTS = 64, 100
LENGTHS = {"short": (100, 200), "long": (300, 4_000)}
SETTING = ClusterSpec(replicas=3)
NO_BOUNDS = [name for name, row in ROWS.items() if not row.bound]


def workload(lengths: str) -> Workload:
    """Requests that come within two seconds, of five groups with a prefix each; the answers alone differ."""
    rng, answers = random.Random(1), random.Random(2)
    turns: list[SimRequest] = []
    for number in range(REQUESTS):
        group, prompt_tokens = rng.randrange(5), 64 * rng.randint(12, 60)
        runs = ((1_000 * group, 10), (10_000 + 100 * number, prompt_tokens // 64 - 10))
        tokens = answers.randint(*LENGTHS[lengths])
        request = Request(rng.uniform(0, 2), 0.0, prompt_tokens, tokens, "blind", 64, runs, cuts=(640,))
        turns += prepare([(f"session {number}", request)], BLOCK, output_tokens_max=10_000)
    return open_workload("blind", sorted(turns, key=lambda turn: turn.at_s), BLOCK)


def placed(result: Result) -> list[str]:
    """Where each request was sent."""
    return [sent.lease.replica if sent.lease is not None else "" for sent in result.sent]


def runs(row: str, setting: ClusterSpec) -> list[Result]:
    """A run for each kind of lengths; all requests come before any answer ends."""
    results = [Simulation(workload(lengths), setting, ROWS[row].make).run() for lengths in LENGTHS]
    for result in results:
        ended_s = min(sent.due_s + (sent.e2e_s or 0.0) for sent in result.sent)
        assert max(sent.due_s for sent in result.sent) < ended_s
    return results


@pytest.mark.parametrize("row", NO_BOUNDS)
@pytest.mark.parametrize("grade", ["estimated", "exact"])
def test_what_is_to_come_changes_no_placement(row: str, grade: str) -> None:
    """Two workloads that differ in the lengths of answers alone are placed alike until an answer ends."""
    setting = replace(SETTING, grade=grade)  # type: ignore[arg-type]
    first, second = runs(row, setting)

    assert [sent.turn.output_tokens for sent in first.sent] != [sent.turn.output_tokens for sent in second.sent]
    assert placed(first) == placed(second)
    assert len(set(placed(first))) > (row == "warm"), "a rule may send all to one"


class Keyed(Simulation):
    """Notes the key of each answer's first block, by request."""

    def _request(self, number: int, turn: SimRequest, source: str = "") -> EngineRequest:
        request = super()._request(number, turn, source)
        self.first_keys = {**getattr(self, "first_keys", {}), number: request.keys[len(turn.engine_keys)]}
        return request


def test_events_of_one_answer_tell_nothing_of_another() -> None:
    """The keys by which an answer's blocks are named in KV events depend on no other answer's length."""
    worlds = [Keyed(workload(lengths), SETTING, ROWS["round_robin"].make) for lengths in LENGTHS]
    for world in worlds:
        world.run()

    assert len(worlds[0].first_keys) == REQUESTS
    assert worlds[0].first_keys == worlds[1].first_keys


def test_foreknowledge_is_another_input() -> None:
    """Given the lengths as limits, the same router places these workloads otherwise: the test above would show it."""
    first, second = runs("foreknowledge", replace(SETTING, foreknowledge=True))

    assert placed(first) != placed(second)
