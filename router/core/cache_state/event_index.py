"""Index of the blocks that replicas report as stored, and the confidence grade of each replica's reports.

For each replica with an event stream, EngineBlocks (engine_blocks.py) has the blocks that were reported as stored and
not as removed, and ReplicaEventState (event_state.py) has the results of checks. All replicas share one map of masks,
so one walk over a prompt's token chain finds the longest stored prefix of every replica. tier_index.py adds the blocks
in tiers.

The grade of a replica begins as the stream's own grade (core/kv_events/stream.py: continuous since batch 0 or a clear,
or not). Checks then change it:

    exact         The stream is complete, or its predictions matched the engine's count on 99 % of 200 answers.
    catching-up   The stream is incomplete, or reports more blocks than the limit, or the model has other layers
                  (sliding window, state) with own blocks. Reported blocks and our own estimate are both credited.
    estimated     No stream, or predictions drifted, or no tokenizer for its models, or pages too short, or its events
                  do not distinguish salted prompts from others.

If predictions drift, the grade falls and a clean replay is requested, later each time. While a stream is suspended, no
reported block is credited. If there is evidence of a restart or a connection break, our own estimate is not credited
either.

Blocks of a request that was just placed are being computed, so they count as stored from placement on (`expect`). They
count until events confirm them, or until SETTLE_S after the lease ended, because the event of the last step can arrive
after the answer. If batches carry times, blocks are given up only after a batch that is newer than the lease's end, or
after LATE_S_MAX without one (event_lag.py). While an event is known to be outstanding, a prediction is not called
exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from router.core.cache_state.engine_blocks import EngineBlocks
from router.core.cache_state.event_state import DISTRUST_S_MAX, NO_STREAM, ReplicaEventState, StoredPrefix
from router.core.cache_state.holder_bitmap import SWEEP_KEYS, HolderBitmap
from router.core.cache_state.tier_index import TierIndex
from router.core.kv_events.batch_decoder import Cleared, Event, Removed, Stored
from router.core.kv_events.event_state_codec import EngineShape, Page, UnreadableState
from router.core.kv_events.stream import RESTARTED
from router.core.prompts.block_keys import token_root
from router.core.prompts.token_keys import TokenPrompt
from router.core.types.placements import Confidence
from router.core.types.replicas import Load
from router.core.types.tiers import GPU

SETTLE_S = 0.5  # seconds after a lease's end in which events confirm its blocks
AGAIN_S = 0.01  # shorter SETTLE_S for a repeated answer: its blocks exist, so no event will follow
BYTES_MAX = 1 << 30  # bytes of the blocks of all replicas
SHED_BYTES = 64 << 10  # memory freed at a time by one replica if the total is over budget: 200 blocks, 0.3 ms
STRIDES_MAX = 4_096  # strides of 64 blocks with cached holders: 40 prompts of 100,000 tokens, 30 MB
CATCH_UP_BLOCKS = 2_048  # orphans that get their keys in one call, in about a millisecond


class EventIndex:
    """Sink of all event streams.

    - `graded(replica, grade, why)`: called once for each change of a grade.
    - `resync(replica)`: called to request a clean replay.
    - `restarted(replica)`: called if a replica's cache is empty after a restart.
    - `blocks_max`: maximum number of blocks of one replica, which also sizes its side tables.
    - `bytes_max`: maximum memory of all replicas' blocks. Above it the largest replica gives up blocks, and with them
      its grade.
    - `repeats`: engines can be asked to repeat events (EngineBlocks).
    - `tiers`: without it only blocks on GPUs count.
    """

    def __init__(
        self,
        *,
        blocks_max: int,
        aside_max: int,
        names_max: int,
        graded: Callable[[str, Confidence, str], None],
        resync: Callable[[str], None],
        restarted: Callable[[str], None],
        bytes_max: int = BYTES_MAX,
        repeats: bool = False,
        tiers: bool = True,
    ) -> None:
        self.masks = HolderBitmap(STRIDES_MAX)
        self.tiered = TierIndex(self.masks)
        self._limits = {"blocks_max": blocks_max, "aside_max": aside_max, "names_max": names_max}
        self._bytes_max, self._repeats, self._gpu_only = bytes_max, repeats, not tiers
        self.bytes_used = 0  # upper bound of all replicas' memory; freed memory is noticed with the next store
        self._graded = graded
        self._resync = resync
        self._restarted = restarted
        self._known: dict[str, ReplicaEventState] = {}
        self.follows = False  # True if any replica's events count
        self._settling: deque[tuple[float, str, int, float]] = deque()  # (due, replica, lease, ended)
        # cached results of `empty`, dropped at every change of the replica
        self._empty: dict[str, StoredPrefix | None] = {}
        self._sizes: dict[int, list[ReplicaEventState]] | None = (
            None  # block size -> followed replicas; None: to be rebuilt
        )
        self._late: dict[str, None] = {}  # replicas that may have ended leases with unconfirmed blocks

    # -- interface for the streams (core/kv_events/sink.py) -----------------------------------------------------

    def apply(self, replica: str, event: Event, now_s: float) -> None:
        """Apply one event of one replica's stream."""
        if self._gpu_only and not isinstance(event, Cleared) and event.medium != GPU:
            return
        known = self._get_or_create(replica)
        if isinstance(event, Removed):  # half of all events; they change no grade and no block size
            known.engine.apply(event)
        else:
            self._take_in(known, event)
        if self.masks.pending_sweep:
            self.masks.sweep(SWEEP_KEYS)
        if self.masks.asked:
            self.masks.remember_some()

    def _take_in(self, known: ReplicaEventState, event: Event) -> None:
        engine = known.engine
        complete, size, hybrid = engine.complete, engine.block_tokens, known.hybrid
        if isinstance(event, Stored) and event.medium != GPU:
            self.tiered.register_tier_block(known, event)
        engine.apply(event)
        if isinstance(event, Stored):
            known.hybrid |= not event.prefix
            judge = known.hybrid is not hybrid or engine.block_tokens != size
            if event.salt and not known.names_salts:
                known.names_salts, judge = True, True
                known.salted.clear()
        else:
            known.begin()
            if known.suspended:  # the replica's blocks have a new bit, which the walk would see
                self.masks.suspend_holder(known.name)
            judge = known.hybrid  # for any other replica the stream itself sets the grade exact at once
        if engine.block_tokens != size:
            self._sizes = None
        if judge or engine.complete is not complete:
            self._judge(known.name, known)
        self._weigh(known)
        if self.bytes_used > self._bytes_max:
            self._enforce_budget()

    def clear_blocks(self, replica: str, now_s: float) -> None:
        """Drop all blocks of the replica, on evidence from another source than its stream."""
        if self.engine_blocks(replica) is not None:
            self.apply(replica, Cleared(), now_s)

    def advance_watermark(self, replica: str, until_s: float) -> None:
        """Record that every change on the replica before this time was reported and applied."""
        self._get_or_create(replica).engine.tails.advance_watermark(until_s)

    def clear(self, replica: str, why: str, now_s: float) -> None:
        """Forget all reports of the replica, because none is certain. The stream starts again and is trusted again."""
        known = self._get_or_create(replica)
        self._empty_engine(known)
        known.suspended = known.distrusted = ""
        if known.stream_grade is Confidence.EXACT:
            known.stream_grade, known.stream_why = Confidence.CATCHING_UP, why  # grade until the stream sets its own
        if why.startswith(RESTARTED):
            known.hybrid = known.whole = False  # another model may be served there now
            known.forget_salts()
            self._restarted(replica)
        known.answers.forget()  # the stream may belong to another process with other flags
        known.begin()
        self._judge(replica, known)

    def suspend(self, replica: str, why: str, now_s: float, *, doubt: bool) -> None:
        """Credit no reported block until `clear` or `resume`. With `doubt`, evidence of a restart or a connection
        break, our own estimate is not credited either."""
        known = self._get_or_create(replica)
        known.suspended, known.doubted = why, doubt
        self.masks.suspend_holder(replica)
        self._judge(replica, known)

    def resume(self, replica: str, now_s: float) -> None:
        """Credit reported blocks again: the stream proved to be complete."""
        known = self._get_or_create(replica)
        if known.suspended:
            known.suspended = ""
            self.masks.show(replica)
            self._judge(replica, known)

    def grade(self, replica: str, grade: Confidence, why: str, now_s: float) -> None:
        """Set the stream's own grade."""
        known = self._get_or_create(replica)
        if known.stream_grade is Confidence.EXACT and grade is Confidence.CATCHING_UP and not known.suspended:
            known.begin()  # an event was missed: a grade earned before it is no longer evidence
        known.stream_grade, known.stream_why = grade, why
        if grade is Confidence.ESTIMATED:
            self._empty_engine(known)
            known.suspended = known.distrusted = ""
            known.hybrid = known.whole = False  # another model may publish there next
            known.forget_salts()
            known.answers.forget()
        self._judge(replica, known)

    # -- state for another process -------------------------------------------------------------------------------

    def shape(self, replica: str) -> EngineShape | None:
        """Return the known facts of the replica except its blocks, for a process that takes over. None if its events
        named no block yet, or if they proved wrong."""
        known = self._known.get(replica)
        return known.engine.shape(hybrid=known.hybrid) if known is not None and not known.distrusted else None

    def pages(self, replica: str) -> Iterator[Page]:
        """Return the pages of its blocks (EngineBlocks.pages)."""
        known = self._known.get(replica)
        return known.engine.pages() if known is not None else iter(())

    def reset_to(self, replica: str, shape: EngineShape) -> None:
        """Forget the replica's reports and start from another process's state; `import_page` adds its blocks. No block
        is credited before the stream sets its grade. Raises UnreadableState."""
        if self._gpu_only and any(medium != GPU for medium, _ in shape.places):
            raise UnreadableState(
                "its count includes storage tiers outside the GPU, which are turned off here (tiers.enabled)"
            )
        known = self._get_or_create(replica)
        self._empty_engine(known)
        known.engine.reset_to(shape)
        if known.engine.tiers:
            self.tiered.replicas[replica] = known
        if known.suspended:  # its blocks have a new bit, which the walk would see
            self.masks.suspend_holder(replica)
        known.hybrid = shape.hybrid
        known.begin()
        self._judge(replica, known)

    def import_page(self, replica: str, page: Page) -> None:
        """Add one page of its blocks. Raises UnreadableState."""
        known = self._get_or_create(replica)
        known.engine.import_page(page)
        self._weigh(known)
        if self.bytes_used > self._bytes_max:
            self._enforce_budget()
        if self.masks.pending_sweep:
            self.masks.sweep(SWEEP_KEYS)

    # -- replicas ------------------------------------------------------------------------------------------------

    def forget(self, replica: str) -> None:
        """Remove a replica that left the fleet."""
        self.tiered.forget(replica)
        known = self._known.pop(replica, None)
        if known is not None:
            known.engine.close()
            self.bytes_used -= known.bytes_counted
            self._empty.pop(replica, None)
            self._late.pop(replica, None)
            self._sizes = None
            self._count_followed()

    def set_untokenizable(self, replica: str, why: str) -> None:
        """Set the reason why a replica's prompts cannot be turned into tokens; "" if they can."""
        known = self._get_or_create(replica)
        if known.untokened != why:
            known.untokened = why
            self._judge(replica, known)

    def grade_of(self, replica: str) -> tuple[Confidence, str]:
        """Return the replica's grade, and the reason for it."""
        known = self._known.get(replica)
        return known.shown if known else (Confidence.ESTIMATED, NO_STREAM)

    def is_suspended(self, replica: str) -> bool:
        """True if no block may be credited, not even from our own estimate."""
        known = self._known.get(replica)
        return bool(known and known.suspended and known.doubted)

    def engine_blocks(self, replica: str) -> EngineBlocks | None:
        """Return the blocks reported by the replica's stream; None without a stream."""
        known = self._known.get(replica)
        return known.engine if known and known.stream_grade is not Confidence.ESTIMATED else None

    def event_blocks(self, replica: str) -> tuple[int, int]:
        """Return (tokens of a block, layer groups with blocks) according to the replica's events; 0 while unknown."""
        engine = self.engine_blocks(replica)
        return (engine.block_tokens or 0, engine.groups) if engine is not None else (0, 0)

    def checks(self, replica: str) -> tuple[int, int]:
        """Return (answers predicted to the token, answers compared) of the last 200."""
        known = self._known.get(replica)
        return (known.answers.equal, known.answers.checks) if known else (0, 0)

    @property
    def keys(self) -> int:
        """Number of distinct blocks that all replicas reported as stored."""
        return len(self.masks)

    def block_sizes(self) -> set[int]:
        """Return the block sizes for which a prompt's keys are needed: those of replicas with events that count."""
        return self._group_by_size().keys() - {0}

    # -- prompts -------------------------------------------------------------------------------------------------

    def find_stored(self, prompt: TokenPrompt, now_s: float) -> dict[str, StoredPrefix]:
        """Return the stored part of a prompt on each replica, according to events.

        The result contains replicas that store part of the prompt, and replicas for which that is not known exactly at
        the moment. `empty` covers all others.
        """
        found: dict[str, StoredPrefix] = {}
        for size, keys in prompt.keys.items():
            depths = self.masks.match(keys)
            for name, depth in depths.items():
                none = self.empty(name)
                if none is not None and none.block_tokens == size:
                    found[name] = none.with_depth(depth * size)
            if self.tiered.replicas:
                self.tiered.add(size, keys, depths, found, whole=prompt.tokens == len(keys) * size)
        unsure = self._find_continued(prompt, now_s) if self._late else []
        for size, followed in self._group_by_size().items():
            if size not in prompt.keys:  # the block size was different or unknown when the prompt was hashed
                unsure += [k for k in followed if k.shown[0] is Confidence.EXACT and k.engine.blocks]
        for known in unsure:
            said = found.get(known.name) or known.empty()
            said.behind = True
            found[known.name] = said
        return found

    def empty(self, replica: str) -> StoredPrefix | None:
        """Return the result of `stored` for a replica that it omits; None if no event counts for the replica. The
        object is shared until the replica changes, so the caller must not modify it."""
        if replica in self._empty:
            return self._empty[replica]
        known = self._known.get(replica)
        if known is None:
            return None
        said = None if known.shown[0] is Confidence.ESTIMATED else known.empty()
        self._empty[replica] = said
        return said

    def _find_continued(self, prompt: TokenPrompt, now_s: float) -> list[ReplicaEventState]:
        """Return replicas with an answer that the prompt continues and that has outstanding events."""
        found = []
        for name in list(self._late):
            known = self._known[name]
            tails, size = known.engine.tails, known.block_tokens
            if not tails.waits(now_s):
                del self._late[name]
            elif known.shown[0] is Confidence.EXACT and size in prompt.keys:
                root = token_root(prompt.adapter, prompt.salt, size)
                if tails.is_continuation(prompt.keys[size], root, now_s):
                    found.append(known)
        return found

    def expect_blocks(self, replica: str, lease: int, prompt: TokenPrompt, stored: StoredPrefix) -> None:
        """Expect the prompt's blocks after those on the GPU: they will be computed there, or loaded."""
        known = self._known.get(replica)
        if known is None:
            return
        if prompt.salt and known.expect_salt(lease, prompt.tokens, stored.gpu_tokens):
            self._judge(replica, known)
        if not stored.block_tokens:
            return
        keys, size = prompt.keys.get(stored.block_tokens, []), stored.block_tokens
        first = stored.gpu_tokens // size
        if new := keys[first:]:
            known.engine.expect(lease, new, first)
        last = keys[-1] if keys else token_root(prompt.adapter, prompt.salt, size)
        known.engine.tails.begin(lease, last, len(keys))

    def settle(
        self, replica: str, lease: int, prompt: TokenPrompt, now_s: float, *, computed: bool, grown_blocks: int = 0
    ) -> None:
        """End a lease. Its answer filled `grown_blocks` blocks after the prompt.

        Blocks that events do not confirm soon then count as not stored; at once if the prompt was not computed.
        """
        known = self._known.get(replica)
        if known is None:
            return
        if known.salted and known.settle_salt(lease, computed=computed):
            self._judge(replica, known)
        if computed:
            self.masks.remember(prompt.keys.get(known.block_tokens, ()))
            due_s = now_s + SETTLE_S
            known.engine.tails.end(lease, grown_blocks, due_s, now_s + AGAIN_S)
            if known.engine.tails.waits(now_s):
                self._late[replica] = None
            self._settling.append((due_s, replica, lease, now_s))
        else:
            known.engine.tails.drop(lease)
            known.engine.settle(lease)
        self.tick(now_s)

    def promise(self, replica: str, lease: int, keys: list[int], block_tokens: int, depth: int) -> None:
        """Expect the blocks with these keys for a lease of another router, which has a negative number. `depth` keys of
        the prompt precede them."""
        known = self._known.get(replica)
        if known is not None and known.block_tokens == block_tokens:
            known.engine.expect(lease, keys, depth)

    def protected_blocks(self, replica: str, lease: int, now_s: float, *, computed: bool) -> None:
        """End a lease of another router, as in `settle`."""
        known = self._known.get(replica)
        if known is None:
            return
        if computed:
            self._settling.append((now_s + SETTLE_S, replica, lease, now_s))
        else:
            known.engine.settle(lease)

    def has_pending_events(self, prompt: TokenPrompt, now_s: float) -> bool:
        """True if the prompt continues an answer that arrived before its events. It is then worth a short wait."""
        return bool(self._late and self._find_continued(prompt, now_s))

    def tick(self, now_s: float) -> None:
        """Settle the leases that are due by now."""
        while self._settling and self._settling[0][0] <= now_s:
            _, replica, lease, ended_s = self._settling.popleft()
            known = self._known.get(replica)
            if known is not None and not known.engine.tails.over(ended_s, now_s):
                self._settling.append((now_s + SETTLE_S, replica, lease, ended_s))
            elif known is not None:
                known.engine.settle(lease)

    # -- self-check ----------------------------------------------------------------------------------------------

    def check_prediction(
        self, replica: str, stored: StoredPrefix | None, predicted: int, actual: int | None, prompt_tokens: int
    ) -> None:
        """Compare a prediction with the answer of a completed request.

        - `stored`, `predicted`: the prediction from events alone at placement (capped, without a reduction for dropped
          blocks).
        - `actual`: cached tokens according to the engine, if it reports them.
        """
        known = self._known.get(replica)
        if known is None:
            return
        current = stored is not None and stored.epoch == known.epoch and not stored.suspended
        # Counters of cached tokens omit loaded tokens.
        counts = current and (stored is None or not stored.tiers)
        found = max(0, predicted - stored.dropped) if stored is not None else predicted
        known.counters.note_response(found if counts else None, prompt_tokens, silent=actual is None)
        if stored is None or actual is None or not current or stored.behind:
            return
        if stored.tiers and stored.gpu_tokens <= actual < predicted:
            return  # a tier lost it in the meantime, or was too busy: the stream was not wrong
        dropped = known.answers.dropped_blocks
        known.answers.observe(predicted, actual, stored.block_tokens, drops=not stored.tiers)
        if known.answers.dropped_blocks != dropped:
            self._empty.pop(replica, None)
        known.earned = known.answers.agrees
        if known.earned:
            known.distrusts = 0
        self._judge(replica, known)

    def on_probe(self, replica: str, load: Load, now_s: float) -> None:
        """Process a probe's result: compare counters, act on drift, and request a replay that is due."""
        self.tick(now_s)
        if self.masks.pending_sweep:  # the purge continues here, for a replica without events
            self.masks.sweep(SWEEP_KEYS)
        known = self._known.get(replica)
        if known is None:
            return
        known.engine.attach_orphans(CATCH_UP_BLOCKS)
        self._weigh(known)
        self._empty.pop(replica, None)
        if known.block_hint != load.block_tokens:
            self._sizes = None
        known.block_hint, known.kv_tokens_max = load.block_tokens, load.kv_tokens_max
        if why := known.drift(load):
            known.distrust(why, now_s)
            self._judge(replica, known)
        if known.distrusted and known.stream_grade is not Confidence.ESTIMATED and now_s >= known.retry_at_s:
            known.retry_at_s = now_s + DISTRUST_S_MAX
            self._resync(replica)

    # -- inside --------------------------------------------------------------------------------------------------

    def _get_or_create(self, replica: str) -> ReplicaEventState:
        """Return the replica's entry for a change."""
        known = self._known.get(replica)
        if known is None:
            engine = EngineBlocks(self.masks, replica, **self._limits, repeats=self._repeats)
            known = self._known[replica] = ReplicaEventState(replica, engine)
        self._empty.pop(replica, None)
        return known

    def _group_by_size(self) -> dict[int, list[ReplicaEventState]]:
        if self._sizes is None:
            self._sizes = {}
            for known in self._known.values():
                if known.shown[0] is not Confidence.ESTIMATED:
                    self._sizes.setdefault(known.block_tokens, []).append(known)
        return self._sizes

    def _empty_engine(self, known: ReplicaEventState) -> None:
        known.engine.clear()
        self._sizes = None
        self._weigh(known)

    def _weigh(self, known: ReplicaEventState) -> None:
        bytes_now = known.engine.bytes_used
        self.bytes_used += bytes_now - known.bytes_counted
        known.bytes_counted = bytes_now

    def _enforce_budget(self) -> None:
        """Bring all replicas' blocks under their budget.

        An incomplete replica gives up blocks before a complete one of up to twice its size. Of many replicas of equal
        size, only a few then lose their grade.
        """
        for known in self._known.values():
            self._weigh(known)
        while self.bytes_used > self._bytes_max:
            largest = max(self._known.values(), key=lambda known: known.bytes_counted << (not known.engine.complete))
            if not largest.bytes_counted:
                return
            largest.engine.shed_blocks(max(SHED_BYTES, self.bytes_used - self._bytes_max))
            self._weigh(largest)
            self._empty.pop(largest.name, None)
            self._judge(largest.name, largest)

    def _judge(self, replica: str, known: ReplicaEventState) -> None:
        judged = known.compute_confidence()
        if judged != known.shown:
            news = judged[0] is not known.shown[0]
            known.shown = judged
            self._empty.pop(replica, None)
            if news:
                self._sizes = None
                self._count_followed()
                self._graded(replica, *judged)

    def _count_followed(self) -> None:
        self.follows = any(known.shown[0] is not Confidence.ESTIMATED for known in self._known.values())
