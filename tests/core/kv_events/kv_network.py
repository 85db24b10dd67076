"""A wire between a model engine and the code under test, which loses, repeats, delays and reorders.

`Rig` is the owner of a KvStream as engines/kv_events/subscriber.py is one: it feeds what it hears, takes the steps,
applies batches to an EngineBlocks. A notice of a connection's end or start comes before any batch that is heard after
it, and after a new connection nothing of an older one is fed; replays are a connection of their own each. `Rig.check`
compares the blocks with what the engine held when it said the batch that was applied last.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache

from router.core.cache_state.engine_blocks import EngineBlocks
from router.core.cache_state.holder_bitmap import HolderBitmap
from router.core.kv_events.stream import (
    Apply,
    Clear,
    KvStream,
    Phase,
    RequestReplay,
    Resume,
    SetConfidence,
    StreamLimits,
    Suspend,
)
from router.core.prompts.block_keys import token_chain, token_root
from router.core.types.placements import Confidence
from tests.core.kv_events.kv_data import id_bytes
from tests.core.kv_events.kv_engine import BLOCK_TOKENS, Content, Engine

END = -1
ROUNDS_MAX = 200  # of a quiescence, before it counts as none
WAITS_MAX = 3  # times that a stream which follows is given until it next looks again
Held = frozenset[int]


@lru_cache(maxsize=1 << 16)
def key_of(content: Content) -> int:
    """The index's key for one block."""
    (adapter, salt), ids = content
    root = token_root(adapter, salt.encode(), BLOCK_TOKENS)
    return token_chain(id_bytes(ids), BLOCK_TOKENS, root)[-1]


@dataclass(slots=True)
class Replay:
    """One replay: asked for, then answered, then heard piece by piece."""

    first: int
    token: int
    answer: deque[tuple[int, bytes]] | None = None  # None: not answered yet


