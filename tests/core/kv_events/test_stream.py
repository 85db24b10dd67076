"""KvStream: what it asks for, applies, clears and claims, for every way in which a stream of batches can go wrong."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec
import pytest

from router.core.facts.placements import Grade
from router.core.kv_events.replay import PROOFS_BURST
from router.core.kv_events.stream import (
    CONFIRM_BATCHES,
    RESTARTED,
    Apply,
    Ask,
    Clear,
    KvStream,
    Limits,
    Phase,
    Regrade,
    Resume,
    Step,
    Suspend,
)

LIMITS = Limits(silence_s=1.0, asks_max=3, suspended_max_s=20.0, look_s=10.0)


def batch(seq: int, process: str = "A", *kinds: str) -> bytes:
    """A batch unlike any other; `kinds` of events in it."""
    return msgspec.msgpack.encode([seq + ord(process) / 1_000, [{"type": kind} for kind in kinds], 0])


@dataclass
class Owner:
    """Takes the steps as they come; `told` is what they were, in short."""

    stream: KvStream
    now_s: float = 0.0
    asks: deque[Ask] = field(default_factory=deque)
    told: list[str] = field(default_factory=list)
    held: list[tuple[int, float | None]] = field(default_factory=list)  # number and time of applied batches

    def steps(self) -> list[Step]:
        """All that are due."""
        taken: list[Step] = []
        while (step := self.stream.next(self.now_s)) is not None:
            taken.append(step)
            if isinstance(step, Ask):
                self.asks.append(step)
                self.told.append(f"ask {step.first}")
            elif isinstance(step, Apply):
                self.held.append((step.seq, step.batch.at_s))
                self.told.append(f"apply {step.seq}")
            elif isinstance(step, Clear):
                self.held.clear()
                self.told.append("clear")
            elif isinstance(step, Suspend | Resume):
                self.told.append(type(step).__name__.lower())
            else:
                assert isinstance(step, Regrade)
        return taken

    def live(self, *seqs: int, process: str = "A") -> None:
        """Batches of a process arrive."""
        for seq in seqs:
            self.stream.live(seq, batch(seq, process), self.now_s)
            self.steps()

    def replay(self, *seqs: int, process: str = "A", end: bool = True) -> None:
        """The replay asked for last is answered."""
        token = self.asks[-1].token
        for seq in seqs:
            self.stream.replayed(token, seq, batch(seq, process), self.now_s)
            self.steps()
        if end:
            self.stream.replay_ended(token, self.now_s)
            self.steps()

    def wait(self, elapsed_s: float) -> None:
        """Time passes."""
        self.now_s += elapsed_s
        self.stream.tick(self.now_s)
        self.steps()

    @property
    def state(self) -> tuple[Grade, str]:
        """Grade and reason."""
        return self.stream.grade, self.stream.why

    @property
    def numbers(self) -> list[int]:
        """Of the batches that count."""
        return [seq for seq, _ in self.held]


def connected(*, replays: bool = True, limits: Limits = LIMITS) -> Owner:
    """A stream whose connection came up."""
    owner = Owner(KvStream(replays, limits))
    owner.stream.connected(0.0)
    owner.steps()
    return owner


def exact(count: int = 3, limits: Limits = LIMITS) -> Owner:
    """A stream that has batches 0 to count - 1, exactly."""
    owner = connected(limits=limits)
    owner.replay(*range(count))
    assert owner.state == (Grade.EXACT, "joined at batch 0")
    owner.told.clear()
    return owner


def test_live_batches_wait_for_the_replay() -> None:
    """Those that it has too are applied once; the rest follows in order; nothing counts before that."""
    owner = connected()
    owner.live(2, 3)
    assert owner.told == ["suspend", "ask 0"]
    owner.replay(0, 1, 2)
    assert owner.told[2:] == ["apply 0", "apply 1", "apply 2", "apply 3", "resume"]
    assert owner.state == (Grade.EXACT, "joined at batch 0")
    assert owner.stream.counts.duplicates == 1


def test_nothing_published_yet() -> None:
    """Exact from batch 0 on; not before, since an engine may keep no batches to replay."""
    owner = connected()
    owner.replay()
    assert owner.state == (Grade.CATCHING_UP, "nothing published yet")
    owner.live(0)
    assert owner.state == (Grade.EXACT, "joined at batch 0")


def test_an_engine_that_keeps_nothing_to_replay() -> None:
    """An empty replay after batches came is no proof of anything: followed from where we are, not exact."""
    owner = connected()
    owner.replay()
    owner.live(7)
    owner.replay()
    assert owner.state == (Grade.CATCHING_UP, "joined late, at batch 7: replay is empty though batches came")
    assert owner.numbers == [7]


def test_a_late_join_becomes_exact_by_a_clear() -> None:
    """All that follows is known then."""
    owner = connected()
    owner.replay(5, 6)
    assert owner.state == (Grade.CATCHING_UP, "joined late: the replay begins at batch 5")
    owner.stream.live(7, batch(7, "A", "AllBlocksCleared"), 0.0)
    owner.steps()
    assert owner.state == (Grade.EXACT, "joined at a clear, in batch 7")


@pytest.mark.parametrize("reconnect", [True, False])
def test_continuity_is_proved_by_bytes(reconnect: bool) -> None:
    """After a gap or a new connection the replay begins with our last batch, equal: nothing is forgotten."""
    owner = exact()
    if reconnect:
        owner.stream.disconnected("gone", 0.0)
        owner.stream.connected(0.0)
        owner.steps()
    else:
        owner.live(5)
    assert owner.told == ["suspend", "ask 2"]
    assert owner.state[0] is Grade.CATCHING_UP
    owner.replay(2, 3, 4, 5)
    assert owner.told[2:] == ["apply 3", "apply 4", "apply 5", "resume"]
    assert owner.state == (Grade.EXACT, "joined at batch 0")


def test_a_restart_that_passed_our_number() -> None:
    """Other bytes under our number: everything goes at once, the new process is joined from 0."""
    owner = exact()
    owner.stream.disconnected("gone", 0.0)
    owner.stream.connected(0.0)
    owner.steps()
    owner.replay(2, process="B", end=False)
    assert owner.told == ["suspend", "ask 2", "clear", "suspend", "ask 0"]
    owner.replay(0, 1, 2, 3, process="B")
    assert owner.numbers == [0, 1, 2, 3]
    assert owner.state == (Grade.EXACT, "joined at batch 0")
    assert owner.stream.counts.restarts == 1


def test_a_restart_says_so() -> None:
    """The reason of the Clear begins with RESTARTED only where another process was proved."""
    owner = exact()
    owner.live(5)
    owner.stream.replay_ended(owner.asks[-1].token, 0.0)
    assert [step.why.startswith(RESTARTED) for step in owner.steps() if isinstance(step, Clear)] == [True]
    owner = exact()
    owner.live(9)
    owner.stream.replayed(owner.asks[-1].token, 8, batch(8), 0.0)
    assert [step.why.startswith(RESTARTED) for step in owner.steps() if isinstance(step, Clear)] == [False]


def test_batches_lost_for_good() -> None:
    """The replay begins after our last batch: nothing before is sure, and the grade says so."""
    owner = exact()
    owner.live(9)
    owner.replay(8, 9)
    assert owner.told == ["suspend", "ask 2", "clear", "suspend", "apply 8", "apply 9", "resume"]
    assert owner.state == (Grade.CATCHING_UP, "batches lost: the replay begins at batch 8, after batch 2")


def test_the_sequence_went_back() -> None:
    """Without a lost connection: a restart if the replay says so, and only an old duplicate if not."""
    owner = exact()
    owner.live(0, process="B")
    assert owner.told == ["suspend", "ask 2"]
    owner.replay(2)  # the same process after all, and what came is not its: to be sure it is asked once more
    assert owner.told[2:] == ["ask 2"]
    owner.replay(2)
    assert owner.told[-1] == "resume"
    assert owner.state == (Grade.EXACT, "joined at batch 0")
    owner.live(1)
    assert owner.stream.counts.duplicates == 1


def test_a_batch_that_no_replay_has() -> None:
    """It came, and the same process says that it does not exist: all is given up but for what follows."""
    owner = exact()
    owner.live(9)
    for _ in range(3):
        assert owner.stream.phase is Phase.ASKING
        owner.replay(2)
    assert owner.state[0] is Grade.CATCHING_UP
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
    owner.stream.connected(0.0)
    owner.steps()
    owner.replay(0)
    assert owner.told == ["suspend", "ask 0", "ask 0", "apply 0", "resume"]


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
    assert owner.state == (Grade.CATCHING_UP, "joined late, at batch 6: replay is not answered")
    assert owner.numbers == [6]
    owner.wait(10.0)
    assert owner.told[-1] == "ask 0"
    assert owner.numbers == [6]  # nothing is forgotten before there is an answer
    owner.replay(*range(6))
    assert owner.told[-1] == "ask 5"  # batch 6 came, so it must be there
    owner.replay(5, 6)
    assert owner.numbers == list(range(7))
    assert owner.state == (Grade.EXACT, "joined at batch 0")


def test_a_hole_in_a_replay() -> None:
    """A ROUTER drops what its queue cannot take: asked for again; the same hole three times is a loss."""
    owner = connected()
    owner.replay(0, 1, 4, end=False)
    assert owner.told[-1] == "ask 1"
    owner.replay(1, 2, 3, 4)
    assert owner.state == (Grade.EXACT, "joined at batch 0")
    owner.live(9)
    for _ in range(3):
        owner.replay(4, 7, end=False)
    owner.replay(8, 9)
    assert owner.state == (Grade.CATCHING_UP, "batches lost: the replay has none between batch 4 and batch 7")
    assert owner.numbers == [7, 8, 9]


def test_the_end_of_a_long_replay_is_asked_for_again() -> None:
    """It may have been dropped just before the end marker."""
    owner = connected()
    owner.replay(*range(CONFIRM_BATCHES))
    assert owner.told[-1] == f"ask {CONFIRM_BATCHES - 1}"
    owner.replay(CONFIRM_BATCHES - 1, CONFIRM_BATCHES)
    assert owner.state == (Grade.EXACT, "joined at batch 0")
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
    assert owner.state == (Grade.EXACT, "joined at batch 0")
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
    assert owner.state == ((Grade.CATCHING_UP, why) if first else (Grade.EXACT, "joined at batch 0"))
    owner.live(first + 3)
    assert owner.told == ["apply " + str(first), "clear", f"apply {first + 3}"]
    assert owner.state[0] is Grade.CATCHING_UP
    owner.stream.disconnected("gone", 0.0)
    owner.stream.connected(0.0)
    owner.live(0, process="B")
    assert owner.state == (Grade.EXACT, "joined at batch 0")
    assert owner.numbers == [0]
    owner.stream.resync("distrusted", 0.0)
    owner.live(0, process="C")  # whether it is the first after all we cannot know
    assert owner.state[0] is Grade.CATCHING_UP


def test_what_is_in_doubt() -> None:
    """A join, also one that we ask for, hides only what is told; whatever may mean another process hides all, and that
    ends when it is settled, not when events are forgotten."""

    def doubts(owner: Owner) -> list[bool]:
        return [step.doubt for step in owner.steps() if isinstance(step, Suspend)]

    owner = Owner(KvStream(True, LIMITS))
    owner.stream.connected(0.0)
    assert doubts(owner) == [False]
    owner.stream.disconnected("gone", 0.0)
    assert doubts(owner) == [True]
    owner.stream.connected(0.0)
    assert doubts(owner) == []
    owner.replay(0, 1)
    assert not owner.stream.suspended
    owner.stream.resync("distrusted", 0.0)
    assert doubts(owner) == [False]
    owner.replay(0, 1)
    for _ in range(2):
        owner.stream.suspect("connection refused", 0.0)
        assert doubts(owner) == [True]
        owner.replay(1)
    owner.stream.disconnected("gone", 0.0)
    owner.stream.connected(0.0)
    assert doubts(owner) == [True]
    owner.asks.append(owner.asks[-1])
    owner.stream.replayed(owner.asks[-1].token, 1, batch(1, "B"), 0.0)
    assert doubts(owner) == [True]  # behind the clear


def test_a_suspension_has_a_limit() -> None:
    """Then everything is forgotten, and the router works by its own estimate until there is a connection."""
    owner = exact()
    owner.stream.disconnected("gone", 0.0)
    owner.wait(19.9)
    assert owner.numbers == [0, 1, 2]
    assert owner.stream.suspended
    owner.wait(0.1)
    assert owner.state == (Grade.ESTIMATED, "event stream lost: gone")
    assert not owner.held
    assert not owner.stream.suspended
    owner.stream.connected(owner.now_s)
    owner.steps()
    for seq in range(30):  # a long replay that comes is not a stream that is lost
        owner.replay(seq, end=False)
        owner.wait(0.9)
    owner.replay(29)
    assert "clear" not in owner.told[-30:]
    assert owner.state == (Grade.EXACT, "joined at batch 0")


def test_a_malformed_batch() -> None:
    """It may have named removals: all is forgotten, the stream goes on, and is exact again after a clear."""
    owner = exact()
    owner.stream.live(3, b"\xc1", 0.0)
    owner.steps()
    assert owner.told == ["clear"]
    assert owner.state[0] is Grade.CATCHING_UP
    owner.live(4)
    assert owner.numbers == [4]
    owner.stream.live(5, batch(5, "A", "AllBlocksCleared"), 0.0)
    owner.steps()
    assert owner.state[0] is Grade.EXACT
    assert owner.stream.counts.malformed == 1


def test_an_unreadable_event_lowers_the_grade_alone() -> None:
    """The rest of its batch counts, and nothing is forgotten."""
    owner = exact()
    owner.stream.live(3, msgspec.msgpack.encode([0.0, [{"type": "BlockStored"}], 0]), 0.0)
    owner.steps()
    assert owner.told == ["apply 3"]
    assert owner.state == (Grade.CATCHING_UP, "events of batch 3 cannot be read")


def test_a_full_queue_loses_nothing() -> None:
    """What it cannot take is asked for again, and the stream is not exact meanwhile."""
    owner = connected(limits=Limits(queue_batches_max=2))
    owner.live(2, 3, 4, 5)
    assert owner.stream.counts.dropped == 2
    owner.replay(0, 1, 2)
    assert owner.stream.phase is Phase.ASKING
    owner.replay(2, 3, 4, 5)
    assert owner.numbers == list(range(6))
    assert owner.state == (Grade.EXACT, "joined at batch 0")


def test_answers_of_an_older_request_are_of_no_interest() -> None:
    """Each request has its token."""
    owner = connected()
    old = owner.asks[-1].token
    owner.wait(1.0)
    owner.stream.replayed(old, 0, batch(0, "B"), 0.0)
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
    assert owner.state == (Grade.EXACT, "joined at batch 0")
