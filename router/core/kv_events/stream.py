"""Continuity of one publisher's batches of KV events: their order of application, and the grade that follows from it.

Theory. Batches are numbered from 0 by the engine's process. A restarted process begins at 0 again with an empty cache
and does not report the restart. It may also have passed our last number before we receive a batch of it. Numbers
therefore prove no continuity; only bytes do. If a replay starts with the last applied batch, byte for byte (each batch
carries its time), it comes from the same process.

    DOWN -- connected --> ASKING -- the replay ends --> FOLLOWING -- gap, regress, reconnect --> ASKING (suspended)
     ^                      |  no answer in time: continue without    |
     +---- disconnected ----+-----------------------------------------+     suspended for too long: all is forgotten

A replay from 0 joins the stream; a replay from the last applied batch proves continuity. Live batches wait in a bounded
queue in the meantime. Those that arrived before the replay request must be in the replay, because vLLM and SGLang
publish and replay in one thread. A batch that is missing there contradicts the replay, and another one is requested.

No block is credited (Suspend) from the first evidence of a break until it is resolved. The same applies during the
replay of a history, because its older batches can name blocks that younger ones remove. A join alone, with a long
replay of a history, does not put the cache in doubt: our own estimate continues to count.

An unreadable batch may have named removals. All blocks are then forgotten, and the grade is CATCHING_UP until a clear
or a join from 0. An unreadable event in a readable batch only lowers the grade. Otherwise an engine with one more kind
of event than we know would leave the index empty.

The owner passes its input to the stream by the methods from `connected` to `tick`. It then takes steps with `next`
until `next` returns None. After `connected`, the owner must not pass input of an older connection. Answers carry the
token of the RequestReplay that they answer.
"""

from __future__ import annotations

from collections.abc import Callable

from router.core.kv_events.batch_decoder import Cleared, EventBatch, MalformedBatch, decode
from router.core.kv_events.reorder_buffer import AppliedBatches, BufferedBatch, ReorderBuffer, digest_of
from router.core.kv_events.replay_timer import STUCK_MAX, ReplayTimer
from router.core.kv_events.stream_steps import (
    Apply,
    Clear,
    Phase,
    RequestReplay,
    Resume,
    SetConfidence,
    Step,
    Steps,
    StreamCounts,
    StreamLimits,
    Suspend,
)
from router.core.types.placements import Confidence

__all__ = [
    "RESTARTED",
    "Apply",
    "Clear",
    "KvStream",
    "Phase",
    "RequestReplay",
    "Resume",
    "SetConfidence",
    "Step",
    "StreamCounts",
    "StreamLimits",
    "Suspend",
]

RESTARTED = "restarted"  # beginning of the reason of a Clear after proof of another process
# A ROUTER socket drops messages above its queue (1,000 by default). The end of a longer replay is therefore requested
# again, unless a live batch proves it.
CONFIRM_BATCHES = 500
CHECKED_BATCHES = 128  # waiting batches checked against the replay in one call of `next`: about 0.1 ms
_JOINED = (Confidence.EXACT, "joined at batch 0")


