"""Replays that are cut, long or late, and what a stream doubts."""

from __future__ import annotations

import msgspec
import pytest

from router.core.kv_events.replay_timer import PROOFS_BURST
from router.core.kv_events.stream import CONFIRM_BATCHES, KvStream, Phase, StreamLimits, Suspend
from router.core.types.placements import Confidence
from tests.core.kv_events.streams import LIMITS, Owner, batch, connected, exact


def test_a_cut_or_silent_replay_is_asked_for_again() -> None:
    """From where it broke off, later each time; then the stream goes on without, and joins again later."""
    owner = exact()
    owner.live(6)
    owner.replay(2, 3, end=False)
    owner.wait(1.0)
    assert owner.told[-1] == "ask 3"
    for delay_s in (2.0, 4.0):
        owner.wait(delay_s - 0.1)
        assert owner.stream.phase is Phase.ASKING
        owner.wait(0.1)
    assert owner.state == (Confidence.CATCHING_UP, "joined late, at batch 6: no answer to the replay request")
    assert owner.numbers == [6]
    owner.wait(10.0)
    assert owner.told[-1] == "ask 0"
    assert owner.numbers == [6]  # nothing is forgotten before there is an answer
    owner.replay(*range(6))
    assert owner.told[-1] == "ask 5"  # batch 6 came, so it must be there
    owner.replay(5, 6)
    assert owner.numbers == list(range(7))
    assert owner.state == (Confidence.EXACT, "joined at batch 0")


def test_a_hole_in_a_replay() -> None:
    """A ROUTER drops what its queue cannot take: asked for again; the same hole three times is a loss."""
    owner = connected()
    owner.replay(0, 1, 4, end=False)
    assert owner.told[-1] == "ask 1"
    owner.replay(1, 2, 3, 4)
    assert owner.state == (Confidence.EXACT, "joined at batch 0")
    owner.live(9)
    for _ in range(3):
        owner.replay(4, 7, end=False)
    owner.replay(8, 9)
    assert owner.state == (Confidence.CATCHING_UP, "batches lost: the replay has no batch between batch 4 and batch 7")
    assert owner.numbers == [7, 8, 9]


def test_the_end_of_a_long_replay_is_asked_for_again() -> None:
    """It may have been dropped just before the end marker."""
    owner = connected()
    owner.replay(*range(CONFIRM_BATCHES))
    assert owner.told[-1] == f"ask {CONFIRM_BATCHES - 1}"
    owner.replay(CONFIRM_BATCHES - 1, CONFIRM_BATCHES)
    assert owner.state == (Confidence.EXACT, "joined at batch 0")
    assert len(owner.held) == CONFIRM_BATCHES + 1


@pytest.mark.parametrize(("first_live", "asks"), [(-1, False), (0, False), (1, True)])
def test_a_live_batch_shows_that_a_long_replay_is_whole(first_live: int, asks: bool) -> None:
    """Where the batches that came meanwhile begin in it, or right behind it, nothing was dropped at its end, and what
    it has is exact at once; where they begin later, its end is asked for."""
    owner, first = connected(), CONFIRM_BATCHES + first_live
    owner.replay(*range(CONFIRM_BATCHES), end=False)
    owner.live(*range(first, CONFIRM_BATCHES + 3))
    owner.replay()
    assert (owner.told[-1] == f"ask {CONFIRM_BATCHES - 1}") is asks
    if asks:
        owner.replay(*range(CONFIRM_BATCHES - 1, CONFIRM_BATCHES + 3))
    assert owner.state == (Confidence.EXACT, "joined at batch 0")
    assert owner.numbers == list(range(CONFIRM_BATCHES + 3))


def test_the_last_batch_lost_is_found_by_looking() -> None:
    """A second after the join, and every look_s: what the live side missed at its end is applied."""
    owner = exact()
    owner.wait(1.0)
    assert owner.told == ["ask 2"]
    owner.replay(2, 3)
    assert owner.numbers == [0, 1, 2, 3]
    assert owner.told == ["ask 2", "apply 3"]
    owner.wait(10.0)
    owner.replay(3, process="B", end=False)
    assert owner.told[-2:] == ["suspend", "ask 3"]


def test_a_look_that_does_not_begin_with_our_last_batch() -> None:
    """It proves nothing: the process may be another one."""
    owner = exact()
    owner.wait(1.0)
    owner.replay(3, end=False)
    assert owner.told == ["ask 2", "suspend", "ask 2"]
    assert owner.numbers == [0, 1, 2]


@pytest.mark.parametrize("first", [0, 4])
def test_without_a_replay_endpoint(first: int) -> None:
    """Exact only if the first batch after a connection is batch 0; a gap, or a new connection, clears."""
    owner = connected(replays=False)
    owner.live(first)
    why = f"joined late, at batch {first}: no replay endpoint"
    assert owner.state == ((Confidence.CATCHING_UP, why) if first else (Confidence.EXACT, "joined at batch 0"))
    owner.live(first + 3)
    assert owner.told == ["apply " + str(first), "clear", f"apply {first + 3}"]
    assert owner.state[0] is Confidence.CATCHING_UP
    owner.stream.on_disconnected("gone", 0.0)
    owner.stream.on_connected(0.0)
    owner.live(0, process="B")
    assert owner.state == (Confidence.EXACT, "joined at batch 0")
    assert owner.numbers == [0]
    owner.stream.resync("distrusted", 0.0)
    owner.live(0, process="C")  # whether it is the first after all we cannot know
    assert owner.state[0] is Confidence.CATCHING_UP


