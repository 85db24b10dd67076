"""Events since the last message: placements with their keys, first tokens, ends of leases. The queue is bounded; events
beyond the bound are omitted and counted.

Unlike sums, events are sent once, in a channel that keeps their order. A router that missed some, because they are no
longer in the channel, does not know these prompts until the next turn of their conversations. A missed end is corrected
by the number of the oldest open lease, which each message contains.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from router.core.fleet.lease import Lease
from router.core.peer_sync.cache_epochs import number_of
from router.core.peer_sync.limits import SharingLimits
from router.core.peer_sync.messages import (
    KEY_BYTES,
    AnswerRef,
    ConversationMark,
    ExpectedBlocks,
    SharedEnd,
    SharedFirstToken,
    SharedPlacement,
    pack_keys,
)
from router.core.placement.answer_reuse import AnswerCredit
from router.core.types.placements import EndReason, Outcome

CLAIM_TOKENS_MIN = 1_000  # price differences below the prefill of this number of tokens count as ties


class EventLog:
    """Placements and ends that wait for messages."""

    def __init__(self, limits: SharingLimits) -> None:
        self._limits = limits
        self._placements: deque[SharedPlacement] = deque()
        self._first_tokens: deque[SharedFirstToken] = deque()
        self._ends: deque[SharedEnd] = deque()
        self._keys = 0  # keys of blocks in `_placements`
        # Open leases that were sent, oldest first. Not a dict: after a dict has lost its first entries, the search for
        # its first remaining entry begins at its first slot.
        self._open: OrderedDict[int, None] = OrderedDict()
        self._next_lease = 0
        self.left_out = dict.fromkeys(("placements", "first_tokens", "ends"), 0)

    def __bool__(self) -> bool:
        return bool(self._placements or self._first_tokens or self._ends)

    def add_placement(self, lease: Lease, left_ms: float, credit: AnswerCredit | None) -> None:
        """Add a placed lease. Its prefill is complete in `left_ms` by its model."""
        self._next_lease = lease.id + 1
        prompt = lease.prompt
        if not prompt.keys and lease.conversation is None:
            return
        number = number_of(lease.replica)
        claim = _claim(lease)
        shared = SharedPlacement(lease.id, number, prompt.unshared_tokens, int(left_ms), pack_keys(prompt.keys), claim)
        shared.cached_tokens = max(0, lease.cached_tokens)
        if credit is not None:
            home = number if credit.replica == lease.replica else number_of(credit.replica)
            shared.credit = AnswerRef(home, len(credit.prefix), pack_keys(credit.answer_keys))
        if (kin := lease.conversation) is not None:
            shared.kin = ConversationMark(kin.name, kin.shared_prefix_blocks, kin.final)
        keys = _keys_of(shared)
        if len(self._placements) >= self._limits.queue_news_max or self._keys + keys > self._limits.queue_keys_max:
            self.left_out["placements"] += 1
            return
        self._placements.append(shared)
        self._keys += keys
        self._open[lease.id] = None

    def first_token(self, lease: Lease, at_s: float) -> None:
        """Add the first token of a lease, which ends its prefill."""
        if len(self._first_tokens) >= self._limits.queue_news_max:
            self.left_out["first_tokens"] += 1
            return
        tokens = max(0, lease.uncached_tokens)
        self._first_tokens.append(SharedFirstToken(number_of(lease.replica), int(at_s * 1e3), tokens))

    def add_end(self, lease: Lease, outcome: Outcome, answer_blocks: int, *, computed: bool) -> None:
        """Add the end of a lease."""
        told = self._open.pop(lease.id, 0) is None
        end_key = lease.prompt.end_key
        well = outcome.ending is EndReason.OK and end_key is not None
        if not told and not well:
            return
        if len(self._ends) >= self._limits.queue_news_max:
            self.left_out["ends"] += 1
            return
        end = SharedEnd(lease.id, number_of(lease.replica), computed)
        if well and end_key is not None:
            usage = outcome.usage
            end.end_key, end.answer_blocks = end_key, answer_blocks
            end.prompt_tokens = usage.prompt_tokens if usage is not None else 0
            end.completion_tokens = usage.completion_tokens if usage is not None else outcome.events
        self._ends.append(end)

    def drop_lease(self, lease: Lease) -> None:
        """Drop a lease of a replica that has left."""
        self._open.pop(lease.id, None)

    @property
    def placements(self) -> int:
        """Number of placements that wait for a message."""
        return len(self._placements)

    @property
    def first(self) -> int:
        """Number below which all leases have ended, with all their events sent."""
        waiting = [shared.lease for shared in self._placements] + [end.lease for end in self._ends]
        return min([next(iter(self._open), self._next_lease), *waiting])

    def next_few(self, keys_max: int) -> tuple[list[SharedPlacement], list[SharedFirstToken], list[SharedEnd]]:
        """Return the events for the next message, the oldest first. Their cost is at most `keys_max` keys, but at least
        one of each type is included. An end is never sent before its placement."""
        limits, left = self._limits, keys_max
        count = min(len(self._first_tokens), max(1, left // limits.first_token_keys))
        first_tokens = [self._first_tokens.popleft() for _ in range(count)]
        left -= count * limits.first_token_keys
        placements, least = list[SharedPlacement](), left // 4 if self._ends else 0
        while self._placements:
            keys = _keys_of(self._placements[0])
            if placements and left - limits.placement_keys - keys < least:
                break
            left -= limits.placement_keys + keys
            self._keys -= keys
            placements.append(self._placements.popleft())
        ends, upto = list[SharedEnd](), self._placements[0].lease if self._placements else self._next_lease
        for _ in range(min(len(self._ends), max(1, left // limits.end_keys))):
            end = self._ends.popleft()
            if end.lease < upto:
                ends.append(end)
            else:
                self._ends.append(end)
        return placements, first_tokens, ends


def _claim(lease: Lease) -> ExpectedBlocks | None:
    """Return the blocks that the replica's events will report, if the prefill until then is long enough."""
    stored, token_ids = lease.prompt.stored, lease.prompt.token_ids
    if stored is None or token_ids is None or not stored.block_tokens:
        return None
    if lease.prompt_tokens - stored.gpu_tokens < CLAIM_TOKENS_MIN:
        return None
    depth = stored.gpu_tokens // stored.block_tokens
    keys = token_ids.keys.get(stored.block_tokens, [])[depth:]
    return ExpectedBlocks(stored.block_tokens, depth, pack_keys(keys)) if keys else None


def _keys_of(shared: SharedPlacement) -> int:
    size = len(shared.keys)
    if shared.claim is not None:
        size += len(shared.claim.keys)
    if shared.credit is not None:
        size += len(shared.credit.answer_keys)
    return size // KEY_BYTES