@dataclass(slots=True)
class Rig:
    """An engine, a wire, and the router's end of it."""

    engine: Engine
    replays: bool
    limits: StreamLimits
    repeats: bool = False  # whether the engine is known to be asked for reports, which it does not mark
    now_s: float = 1_000.0
    up: bool = False  # whether the engine's socket has a connection
    deaf: int = 0  # batches that the new connection will miss: its subscription is on the way
    connection: int = 0
    live: deque[tuple[int, int, bytes]] = field(default_factory=deque)  # connection, number, payload
    notices: deque[int] = field(default_factory=deque)  # connections that began; 0: the one before ended
    asks: deque[Replay] = field(default_factory=deque)
    states: dict[float, Held] = field(default_factory=dict)  # time of a batch -> what its engine held then
    tainted: bool = False  # an event that could not be read may have been a removal
    times: dict[bytes, float] = field(default_factory=dict)  # payload -> its time
    expected: Held = frozenset()
    applied_at_s: float = 0.0  # time of the last batch applied
    newest_at_s: float = 0.0  # of the youngest that was applied, or heard live over the connection that there is
    unseen: bool = False  # the process is another one, and nothing heard could show it yet
    connected: int = 0  # the connection that the stream knows of
    grades: list[tuple[Confidence, str]] = field(default_factory=list)
    checks_exact: int = 0
    masks: HolderBitmap = field(init=False)
    ledger: EngineBlocks = field(init=False)
    stream: KvStream = field(init=False)
    hidden: bool = False

    def __post_init__(self) -> None:
        self.masks = HolderBitmap()
        sizes = {"blocks_max": 100_000, "aside_max": 1_000, "names_max": 100_000}
        self.ledger = EngineBlocks(self.masks, "r", **sizes, repeats=self.repeats)
        self.stream = KvStream(self.replays, self.limits)

    # What the engine and the wire do

    def said(self) -> None:
        """The engine has ended a step: its batches go on the wire, or are lost where nobody listens."""
        for seq, payload in self.engine.outbox:
            self.states[self.engine.clock_s] = self.truth()
            self.times[payload] = self.engine.clock_s
            if not self.up:
                continue
            if self.deaf:
                self.deaf -= 1
            else:
                self.live.append((self.connection, seq, payload))
        self.engine.outbox.clear()

    def disconnect(self, kept: int) -> None:
        """The connection ends; the first `kept` batches on the way had arrived."""
        if self.up:
            self.up = False
            while len(self.live) > kept:
                self.live.pop()
            self.notices.append(0)

    def connect(self, deaf: int) -> None:
        """A new connection, whose subscription takes effect `deaf` batches later."""
        if not self.up:
            self.connection += 1
            self.up, self.deaf = True, deaf
            self.notices.append(self.connection)

    def restart(self, kept: int, answered: int) -> None:
        """The engine's process is replaced; of answers on the way the first `answered` messages had arrived."""
        self.disconnect(kept)
        for ask in self.asks:
            if ask.answer is not None:
                while len(ask.answer) > answered:
                    ask.answer.pop()
        self.engine.restart()

    def restart_unseen(self, ahead: int) -> None:
        """Another process behind the same connection, as behind a proxy: its numbers and bytes alone can show it. It
        is `ahead` batches from where the old one was, or at its beginning (0: that its first batch heard has the very
        number that comes next would be undetectable)."""
        self.hear_live(len(self.live))
        if not self.up or self.deaf or self.asks or self.stream.phase is not Phase.FOLLOWING:
            return
        self.engine.restart()
        self.unheard(self.stream.last_seq + 1 + ahead if ahead else 0)
        self.unseen = True

    def unheard(self, count: int) -> None:
        """The engine says some batches that nobody listens to."""
        up, self.up = self.up, False
        for _ in range(count):
            self.engine.heartbeat()
            self.said()
        self.up = up

    def truth(self) -> Held:
        """What the engine holds."""
        return frozenset(key_of(content) for content in self.engine.held())

    def serve(self, lost: int, count: int) -> None:
        """The engine answers all replays asked for; of each `count` messages from the one at `lost` on are lost."""
        for ask in self.asks:
            if ask.answer is None:
                answer = [*self.engine.replay(ask.first), (END, b"")]
                ask.answer = deque(answer[:lost] + answer[lost + count :])

    # What the router hears

    def hear_notices(self) -> None:
        """Connections that ended or began."""
        while self.notices:
            connection = self.notices.popleft()
            if connection:
                # What only the old connection said is forgotten with it: the process may be another one.
                self.newest_at_s = min(self.newest_at_s, self.applied_at_s)
                self.connected = connection
                self.stream.on_connected(self.now_s)
            else:
                self.stream.on_disconnected("disconnected", self.now_s)
            self.take_steps()

    def hear_live(self, count: int) -> None:
        """The next batches; notices come first, and nothing of an older connection after a newer one began."""
        self.hear_notices()
        for _ in range(min(count, len(self.live))):
            connection, seq, payload = self.live.popleft()
            if connection == self.connected:
                self.unseen = False
                self.newest_at_s = max(self.newest_at_s, self.times[payload])
                self.stream.live(seq, payload, self.now_s)
                self.take_steps()

    def hear_replay(self, count: int) -> None:
        """The next messages of every answer."""
        for ask in list(self.asks):
            for _ in range(count):
                if not ask.answer:
                    break
                seq, payload = ask.answer.popleft()
                if seq == END:
                    self.stream.replay_ended(ask.token, self.now_s)
                else:
                    self.stream.on_replay_batch(ask.token, seq, payload, self.now_s)
                self.take_steps()
            if ask.answer is not None and not ask.answer and ask in self.asks:
                self.asks.remove(ask)

    def tick(self, elapsed_s: float) -> None:
        """Time passes."""
        self.now_s += elapsed_s
        self.stream.tick(self.now_s)
        self.take_steps()

    def distrust(self, resync: bool) -> None:
        """The stream has to prove itself, or to begin anew."""
        if resync:
            self.stream.resync("distrusted", self.now_s)
        else:
            self.stream.verify("suspected", self.now_s)
        self.take_steps()

    def take_steps(self) -> None:
        """Do what the stream wants until it wants nothing."""
        while (step := self.stream.next(self.now_s)) is not None or self.stream.busy:
            if isinstance(step, Apply):
                assert step.batch.at_s is not None
                self.applied_at_s = step.batch.at_s
                self.expected = self.states[step.batch.at_s]
                self.tainted |= bool(step.batch.skipped)
                for event in step.batch.events:
                    self.ledger.apply(event)
            elif isinstance(step, Clear):
                self.ledger.clear()
                self.expected, self.hidden, self.tainted = frozenset(), False, False
            elif isinstance(step, Suspend):
                self.hidden = True
            elif isinstance(step, Resume):
                self.hidden = False
            elif isinstance(step, SetConfidence):
                assert (step.grade, step.why) not in self.grades[-1:], "said twice"
                self.grades.append((step.grade, step.why))
            elif isinstance(step, RequestReplay):
                self.asks.append(Replay(step.first, step.token))
                if len(self.asks) > 4:
                    self.asks.popleft()
        self.check()

    # What must hold

    @property
    def held(self) -> set[int]:
        """What the index says the replica holds."""
        return {key for key in self.masks.of if self.ledger.holds(key)}

    @property
    def short(self) -> bool:
        """Whether a second copy may have been taken for a repetition: then too little is credited."""
        return self.repeats and self.engine.doubled

    @property
    def answering(self) -> bool:
        """Whether an answer is on the way."""
        return bool(self.asks) and self.asks[-1].answer is not None

    def check(self) -> None:
        """Whatever has happened: what is credited was held when the last applied batch was said; all of it, if the
        grade is exact. (Under a lower grade, events that cannot be read may leave blocks that are gone.)"""
        assert self.hidden == self.stream.suspended
        if self.hidden:
            return
        held = self.held
        assert held <= self.expected or self.tainted, f"false credit under {self.stream.grade}: {self.stream.why}"
        if self.stream.grade is Confidence.EXACT:
            self.checks_exact += 1
            # Without a replay, a batch that was overtaken cannot be told from that of a restarted engine.
            behind = self.replays and not self.answering and self.applied_at_s < self.newest_at_s
            assert not behind, f"exact, and behind what was heard: {self.stream.why}"
            assert held == self.expected or self.short, f"exact, and blocks are missing: {self.stream.why}"
            late = Confidence.CATCHING_UP in {grade for grade, _ in self.grades}
            assert self.ledger.unknown_removals == 0 or self.short or late

    def settle(self) -> None:
        """Everything is delivered and answered, time passes until all is quiet. Without a replay the engine has to
        say one more thing: what was lost behind the last batch heard is found out by asking, or by the next batch."""
        quiet = waited = self.deaf = 0
        for _ in range(ROUNDS_MAX):
            self.connect(0)
            self.hear_live(len(self.live))
            self.serve(1 << 30, 0)
            self.hear_replay(1 << 30)
            if self.live or self.notices or self.asks:
                quiet = 0
            elif self.stream.phase is not Phase.FOLLOWING or (self.stream.wake_s < math.inf and waited < WAITS_MAX):
                quiet, waited = 0, waited + 1
                self.tick(max(min(self.stream.wake_s - self.now_s, 60.0), 0.1))
            elif quiet == 2:
                return
            else:
                quiet += 1
                if not self.replays:
                    self.engine.heartbeat()
                    self.said()
        raise AssertionError(f"not settled: {self.stream.phase}, {self.stream.why}")
