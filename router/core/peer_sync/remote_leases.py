"""Leases of other routers, applied to caches and KV pools: their blocks, the protection from eviction, their prefill.

A prompt that another router placed counts as cached there like one of ours: unproven until it is computed, and gone if
it is not. So requests with one cold prefix that arrive together through several routers are placed together.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

from msgspec import Struct

from router.core.cache_state.holder_bitmap import common
from router.core.estimators.response_memory import PastAnswer
from router.core.fleet.member import ReplicaState
from router.core.peer_sync.limits import SharingLimits
from router.core.peer_sync.messages import ConversationMark, SharedEnd, SharedPlacement, unpack_keys
from router.core.placement.router import Router
from router.core.prompts.block_keys import BLOCK_BYTES, answer_keys

ANSWER_BLOCKS_MAX = 1 << 12  # limit on the blocks of one answer that another router reports
# leases of ours that wait at a replica and are checked for a prompt that another router placed too
LEASES_LOOKED_AT = 16
SLACK_TOKENS = 512  # tolerance between the estimates of cached tokens of two routers that refer to the same prefix


class _Mirrored(Struct, gc=False):
    """An open lease of another router."""

    number: int  # negative, unlike the numbers of our own leases
    member: ReplicaState
    keys: list[int]
    own_tokens: int
    due_s: float  # time at which its prefill is complete, by its model
    claimed: bool  # blocks of the engine's own size were promised
    kin: ConversationMark | None
    over: bool = False
    partly: bool = False  # only the beginning of its keys is pinned yet


class Leases:
    """Open leases of one router by its numbers, the oldest first."""

    def __init__(self) -> None:
        self._open: OrderedDict[int, _Mirrored] = OrderedDict()
        self.keys = 0  # number of keys of all their prompts

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, lease: int) -> bool:
        return lease in self._open

    @property
    def first(self) -> int:
        """Number of the oldest lease; there must be one."""
        return next(iter(self._open))

    def add(self, lease: int, mirrored: _Mirrored) -> None:
        """Add an open lease."""
        self._open[lease] = mirrored
        self.keys += len(mirrored.keys)

    def take(self, lease: int) -> _Mirrored | None:
        """Remove and return a lease; None if it is unknown."""
        mirrored = self._open.pop(lease, None)
        if mirrored is not None:
            self.keys -= len(mirrored.keys)
        return mirrored

    def oldest(self) -> _Mirrored:
        """Remove and return the oldest lease; there must be one."""
        mirrored = self._open.popitem(last=False)[1]
        self.keys -= len(mirrored.keys)
        return mirrored


class RemoteLeases:
    """Applies other routers' placements to the state of our own placements."""

    def __init__(self, router: Router, limits: SharingLimits, recounted: Callable[[str], None]) -> None:
        """`recounted(replica)` is called if less of our prefill waits there than was reported."""
        self._router, self._limits, self._recounted = router, limits, recounted
        self._last = 0
        self._growing: deque[tuple[_Mirrored, int, int]] = deque()  # long prompts: (lease, keys done, keys in total)
        # True if the sending router comes before this one. Of two routers that placed one prompt at the same moment,
        # the first counts the work. Set before `place`.
        self.behind = False

    def place(
        self, leases: Leases, shared: SharedPlacement, member: ReplicaState, home: ReplicaState | None, now_s: float
    ) -> None:
        """Apply another router's placement on a replica; `home` is the replica of its credit. Raises BadMessage."""
        if shared.lease in leases:
            return
        keys, router = unpack_keys(shared.keys), self._router
        credit, claim, kin = shared.credit, shared.claim, shared.kin
        if credit is not None and home is not None:
            router.index.drop(home.id, unpack_keys(credit.answer_keys))
            router.index.touch(home.id, keys[: credit.blocks], now_s)
        claimed = unpack_keys(claim.keys) if claim is not None else []
        self._last -= 1
        due_s = now_s + shared.left_ms / 1e3
        mirrored = _Mirrored(self._last, member, keys, shared.own_tokens, due_s, bool(claimed), kin)
        leases.add(shared.lease, mirrored)
        member.work.kv.open(mirrored.number, keys, shared.own_tokens)
        router.reuse.observe(keys, now_s, final=kin is not None and kin.final)
        if kin is not None:
            router.conversations.relocate(kin.name, member.id, keys, kin.own_at, final=kin.final)
        if shared.left_ms:
            self._computed_once(member, keys, shared.cached_tokens, now_s)
        self._pin(mirrored, now_s)
        if claim is not None and claimed:
            router.knowledge.promise(member.id, mirrored.number, claimed, claim.block_tokens, claim.depth)
        while len(leases) > self._limits.leases_max or leases.keys > self._limits.lease_keys_max:
            self._close(leases.oldest(), now_s, computed=True)

    def _pin(self, mirrored: _Mirrored, now_s: float) -> None:
        """Pin the prompt in the replica's cache; `grow` continues with a long one."""
        index, member, keys = self._router.index, mirrored.member, mirrored.keys
        blocks, step = min(len(keys), index.capacity(member.id)), self._limits.keys_max
        some = keys if len(keys) <= min(blocks, step) else keys[: min(blocks, step)]
        index.pin(member.id, mirrored.number, some, now_s)
        mirrored.partly = blocks > step
        if mirrored.partly and len(self._growing) < self._limits.growing_max:
            self._growing.append((mirrored, step, blocks))

    def grow(self, now_s: float) -> None:
        """Pin the next keys of a long prompt, as many as a message may have. Must be called several times a second. A
        prompt that ends before stays pinned up to that point."""
        while self._growing:
            mirrored, done, blocks = self._growing.popleft()
            if mirrored.over or self._router.fleet.members.get(mirrored.member.id) is not mirrored.member:
                continue
            end = min(blocks, done + self._limits.keys_max)
            self._router.index.extend(mirrored.member.id, mirrored.number, mirrored.keys[done:end], now_s)
            mirrored.partly = end < blocks
            if mirrored.partly:
                self._growing.appendleft((mirrored, end, blocks))
            return

    def _computed_once(self, member: ReplicaState, keys: list[int], cached_tokens: int, now_s: float) -> None:
        """Avoid counting a shared prefix twice. A prompt of another router may have a prefix in common with prompts of
        ours that wait at the replica. If neither router knew of the other's prompt at placement, the engine computes
        the prefix for the first of them."""
        if not self.behind or not keys:
            return
        for lease in member.queue.longest(member.speeds.units()[0], LEASES_LOOKED_AT):
            own = lease.prompt.keys
            if own and own[0] == keys[0] and cached_tokens <= lease.cached_tokens + SLACK_TOKENS:
                blocks = common(own, keys[: len(own)])
                tokens = int(lease.prompt_tokens * blocks / len(own))
                if member.dedupe_prefill(lease, tokens, now_s):
                    self._recounted(member.id)

    def end(self, leases: Leases, end: SharedEnd, member: ReplicaState | None, now_s: float) -> None:
        """Apply the end of another router's lease. `member` is the replica that gave the answer, if its cache still
        exists."""
        mirrored = leases.take(end.lease)
        if mirrored is not None:
            blocks = min(end.answer_blocks, ANSWER_BLOCKS_MAX)
            grown = answer_keys(end.end_key, blocks * BLOCK_BYTES) if end.end_key and blocks else []
            self._close(mirrored, now_s, computed=end.computed, grown=grown)
        if end.end_key and member is not None:
            answer = PastAnswer(member.id, end.prompt_tokens, end.completion_tokens, member.cache_epoch)
            self._router.answers.put(end.end_key, answer)

    def end_before(self, leases: Leases, first: int, now_s: float) -> None:
        """Close leases before this one, even if their ends were not received."""
        while leases and leases.first < first:
            mirrored = leases.oldest()
            self._close(mirrored, now_s, computed=now_s >= mirrored.due_s)

    def end_all(self, leases: Leases, now_s: float, *, go_on: bool) -> None:
        """Close all leases of a router that is no longer received. With `go_on`, only the channel is gone, and their
        prompts will be computed. Otherwise the router is gone, and so are its clients."""
        while leases:
            mirrored = leases.oldest()
            self._close(mirrored, now_s, computed=go_on or now_s >= mirrored.due_s)

    def _close(self, mirrored: _Mirrored, now_s: float, *, computed: bool, grown: list[int] | None = None) -> None:
        mirrored.over = True
        if mirrored.partly:
            grown = None  # the block would follow a gap
        member, number, router = mirrored.member, mirrored.number, self._router
        member.work.kv.close(number, mirrored.keys, mirrored.own_tokens)
        if router.fleet.members.get(member.id) is not member:
            return  # another engine is at that address
        if computed:
            router.index.unpin(member.id, number, now_s, grown=grown or ())
            if mirrored.kin is not None:
                kin = mirrored.kin
                router.conversations.note_response(kin.name, member.id, grown or (), now_s, final=kin.final)
        else:
            router.index.retract(member.id, number)
        if mirrored.claimed:
            router.knowledge.protected_blocks(member.id, number, now_s, computed=computed)
