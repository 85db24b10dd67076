"""The first minute after a release: the difference is named at once, in one row, by the page and by the audit."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import pytest

from router.core.types.cache_misses import DifferenceKind
from tests.core.insights.release import Agent, Fleet, agents, traffic

BEFORE_S = 60.0
STORY_REQUESTS = 20
LINE_LEAD = "It is "


def stamped(at_byte: int) -> object:
    """A release that puts the time into the system prompt."""

    def release(agent: Agent, now: datetime) -> Agent:
        line = f"{LINE_LEAD}{now.isoformat(timespec='seconds')}. "
        return replace(agent, system=agent.system[:at_byte] + line + agent.system[at_byte:])

    return release


@pytest.mark.parametrize(("at_byte", "tools"), [(0, 0), (23, 0), (0, 5), (23, 5)])
@pytest.mark.parametrize(("alike", "tasks", "sure"), [(False, 0, True), (True, 0, False), (True, 20, False)])
def test_a_time_is_named_within_twenty_requests(at_byte: int, tools: int, alike: bool, tasks: int, sure: bool) -> None:
    """After a minute of the same agents' old traffic: class, place and a single row, whether the time comes before
    everything, within the first sentence or behind the tools; nothing else is said meanwhile, and the audit agrees."""
    fleet, seen = Fleet(sure=sure), 0
    of = agents(6, tools=tools, alike=alike)
    for request in traffic(of, stamped(at_byte), before_s=BEFORE_S, requests=STORY_REQUESTS, tasks=tasks):  # type: ignore[arg-type]  # a release
        fleet.see(request)
        if request.released:
            seen += 1
            said = [(row["change"], row["message"], row["at_bytes"]) for row in fleet.advice()]
            assert said in ([], [(DifferenceKind.TIMESTAMP, 0, at_byte + len(LINE_LEAD))]), seen
        elif seen == 0 and request.at_s >= BEFORE_S - 1:
            assert fleet.advice() == []
    (row,), (audited,) = fleet.advice(), fleet.audited()
    for name in ("change", "message", "role", "path", "at_bytes", "shape", "templates", "text"):
        assert row[name] == audited[name], name
    assert row["requests"] == audited["requests"] > STORY_REQUESTS // 2
    assert row["shape"] == "0000-00-00A00:00:00+00:00"


@pytest.mark.parametrize("tools", [0, 5])
def test_agents_that_say_their_number_are_no_changing_number(tools: int) -> None:
    """Two agents with one prompt but for their number are two templates, and neither after two requests nor after many
    is anything to be mended."""
    fleet = Fleet()
    of = agents(2, tools=tools, alike=True)
    templates: dict[int, set[int]] = {0: set(), 1: set()}
    for number, request in enumerate(traffic(of, stamped(0), before_s=90.0, requests=1)):  # type: ignore[arg-type]  # a release
        if request.released:
            break
        sighting = fleet.see(request)
        assert fleet.advice() == []
        if number > 100:
            templates[request.agent].add(sighting.template)
    assert fleet.audited() == []
    assert 0 not in templates[0] | templates[1]
    assert templates[0].isdisjoint(templates[1])


def test_words_that_a_release_changes_once_are_no_fault() -> None:
    """The prompt is another one from now on: every conversation that is under way has changed, to the same words."""
    fleet = Fleet()
    renamed = lambda agent, now: replace(agent, system=f"Be brief, and never guess. {agent.system}")  # noqa: E731
    for request in traffic(agents(4, tools=0, alike=False), renamed, before_s=BEFORE_S, requests=40):
        fleet.see(request)
        assert fleet.advice() == []


def test_a_number_that_changes_with_each_turn_is_named() -> None:
    """Names of agents are spared, numbers that count are not: each conversation changes its own."""
    fleet = Fleet()
    counting = lambda agent, now: replace(agent, system=f"Turn {now.minute * 60 + now.second}. {agent.system}")  # noqa: E731
    for request in traffic(agents(4, tools=3, alike=True), counting, before_s=20.0, requests=40):
        fleet.see(request)
    (row,) = fleet.advice()
    assert (row["change"], row["message"], row["at_bytes"]) == (DifferenceKind.COUNTER, 0, 5)
