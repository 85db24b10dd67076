"""Promises of the story: what its agents send, and a small run of it."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from loadtest.common.client import ReplayError
from loadtest.common.report import Row
from loadtest.insights import story
from loadtest.insights.agents import CODER, REVIEWER, SERVICE, Agent, Conversation, ReleaseClock
from tests.loadtest.rendering import Page


def bodies(agent: Agent, clock: ReleaseClock, turns: int = 4, seed: int = 3) -> list[dict[str, Any]]:
    """Requests of one conversation."""
    conversation = Conversation(agent, random.Random(seed), "m", 8)
    return [json.loads(conversation.next_body(clock)[0]) for _ in range(turns)]


@pytest.mark.parametrize("agent", [CODER, REVIEWER, SERVICE], ids=lambda agent: agent.name)
@pytest.mark.parametrize("clock", [ReleaseClock.NOWHERE, ReleaseClock.END])
def test_sound_releases_only_append(agent: Agent, clock: ReleaseClock) -> None:
    """Each request begins with all messages of the one before, and brings the same tools."""
    requests = bodies(agent, clock)
    for before, after in pairwise(requests):
        assert after["messages"][: len(before["messages"])] == before["messages"]
        assert after["tools"] == before["tools"]
        assert len(after["messages"]) > len(before["messages"])


def test_the_broken_release_changes_the_first_line_only() -> None:
    """With the time at the top no two prompts of the coding agent begin alike; behind that line all is as it was, and
    other agents tell no time."""
    first, *others = bodies(CODER, ReleaseClock.TOP)
    sound, *_ = bodies(CODER, ReleaseClock.NOWHERE)
    told, rest = first["messages"][0]["content"].split("\n\n", 1)
    assert told.startswith("Current time: 2")
    assert rest == sound["messages"][0]["content"]
    assert {body["messages"][0]["content"].split("\n\n", 1)[1] for body in others} == {rest}
    assert bodies(SERVICE, ReleaseClock.TOP) == bodies(SERVICE, ReleaseClock.NOWHERE)


def test_agents_are_of_the_size_of_real_ones() -> None:
    """A system prompt and tools of some KB, and several that begin alike."""
    systems = {bodies(CODER, ReleaseClock.NOWHERE, 1, seed)[0]["messages"][0]["content"] for seed in range(20)}
    assert len(systems) == len(CODER.notes) > 2
    assert all(system.startswith(CODER.instructions) and len(system) > 8_000 for system in systems)
    assert len(json.dumps(CODER.schemas())) > 4_000


@pytest.mark.long
def test_a_small_run_finds_what_was_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The hit rate falls with the release and comes back with the next one; the first advice names message, byte and
    what stands there; rows are in the instruments' form."""
    file = tmp_path / "rows.json"
    arguments = ["--replicas", "2", "--sessions", "6", "--phase-s", "20", "--time-scale", "8", "--mend", "--json"]
    assert story.main([*arguments, str(file)]) == 0
    said = capsys.readouterr().out
    assert "Message 0 (system) contains a date or time that changes, at byte" in said
    assert "Current time: 2" in said
    assert "/dashboard" in said
    document = json.loads(file.read_text())
    before, broken, mended = document["rows"]
    assert [row["workload"] for row in document["rows"]] == ["before", "broken", "fixed"]
    assert broken["token_hit_rate"] < before["token_hit_rate"] / 2
    assert mended["token_hit_rate"] > 2 * broken["token_hit_rate"]
    assert before["genuine_hit_rate"] == before["token_hit_rate"], "no prompt was sent twice"
    assert not any(row["errors"] for row in document["rows"])


def test_a_picture_without_a_browser_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Not after three minutes."""

    def none() -> None:
        raise ReplayError("no chromium")

    monkeypatch.setattr(story, "browser", none)
    assert story.main(["--screenshot", str(tmp_path / "page.png")]) == 2
    assert capsys.readouterr().err == "story: no chromium\n"


@pytest.mark.parametrize("arguments", [["--phase-s", "56"], ["--phase-s", "0"], ["--sessions", "0"]])
def test_a_run_is_bounded(arguments: list[str]) -> None:
    """Three phases stay under three minutes."""
    with pytest.raises(SystemExit):
        story.main(arguments)


def test_figures_are_rendered(tmp_path: Path) -> None:
    """The page's block is made from a run's JSON, again and again; half a story is refused, and one with errors."""
    rows = [
        Row(workload=phase, replicas=4, load=24.0, errors=0, token_hit_rate=rate, ttft_p50_s=0.1, ttft_p90_s=0.2)
        for phase, rate in (("before", 0.9), ("broken", 0.2), ("fixed", 0.9))
    ]
    page = Page(tmp_path, "story")
    assert page.render("story --mend", rows).count("| 20.0 % | 0.10 s | 0.20 s |") == 1
    page.refuse("story", rows[:2])
    rows[1].errors = 1
    page.refuse("story --mend", rows)
