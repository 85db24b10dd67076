from __future__ import annotations

from router.core.admission.wait_credit import LEFT_MAX, RETURN_S, WaitCredit


def test_who_comes_again_has_waited() -> None:
    """What it waited is known once, and for a minute."""
    returning = WaitCredit()
    returning.remember("a", 12.0, 100.0)
    assert returning.redeem("a", 130.0) == 12.0
    assert returning.redeem("a", 130.0) == 0.0
    returning.remember("a", 12.0, 100.0)
    assert returning.redeem("a", 100.0 + RETURN_S + 0.1) == 0.0


def test_what_has_no_name_is_not_remembered() -> None:
    """Nor is what did not wait."""
    returning = WaitCredit()
    returning.remember(None, 12.0, 100.0)
    returning.remember("a", 0.0, 100.0)
    assert len(returning) == 0
    assert returning.redeem(None, 100.0) == 0.0


def test_it_is_bounded() -> None:
    """However many leave, so many are remembered: the last ones."""
    returning = WaitCredit()
    for n in range(2 * LEFT_MAX):
        returning.remember(n, 1.0, float(n))
    assert len(returning) == LEFT_MAX
    assert returning.redeem(0, 2.0 * LEFT_MAX) == 0.0
    assert returning.redeem(2 * LEFT_MAX - 1, 2.0 * LEFT_MAX) == 1.0