class KvStream:
    """Ordering and proof for one stream of batches. It starts DOWN and ESTIMATED.

    - `replays`: True if there is a replay endpoint.
    - `read`: decodes a payload to a batch.
    """

    def __init__(
        self, replays: bool, limits: StreamLimits | None = None, *, read: Callable[[bytes], EventBatch] = decode
    ) -> None:
        self.replays = replays
        self._read = read
        self.limits = limits = limits or StreamLimits()
        self.phase = Phase.DOWN
        self.counts = StreamCounts()
        self._last = AppliedBatches(limits.window_batches)
        self._waiting = ReorderBuffer(limits.queue_batches_max, limits.queue_bytes_max)
        self._basis = (Confidence.CATCHING_UP, "no batch received yet")  # the grade while the stream is not in doubt
        self._fresh = False  # batch 0, if it is next, is the first of a process
        self._empty = False  # a replay ended without any batch: the process has published none yet
        self._settled = False  # all received batches are applied
        self._misses = 0  # consecutive replays without a batch that arrived live
        self._asking = ReplayTimer(limits)
        self._gave_up = False  # a replay from batch 0 was given up, and is requested again later
        self._rejoins = False  # the replay requested while following is that later one
        self._unreadable = ""  # reason why all messages of this connection so far are unreadable
        self._readable = False  # a live batch was received over this connection
        self._look_for = -1  # number of the batch with which a check's replay must begin; -1: no check
        self._steps = Steps()
        self.busy = False  # `next` has checked the maximum number of waiting batches for one call

    @property
    def grade(self) -> Confidence:
        """Grade of the last SetConfidence."""
        return self._steps.grade

    @property
    def why(self) -> str:
        """Reason of the last SetConfidence."""
        return self._steps.why

    @property
    def suspended(self) -> bool:
        """True if no block is credited."""
        return self._steps.suspended

    @property
    def last_seq(self) -> int:
        """Number of the last applied batch; -1 if no batch was applied since the last join."""
        return self._last.seq

    @property
    def handed_out_seq(self) -> int:
        """Number of the last batch that `next` has returned; -1 if it has returned none since the last join."""
        due = (step.seq for step in self._steps.due if isinstance(step, Apply))
        return next(due, self.last_seq + 1) - 1

    @property
    def position(self) -> tuple[int, int] | None:
        """(number, digest) of the last batch; None unless all received batches are applied and the stream is not in
        doubt."""
        if self.phase is not Phase.FOLLOWING or self.suspended or not self._settled or self._steps.due:
            return None
        return (self._last.seq, self._last.digest) if self.last_seq >= 0 else None

    def is_applied(self, seq: int, digest: int) -> bool | None:
        """Return True if the batch with this number had this digest; None if it was not applied here, or too long
        ago."""
        return self._last.same(seq, digest)

    # --- input from the owner ---

    def rewind(self, why: str, now_s: float) -> None:
        """Credit no reported block until `restored`."""
        if self.phase is not Phase.DOWN:
            self._steps.suspend(why, now_s, doubt=False)

    def adopt_state(self, seq: int, digest: int, grade: Confidence, why: str, now_s: float) -> None:
        """Adopt the state that another process had after this batch, with its grade. Requires a replay endpoint.

        A replay from that batch must prove that the publisher is still the same, and returns the batches since then.
        """
        self._last.forget()
        self._last.add(seq, digest)
        self._basis, self._gave_up = (grade, why), False
        if self.phase is not Phase.DOWN:
            self._waiting.clear()  # the replay contains them
            self._prove(why, now_s, doubt=False)

    def on_connected(self, now_s: float) -> None:
        """Start over on a new connection, possibly to a new process. Batches from the old connection are dropped."""
        self._waiting.clear()
        self._unreadable, self._readable = "", False
        self._fresh = True
        if self.replays:
            known = self.last_seq >= 0
            self._prove("connected: proving continuity" if known else "replay from batch 0", now_s, doubt=known)
            return
        if self.last_seq >= 0:
            self._forget("reconnected, without a replay endpoint to prove continuity")
        self._go_on("no replay endpoint")

    def on_disconnected(self, why: str, now_s: float) -> None:
        """Suspend the stream after its connection closed."""
        if self.phase is Phase.DOWN:
            return
        self._asking.reset()
        self.phase = Phase.DOWN
        self._steps.suspend(why, now_s, doubt=True)

    def verify(self, why: str, now_s: float) -> None:
        """Require new proof: the process may be another one, although no closed connection shows it."""
        if self.phase is Phase.DOWN:
            return
        self._unreadable, self._readable = "", False
        self._fresh = True
        if self.replays:
            self._prove(why, now_s)
        else:
            self._forget(why)
            self._go_on(why)

    def resync(self, why: str, now_s: float) -> None:
        """Forget all blocks and join again."""
        seq, digest = self._last.seq, self._last.digest
        self._forget(why)
        if self.phase is Phase.DOWN:
            self._steps.regrade(Confidence.ESTIMATED, why)
        elif self.replays:
            self._waiting.expect(seq, digest)
            self._prove(why, now_s, doubt=False)
        else:
            self._go_on(why)

    def live(self, seq: int, payload: bytes, now_s: float) -> None:
        """Receive a batch from the SUB socket."""
        if not self._readable and self.phase is not Phase.DOWN:
            self._readable = True
            if self._unreadable:
                self._unreadable = ""
                self._regrade()
        self._await_turn(seq, payload)

    def unreadable(self, why: str) -> None:
        """Record a message from the SUB socket that is not a batch.

        If batches arrive too, it has no effect, because their numbers would show a gap. If no batch arrives, `why`
        becomes the reason of the grade.
        """
        self.counts.malformed += 1
        if not self._readable and self.phase is not Phase.DOWN and why != self._unreadable:
            self._unreadable = why
            self._regrade()

    def _regrade(self) -> None:
        """Set the grade, if the stream is not in doubt."""
        if self._settled and self.phase is Phase.FOLLOWING:
            self._steps.regrade(*self._compute_confidence())

    def _compute_confidence(self) -> tuple[Confidence, str]:
        return (Confidence.CATCHING_UP, self._unreadable) if self._unreadable else self._basis

    def _await_turn(self, seq: int, payload: bytes) -> None:
        if self.phase is not Phase.DOWN and not self._waiting.add(seq, payload):
            self.counts.dropped += 1

    def on_replay_batch(self, token: int, seq: int, payload: bytes, now_s: float) -> None:
        """Receive a batch of the replay with this token."""
        if token != self._asking.token:
            return
        if self.phase is Phase.FOLLOWING and not self._rejoins:
            self._on_check_batch(seq, payload, now_s)
            return
        if self.phase is Phase.FOLLOWING and not self._rejoin(seq, now_s):
            return
        self._asking.postpone_retry(now_s)
        self._steps.since_s = now_s  # a long replay in progress is not a lost stream
        digest = digest_of(payload)
        if not self._asking.proved:
            self._first_replayed(seq, payload, digest, now_s)
        elif seq == self.last_seq + 1:
            self._take(seq, payload, digest, now_s)
        elif seq > self.last_seq:
            self._hole(seq, payload, digest, now_s)
        elif not self._last.same(seq, digest):
            self._ask(now_s)

    def replay_ended(self, token: int, now_s: float) -> None:
        """Receive the end marker of the replay with this token."""
        if token != self._asking.token:
            return
        asking = self._asking
        if self.phase is Phase.FOLLOWING:
            if self._look_for >= 0 and not self._rejoins:
                self._prove(f"the replay ends before batch {self._look_for}", now_s)
        elif asking.proved and asking.batches >= CONFIRM_BATCHES and not self._waiting.meets(self.last_seq):
            asking.asks = 0
            self._ask(now_s)
        elif asking.proved:
            self._follow()
        elif self.last_seq >= 0:
            self._on_engine_restarted(f"{RESTARTED}: its replay ends before batch {self.last_seq}", now_s)
        elif self._waiting.older:
            self._go_on("the replay is empty although batches arrived")
            self._gave_up = True
        else:
            self._fresh, self._empty, self._gave_up = True, True, False
            self._basis = (Confidence.CATCHING_UP, "no batch published yet")
            self._follow()

    def tick(self, now_s: float) -> None:
        """Run the work that is due by now; see `wake_s`."""
        asking = self._asking
        if self.phase is Phase.ASKING and now_s >= asking.again_at_s:
            if asking.asks >= self.limits.asks_max:
                self._go_on("no answer to the replay request", lost=True)
                self._gave_up = True
            else:
                self._ask(now_s)
        if self.suspended and now_s >= self._steps.since_s + self.limits.suspended_max_s:
            self._lose(now_s)
        if now_s >= asking.look_at_s:
            asking.look_at_s = now_s + self.limits.look_s
            if self.phase is Phase.FOLLOWING:  # keep all blocks until there is an answer
                self._look_for = self.last_seq
                self._rejoins = self._gave_up and self._basis[0] is not Confidence.EXACT
                self._say(asking.request(0 if self._rejoins else max(0, self._look_for)))

    @property
    def wake_s(self) -> float:
        """Time at which `tick` has work; infinite if it has none."""
        at_s = self._asking.look_at_s
        if self.phase is Phase.ASKING:
            at_s = min(at_s, self._asking.again_at_s)
        if self.suspended:
            at_s = min(at_s, self._steps.since_s + self.limits.suspended_max_s)
        return at_s

    # --- output to the owner ---

    def next(self, now_s: float) -> Step | None:
        """Return the next step, in order; None if there is no step before the next input, or if `busy`. At most one
        batch is decoded in a call."""
        room = CHECKED_BATCHES
        while not self._steps.due:
            room -= 1
            if self.phase is Phase.FOLLOWING and room < 0:
                self.busy = True
                return None
            self.busy = False
            if self.phase is not Phase.FOLLOWING:
                return None
            waiting = self._waiting
            if waiting.older:
                self._check_contained(waiting.pop())
            elif waiting and not (waiting.contradicted and self.replays):
                self._on_live_batch(waiting.pop(), now_s)
            elif waiting.contradicted:
                self._reconcile(now_s)
            elif not self._settled:
                self._settle(now_s)
            else:
                return None
        return self._steps.due.popleft()

    def _on_check_batch(self, seq: int, payload: bytes, now_s: float) -> None:
        """Process a batch of a check, which is a replay requested while following.

        It shows if the process is still the same, and if the last batch was lost. A subscription takes effect a moment
        after the connection, and a PUB socket with a full queue drops messages silently.
        """
        same = self._last.same(seq, digest_of(payload))
        if same:
            self._look_for = -1
        elif same is False:
            self._prove(f"batch {seq} has different bytes in the replay", now_s)
        elif self._look_for >= 0:
            self._prove(f"the replay begins at batch {seq}, after batch {self._look_for}", now_s)
        else:
            self._await_turn(seq, payload)

    # --- live batches ---

    def _check_contained(self, arrival: BufferedBatch) -> None:
        """Check that the replay contains a batch that arrived before the request."""
        if self._last.same(arrival.seq, arrival.digest):
            return
        self._waiting.contradicted = True
        if arrival.seq > self.last_seq:
            self._waiting.miss(arrival)

    def _on_live_batch(self, arrival: BufferedBatch, now_s: float) -> None:
        """Apply a live batch, or handle its deviation from the expected one."""
        if self.last_seq < 0:
            self._first_arrived(arrival, now_s)
        elif arrival.seq == self.last_seq + 1:
            self._take(arrival.seq, arrival.payload, arrival.digest, now_s)
        elif self._last.same(arrival.seq, arrival.digest):
            self.counts.duplicates += 1
        else:
            self._on_discontinuity(arrival, now_s)

    def _first_arrived(self, arrival: BufferedBatch, now_s: float) -> None:
        seq = arrival.seq
        if self._empty and seq:
            self._waiting.put_back(arrival)
            self._prove(f"batch {seq} arrived, but no batch before it was replayed", now_s)
            return
        exact = not seq and self._fresh
        self._basis = _JOINED if exact else (Confidence.CATCHING_UP, f"joined late, at batch {seq}: {self._basis[1]}")
        self._take(seq, arrival.payload, arrival.digest, now_s)

    def _on_discontinuity(self, arrival: BufferedBatch, now_s: float) -> None:
        """Handle a gap, or a number that went back."""
        seq, last = arrival.seq, self.last_seq
        if seq > last:
            self.counts.gaps += 1
            why = f"gap: {seq - last - 1} batches before batch {seq} are missing"
        else:
            why = f"batch number decreased from {last} to {seq}"
        if self.replays:
            self._waiting.put_back(arrival)
            self._prove(why, now_s)
            return
        if seq <= last:
            self.counts.restarts += 1
        # Batch 0 is then either a restart without a new connection, or a batch that overtook others. It may not be
        # complete.
        self._forget(why)
        self._basis = (Confidence.CATCHING_UP, why)
        self._take(seq, arrival.payload, arrival.digest, now_s)

    def _reconcile(self, now_s: float) -> None:
        """Handle batches that arrived, or were dropped, and that the replay did not contain."""
        missing, self._waiting.missing = self._waiting.missing, None
        self._misses += missing is not None
        if not self.replays or self._misses > STUCK_MAX:
            self._waiting.contradicted, self._misses = False, 0
            self._go_on(
                "batches arrived that no replay contains" if missing else "more batches arrived than the queue can hold"
            )
            self._gave_up = True
            return
        if missing is not None:
            self._waiting.put_back(missing)
        self._prove("batches arrived that the replay does not contain", now_s)

    # --- replays ---

    def _prove(self, why: str, now_s: float, *, doubt: bool = True) -> None:
        """Suspend, and request a replay from the last applied batch, or from 0."""
        self._steps.suspend(why, now_s, doubt=doubt)
        self._asking.reset()
        if self._asking.acquire_proof(now_s):
            self._ask(now_s)
        else:
            self.phase, self._settled = Phase.ASKING, False

    def _ask(self, now_s: float) -> None:
        self.phase, self._settled = Phase.ASKING, False
        self._waiting.mark()
        self._say(self._asking.ask(max(0, self.last_seq), now_s))

    def _say(self, ask: RequestReplay) -> None:
        self.counts.replays += 1
        self._steps.due.append(ask)

    def _first_replayed(self, seq: int, payload: bytes, digest: int, now_s: float) -> None:
        last = self.last_seq
        if seq < last:
            return  # not requested
        if seq == last and digest != self._last.digest:
            self._on_engine_restarted(f"{RESTARTED}: batch {last} has different bytes", now_s)
            return
        self._asking.proved = True
        if seq == last:
            return
        if last < 0:
            self._gave_up = False
            late = (Confidence.CATCHING_UP, f"joined late: the replay begins at batch {seq}")
            self._basis = late if seq else _JOINED
        else:
            self._on_batches_lost(f"batches lost: the replay begins at batch {seq}, after batch {last}")
        self._take(seq, payload, digest, now_s)

    def _hole(self, seq: int, payload: bytes, digest: int, now_s: float) -> None:
        """Handle a gap in a replay: a ROUTER socket with a full queue drops messages silently. Request it again from
        the gap."""
        if self._asking.on_gap():
            self._ask(now_s)
            return
        self._on_batches_lost(f"batches lost: the replay has no batch between batch {self.last_seq} and batch {seq}")
        self._gave_up = True
        self._take(seq, payload, digest, now_s)

    def _on_engine_restarted(self, why: str, now_s: float) -> None:
        """Join the other process that answered."""
        self.counts.restarts += 1
        self._steps.since_s = now_s
        self._forget(why)
        self._asking.reset()
        self._ask(now_s)

    def _on_batches_lost(self, why: str) -> None:
        """Forget all blocks, because applied batches are no longer certain. Later batches are."""
        self.counts.lost += 1
        self._forget(why)
        self._basis = (Confidence.CATCHING_UP, why)

    def _rejoin(self, seq: int, now_s: float) -> bool:
        """Join again if a replay that was given up is answered while following and begins at 0."""
        if seq:
            self._gave_up = False
            self._asking.reset()
            return False
        last_seq, digest = self._last.seq, self._last.digest
        why = "replay requests are answered again, from batch 0"
        self._forget(why)
        self._steps.suspend(why, now_s, doubt=False)
        self._asking.batches, self._asking.proved = 0, False
        self.phase, self._settled = Phase.ASKING, False
        self._waiting.mark()
        self._waiting.expect(last_seq, digest)
        return True

    # --- consequences ---

    def _take(self, seq: int, payload: bytes, digest: int, now_s: float) -> None:
        """Apply the next batch."""
        if self.phase is Phase.ASKING:
            self._steps.suspend("a replay is in progress", now_s, doubt=False)
        self._last.add(seq, digest)
        self._fresh = self._empty = False
        self._asking.batches += 1
        try:
            batch = self._read(payload)
        except MalformedBatch as error:
            self.counts.malformed += 1
            self._basis = (Confidence.CATCHING_UP, f"batch {seq} cannot be decoded: {error}")
            self._steps.clear(self._basis[1])
        else:
            self.counts.batches += 1
            self.counts.skipped += batch.skipped
            self._steps.due.append(Apply(seq, batch))
            if batch.skipped:
                self._basis = (Confidence.CATCHING_UP, f"events of batch {seq} cannot be decoded")
            elif self._basis[0] is not Confidence.EXACT and any(isinstance(event, Cleared) for event in batch.events):
                self._basis = (Confidence.EXACT, f"joined at a clear event, in batch {seq}")
        if self._settled:
            self._steps.regrade(*self._compute_confidence())

    def _follow(self) -> None:
        self._asking.reset()
        self.phase = Phase.FOLLOWING

    def _go_on(self, why: str, *, lost: bool = False) -> None:
        """Follow without a replay, from the next batch on."""
        if self.last_seq >= 0:
            self.counts.lost += lost
            self._forget(why)
        if self._waiting.overflowed:  # the queue ends before the batches that were dropped
            self._waiting.clear()
        self._follow()
        self._waiting.unmark()
        self._settled = self._empty = False
        self._basis = (Confidence.CATCHING_UP, why)

    def _settle(self, now_s: float) -> None:
        """End the suspension: all received batches are applied."""
        self._settled, self._misses = True, 0
        if self.replays:
            self._asking.on_contiguous(now_s)
        self._steps.resume()
        self._steps.regrade(*self._compute_confidence())

    def _lose(self, now_s: float) -> None:
        """Give up after a suspension that lasted too long."""
        self._steps.suspended = False
        why = f"event stream lost: {self.why}"
        self._forget(why)
        self._steps.regrade(Confidence.ESTIMATED, why)
        if self.phase is Phase.ASKING:
            self._ask(now_s)

    def _forget(self, why: str) -> None:
        """Forget all blocks, and the position in the stream."""
        self._last.forget()
        self._steps.clear(why)
