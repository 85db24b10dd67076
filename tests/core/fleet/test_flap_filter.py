"""A state that changes back and forth: one beginning, one end."""

from __future__ import annotations

from router.core.fleet.flap_filter import FLAPS_MIN, KEPT_MAX, STEADY_S, WINDOW_S, FlapFilter, FlapPhase


def test_flapping_begins_once_and_ends_once() -> None:
    """Two falls and rises are changes like any other. The third fall begins flapping, which lasts as long as the state
    changes, and ends after a while without any change."""
    flaps, phases = FlapFilter(), []
    for second in range(20):
        phases.append(flaps.note_change(second, flap=second % 2 == 0))
        assert not flaps.end_if_steady(second + STEADY_S - 1)
    begins = 2 * (FLAPS_MIN - 1)
    assert phases == [FlapPhase.NONE] * begins + [FlapPhase.BEGINS] + [FlapPhase.LASTS] * (19 - begins)
    assert flaps.end_if_steady(19 + STEADY_S)
    assert not flaps.end_if_steady(20 + STEADY_S), "it ends once"


def test_falls_every_few_minutes_have_one_beginning() -> None:
    """The window loses the oldest fall before the next one, and flapping lasts all the same."""
    flaps = FlapFilter()
    phases = []
    for number in range(10):
        now_s = number * (STEADY_S - 20)
        assert not flaps.end_if_steady(now_s)
        phases.append(flaps.note_change(now_s))
    assert phases.count(FlapPhase.BEGINS) == 1
    assert phases[-1] is FlapPhase.LASTS


def test_rare_falls_are_no_flapping() -> None:
    """Falls that are further apart are single changes, and are counted for the window only."""
    flaps = FlapFilter()
    for number in range(10):
        assert flaps.note_change(number * WINDOW_S / 2 + number) is FlapPhase.NONE
    assert flaps.count(9 * (WINDOW_S / 2 + 1)) == 2
    assert flaps.count(1e6) == 0


def test_few_flaps_are_kept() -> None:
    """The count is bounded."""
    flaps = FlapFilter()
    for number in range(1_000):
        flaps.note_change(number / 1e3)
    assert flaps.count(1.0) == KEPT_MAX
