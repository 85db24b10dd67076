"""Whether events are behind answers."""

from __future__ import annotations

from router.core.cache_state.event_lag import LATE_S_MAX, LEAST_S, EventLag, PendingTails

ROOT = 7


def test_nothing_is_late_when_all_was_heard() -> None:
    """Blocks heard before the answer ended, or after it, leave nothing to wait for."""
    tails = PendingTails()
    tails.begin(1, 10, 1)
    tails.grow(10, [11, 12])
    tails.end(1, 2, 5.0)
    assert not tails.has_pending_blocks(0.0)
    tails.begin(2, 20, 1)
    tails.end(2, 1, 5.0)
    assert tails.has_pending_blocks(0.0)
    tails.grow(20, [21])
    assert not tails.has_pending_blocks(0.0)
    assert not tails.open


def test_an_answer_within_its_last_block_promises_nothing() -> None:
    """It filled no block, so none is waited for."""
    tails = PendingTails()
    tails.begin(1, 10, 1)
    tails.end(1, 0, 5.0)
    assert not tails.has_pending_blocks(0.0)


def test_only_prompts_that_go_on_behind_a_late_answer_are_unsure() -> None:
    """Another conversation, or the same prompt again, needs none of its blocks."""
    tails = PendingTails()
    tails.begin(1, 11, 2)
    tails.end(1, 1, 5.0)
    assert tails.is_continuation([10, 11, 12], ROOT, 0.0)
    assert not tails.is_continuation([10, 11], ROOT, 0.0)
    assert not tails.is_continuation([10, 99, 12], ROOT, 0.0)
    tails.begin(2, ROOT, 0)
    tails.end(2, 1, 5.0)
    assert tails.is_continuation([99], ROOT, 0.0)
    assert not tails.is_continuation([99], ROOT + 1, 0.0)


def test_what_was_not_heard_in_time_is_given_up() -> None:
    """And the time is the answer's own."""
    tails = PendingTails()
    tails.begin(1, 10, 1)
    tails.end(1, 1, 5.0)
    assert tails.has_pending_blocks(4.9)
    assert not tails.has_pending_blocks(5.0)
    assert not tails.open


def test_when_it_is_over() -> None:
    """When a batch was heard that is younger than the answer, in whatever order they came; after time enough, as an
    engine may be quiet; at once where batches bear no times."""
    tails = PendingTails()
    assert tails.over(2.0, 2.0)
    tails.advance_watermark(2.0)
    tails.advance_watermark(1.5)
    assert not tails.over(2.0, 2.0)
    assert tails.over(1.9, 2.0)
    assert not tails.over(2.0, 1.9 + LATE_S_MAX)
    assert tails.over(2.0, 2.0 + LATE_S_MAX)
    tails.clear()
    assert tails.over(20.0, 20.0)


def test_lateness_is_what_a_batch_lags_behind_the_quickest() -> None:
    """Whatever the clocks' difference, and though it drifts."""
    lateness = EventLag()
    assert lateness.late_s(-3_600.0, 0.0) == 0.0
    assert lateness.late_s(-3_598.0, 1.0) == 2.0
    assert lateness.late_s(-3_600.5, 2.0) == 0.0
    assert lateness.late_s(-3_600.0, 2.0 + LEAST_S) == 0.5  # the quickest is remembered for a while
    assert lateness.late_s(-3_599.0, 4.0 + 2 * LEAST_S) == 1.0
    assert lateness.late_s(-3_599.0, 6.0 + 3 * LEAST_S) == 0.0


def test_an_engine_whose_counts_do_not_fit_is_not_waited_for() -> None:
    """After a few answers whose blocks were never heard of nothing is said any more; when they fit again, it is."""
    tails = PendingTails()
    for lease in range(20):
        tails.begin(lease, 10, 1)
        tails.end(lease, 1, float(lease))
        tails.has_pending_blocks(float(lease))
    tails.begin(99, 10, 1)
    tails.end(99, 1, 1_000.0)
    assert not tails.has_pending_blocks(50.0)
    for lease in range(100, 140):
        tails.begin(lease, 30, 1)
        tails.end(lease, 1, 2_000.0)
        tails.grow(30, [31])
    assert tails.has_pending_blocks(50.0)


def test_leases_that_share_a_prompt_grow_together() -> None:
    """Each ends on its own; one that failed is forgotten."""
    tails = PendingTails()
    tails.begin(1, 10, 1)
    tails.begin(2, 10, 1)
    tails.begin(3, 10, 1)
    tails.drop(3)
    tails.drop(3)
    tails.end(1, 1, 5.0)
    tails.grow(10, [11])
    assert not tails.has_pending_blocks(0.0)
    tails.end(2, 2, 5.0)
    assert tails.has_pending_blocks(0.0)
    tails.clear()
    assert not tails.has_pending_blocks(0.0)
    tails.end(2, 2, 5.0)  # of before the clear
    assert not tails.has_pending_blocks(0.0)


def test_the_same_prompt_again_may_get_the_same_answer() -> None:
    """Its blocks are held, and an engine may say nothing of them: the wait is short, and the silence no fault."""
    tails = PendingTails()
    tails.begin(0, 10, 1)
    tails.grow(10, [11])
    tails.end(0, 1, 5.0, 0.01)
    for lease in range(1, 40):
        tails.begin(lease, 10, 1)
        tails.end(lease, 1, 5.0 + lease, lease + 0.01)
        assert tails.has_pending_blocks(float(lease))
        assert not tails.has_pending_blocks(lease + 0.01)
    tails.begin(99, 20, 1)
    tails.end(99, 1, 500.0, 100.0)
    assert tails.has_pending_blocks(200.0)
    tails.clear()
    tails.begin(100, 10, 1)
    tails.end(100, 1, 500.0, 300.0)
    assert tails.has_pending_blocks(400.0)
