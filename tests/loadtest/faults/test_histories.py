"""Histories of routers that share a store: what the model calls an anomaly, and one small history."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.common import rivals
from loadtest.common.networks import Network
from loadtest.faults.bench import Bench, Scale
from loadtest.faults.histories.fleet import HistoryRouter, Stores
from loadtest.faults.histories.model import HOUR_S, SETTLED_S, Model, excess
from loadtest.faults.histories.rows import histories
from loadtest.faults.histories.run import OWNERS, History


def served(count: int, every_s: float, start_s: float = 0.0) -> list[float]:
    """Times of so many requests."""
    return [start_s + number * every_s for number in range(count)]


def test_a_full_bucket_and_the_rate_are_no_excess() -> None:
    """A tenant gets its bucket at once and its rate from then on; more is excess, as a part of a window's worth."""
    fair = served(60, 0.0) + served(3_600, 1.0, 1.0)
    assert excess(fair, 60) <= 0
    assert excess(sorted(fair + served(180, 0.0, 1_800.0)), 60) == pytest.approx(0.05, abs=0.001)
    assert excess([], 60) == 0
    assert excess(served(61, 0.0), 60, 60.0) == pytest.approx(1 / 60)


@given(st.lists(st.floats(0, 7_200), max_size=60).map(sorted), st.integers(1, 20), st.sampled_from((60.0, HOUR_S)))
def test_excess_is_that_of_the_worst_window(times_s: list[float], per_min: int, window_s: float) -> None:
    """Every window that begins and ends with a request is looked at."""
    worst = 0.0
    for first, begin_s in enumerate(times_s):
        for last in range(first, len(times_s)):
            if times_s[last] - begin_s <= window_s:
                worst = max(worst, last - first + 1 - per_min - per_min / 60 * (times_s[last] - begin_s))
    assert excess(times_s, per_min, window_s) == pytest.approx(worst / (per_min / 60 * window_s), abs=1e-9)


def test_a_response_belongs_to_its_tenant_and_to_who_knows_it() -> None:
    """Another tenant never gets it, and a router that knew it never forgets it."""
    model = Model(2)
    model.on_stored("a", "acme", 0, 0, 10.0)
    model.on_read("a", "acme", 0, 0, 200, "acme")
    model.on_read("a", "umbra", 1, 0, 404, "")
    model.on_read("a", "acme", 1, 0, 404, "")  # it may not have heard of it yet
    assert not model.anomalies
    model.on_read("a", "umbra", 1, 0, 200, "acme")
    model.on_read("a", "acme", 0, 0, 404, "")
    model.on_read("a", "acme", 0, 0, 200, "umbra")
    model.on_stored("a", "umbra", 1, 0, 11.0)
    assert sum(model.anomalies.values()) == len(model.anomalies) == 4


@pytest.mark.parametrize("fault", ["none", "deaf", "soon deaf", "killed"])
def test_what_a_living_router_knows_all_must_know(fault: str) -> None:
    """A router knows what another one stored while both heard the store; once nobody who knew it lives, nobody must."""
    model = Model(3)
    model.on_deaf(2, 5.0)
    if fault == "deaf":
        model.on_deaf(1, 9.0)
        model.on_hearing(1, 9.5)  # so soon before that it may not have heard
    model.on_stored("a", "acme", 0, 0, 10.0)
    if fault == "soon deaf":
        model.on_deaf(0, 10.0 + SETTLED_S / 2)
    if fault == "killed":
        model.on_killed(0, 10.0 + SETTLED_S)
        model.on_killed(1, 20.0)
    model.settle(30.0)
    knows = {(0, 0)} if fault in ("deaf", "soon deaf") else {(0, 0), (1, 0)}
    assert model.stored["a"].known_to == knows
    assert [each.id for each in model.due_everywhere()] == ([] if fault == "killed" else ["a"])
    model.on_read_at_end("a", "acme", 2, 404)
    assert list(model.anomalies) == ["a response that a router does not know in the end"]


@pytest.mark.inside
@pytest.mark.parametrize(("changes", "excused"), [(0, False), (1, True), (2, False)])
async def test_a_request_to_a_router_that_was_killed_since_its_choice_is_excused(
    tmp_path: Path, changes: int, excused: bool
) -> None:
    """Nothing listens at this router. That excuses a request if the router was killed before the request was sent, but
    not if nobody killed it, or if it was restarted since."""
    async with aiohttp.ClientSession() as http, AsyncExitStack() as stack:
        router = HistoryRouter(0, tmp_path, [], 0.0, Network(0))
        history = History([router], Stores(stack, tmp_path), [], http, seed=1)
        history._changes[0] = changes
        answer = await history._ask(0, OWNERS[0], "GET", "/v1/models")
        assert (answer is None) is excused


@pytest.mark.long
@pytest.mark.promise("A stored response stays its tenant's through every router.", "store")
@pytest.mark.promise("With routers that share, no tenant gets more than 1.05 times its rate in any hour.", "store")
async def test_a_history(tmp_path: Path) -> None:
    """Ten seconds of faults at four real routers and a real store: the model finds nothing."""
    rows = await histories(Bench(rivals.ours(), Scale(counts=True), tmp_path), 10.0, 1)
    assert len(rows) == 12
    assert not [row for row in rows if row.ok is False]
