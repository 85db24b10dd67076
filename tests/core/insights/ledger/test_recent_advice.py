"""Advice without a recent case, and the tenants of each row."""

from __future__ import annotations

from router.core.insights.ledger.advice import RECENT_S
from router.core.insights.ledger.lost_tokens import TENANTS_MAX
from router.core.insights.ledger.totals import Ledger
from router.core.types.cache_misses import DifferenceKind, MissReason, PromptAnalysis
from tests.core.insights.ledger.records import BEGAN_S, difference, ledger, page, record


def stamped(of: Ledger, at_s: float, tokens: int, tenant: str = "acme", template: int = 7) -> None:
    """A request of the tenant that loses tokens by a time in its prompt."""
    seen = PromptAnalysis(template=template, appended=False, difference=difference(DifferenceKind.TIMESTAMP))
    of.observe(record(at_s, misses={MissReason.DIVERGED: tokens}, analysis=seen, tenant=tenant))


def test_what_was_mended_is_last() -> None:
    """The costliest row goes behind all others a minute after its last case, whatever the limit of rows, and is back
    with the next one."""
    of = ledger()
    stamped(of, 1.0, 900_000)
    of.observe(record(2.0, misses={MissReason.SPILLED: 10_000}, tenant="bank"))
    of.settle(BEGAN_S + 3)
    assert [(row["change"], row["recent"]) for row in page(of)] == [("timestamp", True), ("spilled", True)]
    later_s = RECENT_S + 10
    of.observe(record(later_s, misses={MissReason.SPILLED: 10_000}, tenant="bank"))
    of.settle(BEGAN_S + later_s)
    rows = page(of)
    assert [(row["rank"], row["change"], row["recent"]) for row in rows] == [
        (1, "spilled", True),
        (2, "timestamp", False),
    ]
    assert [row["change"] for row in page(of, rows_max=1)] == ["spilled"]
    assert rows[0]["last_at_s"] == BEGAN_S + later_s
    stamped(of, later_s + 1, 10)
    of.settle(BEGAN_S + later_s + 2)
    assert [row["change"] for row in page(of)] == ["timestamp", "spilled"]


def test_a_replayed_load_that_ended_is_not_recent() -> None:
    """The row about replays is last in any case."""
    of = ledger()
    for number in range(30):
        of.observe(record(number / 10, hit=1_000, replay=number > 3, tenant="acme"))
    of.settle(BEGAN_S + 4)
    assert [(row["change"], row["recent"], row["tenants"]) for row in page(of)] == [("replays", True, ["acme"])]
    of.settle(BEGAN_S + 4 + RECENT_S + 1)
    assert [(row["change"], row["recent"]) for row in page(of)] == [("replays", False)]


def test_tenants_of_a_row_are_those_with_a_case() -> None:
    """The last one first, over all templates of one fault; others' requests do not count, and the number is bounded."""
    of = ledger()
    for number, (tenant, template) in enumerate((("acme", 7), ("bank", 8), ("acme", 8))):
        stamped(of, number, 1_000, tenant, template)
    of.observe(record(4.0, hit=1_000, tenant="well"))
    of.settle(BEGAN_S + 5)
    (row,) = page(of)
    assert row["tenants"] == ["acme", "bank"]
    for number in range(100):
        stamped(of, 6.0 + number / 100, 1_000, f"t{number}")
    of.settle(BEGAN_S + 8)
    (row,) = page(of)
    assert row["tenants"] == [f"t{number}" for number in range(99, 99 - TENANTS_MAX, -1)]
