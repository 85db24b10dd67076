"""KvStream: what it asks for, applies, clears and claims, for every way in which a stream of batches can go wrong."""

from __future__ import annotations

import pytest

from router.core.kv_events.stream import RESTARTED, Clear, Phase
from router.core.types.placements import Confidence
from tests.core.kv_events.streams import batch, connected, exact


def test_nothing_published_yet() -> None:
    """Exact from batch 0 on; not before, since an engine may keep no batches to replay."""
    owner = connected()
    owner.replay()
    assert owner.state == (Confidence.CATCHING_UP, "no batch published yet")
    owner.live(0)
    assert owner.state == (Confidence.EXACT, "joined at batch 0")


def test_an_engine_that_keeps_nothing_to_replay() -> None:
    """An empty replay after batches came is no proof of anything: followed from where we are, not exact."""
    owner = connected()
    owner.replay()
    owner.live(7)
    owner.replay()
    assert owner.state == (
        Confidence.CATCHING_UP,
        "joined late, at batch 7: the replay is empty although batches arrived",
    )
    assert owner.numbers == [7]


def test_a_restart_says_so() -> None:
    """The reason of the Clear begins with RESTARTED only where another process was proved."""
    owner = exact()
    owner.live(5)
    owner.stream.replay_ended(owner.asks[-1].token, 0.0)
    assert [step.why.startswith(RESTARTED) for step in owner.steps() if isinstance(step, Clear)] == [True]
    owner = exact()
    owner.live(9)
    owner.stream.on_replay_batch(owner.asks[-1].token, 8, batch(8), 0.0)
    assert [step.why.startswith(RESTARTED) for step in owner.steps() if isinstance(step, Clear)] == [False]


def test_batches_lost_for_good() -> None:
    """The replay begins after our last batch: nothing before is sure, and the grade says so."""
    owner = exact()
    owner.live(9)
    owner.replay(8, 9)
    assert owner.told == ["suspend", "ask 2", "clear", "suspend", "apply 8", "apply 9", "resume"]
    assert owner.state == (Confidence.CATCHING_UP, "batches lost: the replay begins at batch 8, after batch 2")


def test_the_sequence_went_back() -> None:
    """Without a lost connection: a restart if the replay says so, and only an old duplicate if not."""
    owner = exact()
    owner.live(0, process="B")
    assert owner.told == ["suspend", "ask 2"]
    owner.replay(2)  # the same process after all, and what came is not its: to be sure it is asked once more
    assert owner.told[2:] == ["ask 2"]
    owner.replay(2)
    assert owner.told[-1] == "resume"
    assert owner.state == (Confidence.EXACT, "joined at batch 0")
    owner.live(1)
    assert owner.stream.counts.duplicates == 1


def test_a_batch_that_no_replay_has() -> None:
    """It came, and the same process says that it does not exist: all is given up but for what follows."""
    owner = exact()
    owner.live(9)
    for _ in range(3):
        assert owner.stream.phase is Phase.ASKING
        owner.replay(2)
    assert owner.state[0] is Confidence.CATCHING_UP
    assert owner.stream.phase is Phase.FOLLOWING
    owner.live(20)
    owner.wait(10.0)
    assert owner.told[-1] == "ask 0"  # and later all of it is asked for


def test_nothing_is_applied_on_top_of_a_contradiction() -> None:
    """A batch that fits, behind one that does not, waits until it is known whose they are."""
    owner = exact()
    owner.live(9)
    owner.live(3)
    owner.replay(2)
    assert owner.told == ["suspend", "ask 2", "ask 2"]
    owner.replay(2, 3, 4, 5, 6, 7, 8, 9)
    assert owner.numbers == list(range(10))


def test_batches_of_an_older_connection_are_of_no_use() -> None:
    """They are not held against the replay either."""
    owner = connected()
    owner.live(7, process="B")
    owner.stream.on_connected(0.0)
    owner.steps()
    owner.replay(0)
    assert owner.told == ["suspend", "ask 0", "ask 0", "apply 0", "resume"]


FRAMES = "messages of 2 frames, 3 expected"


@pytest.mark.parametrize("replays", [True, False])
def test_messages_that_are_no_batches_are_said(replays: bool) -> None:
    """A publisher of which no message can be read is not taken for one that published nothing, nor is it exact by its
    replays, since nothing new is heard. The first batch that comes lifts that, and another connection begins anew."""
    owner = connected(replays=replays)
    if replays:
        owner.replay(0, 1)
        assert owner.state == (Confidence.EXACT, "joined at batch 0")
    else:
        assert owner.state == (Confidence.CATCHING_UP, "no replay endpoint")
    before = owner.state
    for _ in range(3):
        owner.stream.unreadable(FRAMES)
        owner.steps()
    assert owner.state == (Confidence.CATCHING_UP, FRAMES)
    assert owner.stream.counts.malformed == 3
    owner.live(*([2] if replays else [0]))
    assert owner.state == (before if replays else (Confidence.EXACT, "joined at batch 0"))
    owner.stream.on_disconnected("lost", owner.now_s)
    owner.stream.on_connected(owner.now_s)
    owner.steps()
    owner.stream.unreadable(FRAMES)
    if replays:
        owner.replay(2)
    assert owner.state == (Confidence.CATCHING_UP, FRAMES)


def test_a_message_that_is_no_batch_beside_batches_is_counted_alone() -> None:
    """Their numbers show that none is missing."""
    owner = exact()
    owner.live(3)
    owner.stream.unreadable(FRAMES)
    owner.live(4)
    assert owner.state == (Confidence.EXACT, "joined at batch 0")
    assert owner.stream.counts.malformed == 1
