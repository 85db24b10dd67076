from __future__ import annotations

from router.core.admission.returning import LEFT_MAX, RETURN_S, Returning


def test_who_comes_again_has_waited() -> None:
    """What it waited is known once, and for a minute."""
    returning = Returning()
    returning.left("a", 12.0, 100.0)
    assert returning.back("a", 130.0) == 12.0
    assert returning.back("a", 130.0) == 0.0
    returning.left("a", 12.0, 100.0)
    assert returning.back("a", 100.0 + RETURN_S + 0.1) == 0.0


def test_what_has_no_name_is_not_remembered() -> None:
    """Nor is what did not wait."""
    returning = Returning()
    returning.left(None, 12.0, 100.0)
    returning.left("a", 0.0, 100.0)
    assert len(returning) == 0
    assert returning.back(None, 100.0) == 0.0


def test_it_is_bounded() -> None:
    """However many leave, so many are remembered: the last ones."""
    returning = Returning()
    for n in range(2 * LEFT_MAX):
        returning.left(n, 1.0, float(n))
    assert len(returning) == LEFT_MAX
    assert returning.back(0, 2.0 * LEFT_MAX) == 0.0
    assert returning.back(2 * LEFT_MAX - 1, 2.0 * LEFT_MAX) == 1.0
