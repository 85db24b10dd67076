"""Restarts by a metrics page, and pages of several processes that are none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.core.fleet.restart_detection import CALM_S, CHANGES_S, PageChange, PageSource
from router.core.types.replicas import Load


def by_start(*starts_s: float | None, every_s: float = 1.0) -> tuple[PageSource, list[PageChange]]:
    """Pages of processes that began then, one after another."""
    source = PageSource()
    return source, [source.compare(Load(started_s=at), n * every_s) for n, at in enumerate(starts_s)]


def by_count(*totals: float, every_s: float = 1.0) -> list[PageChange]:
    """Pages without a start time."""
    source = PageSource()
    return [source.compare(Load(prompt_tokens_total=total), n * every_s) for n, total in enumerate(totals)]


def test_a_restart_is_one() -> None:
    """A younger process, or a counter that went back; more of them later are restarts too."""
    assert by_start(100.0, 100.0, 200.0, 200.0)[1] == [
        PageChange.NONE,
        PageChange.NONE,
        PageChange.RESTART,
        PageChange.NONE,
    ]
    assert by_count(5, 9, 2, 3) == [PageChange.NONE, PageChange.NONE, PageChange.RESTART, PageChange.NONE]
    starts = [float(n) for n in range(6)]
    assert set(by_start(*starts, every_s=CHANGES_S)[1][1:]) == {PageChange.RESTART}


def test_an_older_process_shows_that_there_are_several() -> None:
    """No engine begins before the one that it follows."""
    source, changes = by_start(100.0, 200.0, 100.0, 200.0, 100.0)
    assert changes == [PageChange.NONE, PageChange.RESTART, PageChange.SEVERAL, PageChange.IGNORED, PageChange.IGNORED]
    assert source.several
    assert (source.restarts, source.ignored) == (1, 3)
    assert by_start(200.0, 100.0)[1] == [PageChange.NONE, PageChange.SEVERAL]


def test_the_third_change_within_a_minute_shows_that_there_are_several() -> None:
    """Counters that saw-tooth, and processes that happen to be met in the order of their start."""
    expected = [
        PageChange.NONE,
        PageChange.RESTART,
        PageChange.NONE,
        PageChange.RESTART,
        PageChange.NONE,
        PageChange.SEVERAL,
    ]
    assert by_count(9, 5, 9, 5, 9, 5) == expected
    assert by_start(1.0, 2.0, 3.0, 4.0)[1] == [
        PageChange.NONE,
        PageChange.RESTART,
        PageChange.RESTART,
        PageChange.SEVERAL,
    ]


def test_one_process_again() -> None:
    """Without a change for long, the next one is a restart again."""
    source, _ = by_start(200.0, 100.0)
    assert source.compare(Load(started_s=100.0), CALM_S) is PageChange.NONE
    assert source.several
    assert source.compare(Load(started_s=100.0), CALM_S + 2) is PageChange.NONE
    assert not source.several
    assert source.compare(Load(started_s=150.0), CALM_S + 3) is PageChange.RESTART


def test_a_refused_connection_proves_a_restart() -> None:
    """A clock that was set back, and an engine that fails again and again, are still one process at a time."""
    source = PageSource()
    for n in range(9):
        assert source.compare(Load(started_s=100.0 - n, prompt_tokens_total=10.0 - n), float(n)) is PageChange.NONE
        source.on_engine_restarted()
    assert not source.several


@given(st.lists(st.tuples(st.sampled_from([None, 1.0, 2.0, 3.0]), st.sampled_from([None, 0.0, 5.0])), max_size=40))
def test_at_most_two_restarts_a_minute(pages: list[tuple[float | None, float | None]]) -> None:
    """Whatever the pages say, knowledge is given up twice within a minute at most, and each change is counted."""
    source = PageSource()
    loads = [Load(started_s=started_s, prompt_tokens_total=total) for started_s, total in pages]
    changes = [source.compare(load, n * 0.5) for n, load in enumerate(loads)]
    assert changes.count(PageChange.RESTART) == source.restarts <= 2
    assert changes.count(PageChange.SEVERAL) == source.several <= 1
    assert changes.count(PageChange.SEVERAL) + changes.count(PageChange.IGNORED) == source.ignored