def test_what_is_in_doubt() -> None:
    """A join, also one that we ask for, hides only what is told; whatever may mean another process hides all, and that
    ends when it is settled, not when events are forgotten."""

    def doubts(owner: Owner) -> list[bool]:
        return [step.doubt for step in owner.steps() if isinstance(step, Suspend)]

    owner = Owner(KvStream(True, LIMITS))
    owner.stream.on_connected(0.0)
    assert doubts(owner) == [False]
    owner.stream.on_disconnected("gone", 0.0)
    assert doubts(owner) == [True]
    owner.stream.on_connected(0.0)
    assert doubts(owner) == []
    owner.replay(0, 1)
    assert not owner.stream.suspended
    owner.stream.resync("distrusted", 0.0)
    assert doubts(owner) == [False]
    owner.replay(0, 1)
    for _ in range(2):
        owner.stream.verify("connection refused", 0.0)
        assert doubts(owner) == [True]
        owner.replay(1)
    owner.stream.on_disconnected("gone", 0.0)
    owner.stream.on_connected(0.0)
    assert doubts(owner) == [True]
    owner.asks.append(owner.asks[-1])
    owner.stream.on_replay_batch(owner.asks[-1].token, 1, batch(1, "B"), 0.0)
    assert doubts(owner) == [True]  # behind the clear


def test_a_suspension_has_a_limit() -> None:
    """Then everything is forgotten, and the router works by its own estimate until there is a connection."""
    owner = exact()
    owner.stream.on_disconnected("gone", 0.0)
    owner.wait(19.9)
    assert owner.numbers == [0, 1, 2]
    assert owner.stream.suspended
    owner.wait(0.1)
    assert owner.state == (Confidence.ESTIMATED, "event stream lost: gone")
    assert not owner.held
    assert not owner.stream.suspended
    owner.stream.on_connected(owner.now_s)
    owner.steps()
    for seq in range(30):  # a long replay that comes is not a stream that is lost
        owner.replay(seq, end=False)
        owner.wait(0.9)
    owner.replay(29)
    assert "clear" not in owner.told[-30:]
    assert owner.state == (Confidence.EXACT, "joined at batch 0")


def test_a_malformed_batch() -> None:
    """It may have named removals: all is forgotten, the stream goes on, and is exact again after a clear."""
    owner = exact()
    owner.stream.live(3, b"\xc1", 0.0)
    owner.steps()
    assert owner.told == ["clear"]
    assert owner.state[0] is Confidence.CATCHING_UP
    owner.live(4)
    assert owner.numbers == [4]
    owner.stream.live(5, batch(5, "A", "AllBlocksCleared"), 0.0)
    owner.steps()
    assert owner.state[0] is Confidence.EXACT
    assert owner.stream.counts.malformed == 1


def test_an_unreadable_event_lowers_the_grade_alone() -> None:
    """The rest of its batch counts, and nothing is forgotten."""
    owner = exact()
    owner.stream.live(3, msgspec.msgpack.encode([0.0, [{"type": "BlockStored"}], 0]), 0.0)
    owner.steps()
    assert owner.told == ["apply 3"]
    assert owner.state == (Confidence.CATCHING_UP, "events of batch 3 cannot be decoded")


def test_a_full_queue_loses_nothing() -> None:
    """What it cannot take is asked for again, and the stream is not exact meanwhile."""
    owner = connected(limits=StreamLimits(queue_batches_max=2))
    owner.live(2, 3, 4, 5)
    assert owner.stream.counts.dropped == 2
    owner.replay(0, 1, 2)
    assert owner.stream.phase is Phase.ASKING
    owner.replay(2, 3, 4, 5)
    assert owner.numbers == list(range(6))
    assert owner.state == (Confidence.EXACT, "joined at batch 0")


def test_answers_of_an_older_request_are_of_no_interest() -> None:
    """Each request has its token."""
    owner = connected()
    old = owner.asks[-1].token
    owner.wait(1.0)
    owner.stream.on_replay_batch(old, 0, batch(0, "B"), 0.0)
    owner.stream.replay_ended(old, 0.0)
    assert owner.steps() == []
    owner.replay(0)
    assert owner.numbers == [0]


def test_a_publisher_that_contradicts_itself_is_not_asked_all_the_time() -> None:
    """Two processes under one name: after a burst at most one proof a second."""
    owner = exact()
    for _ in range(200):
        owner.live(0, process="B")
        while owner.stream.phase is Phase.ASKING and owner.told[-1] == "ask 2":
            owner.told.append("answered")
            owner.replay(2)
    assert sum(what.startswith("ask") for what in owner.told) <= PROOFS_BURST + 1


def test_resync_forgets_and_joins_again() -> None:
    """A replay that ends before the batch we had is not believed at once."""
    owner = exact()
    owner.stream.resync("distrusted", 0.0)
    owner.steps()
    assert owner.told == ["clear", "suspend", "ask 0"]
    owner.replay(0, 1)
    assert owner.stream.phase is Phase.ASKING
    owner.replay(1, 2)
    assert owner.numbers == [0, 1, 2]
    assert owner.state == (Confidence.EXACT, "joined at batch 0")
