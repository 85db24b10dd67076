"""Leases of other routers, as far as caches and KV pools know of them: what they hold, keep from eviction, and compute.

A prompt that another router sent somewhere is held there as one of ours would be: unproven until it is computed, and
gone if it is not. So a burst of one cold prefix stays together though it comes through several routers.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

from msgspec import Struct

from router.core.cache.masks import common
from router.core.fleet.member import Member
from router.core.learned.answers import PastAnswer
from router.core.placement.router import Router
from router.core.prompts.blocks import BLOCK_BYTES, answer_keys
from router.core.sharing.limits import SharingLimits
from router.core.sharing.messages import SharedEnd, SharedKin, SharedPlacement, unpacked

ANSWER_BLOCKS_MAX = 1 << 12  # most blocks of one answer that another router is believed
LEASES_LOOKED_AT = 16  # leases of ours that wait at a replica, and may be for a prompt that another router sent too
SLACK_TOKENS = 512  # routers' beliefs of what is held are as far apart at most, where they mean the same


class _Mirrored(Struct, gc=False):
    """An open lease of another router."""

    number: int  # below 0, as our own are not
    member: Member
    keys: list[int]
    own_tokens: int
    due_s: float  # time at which its prefill is done, by its model
    claimed: bool  # whether blocks of the engine's own size were promised
    kin: SharedKin | None
    over: bool = False
    partly: bool = False  # only the beginning of its keys is held yet


class Leases:
    """Open leases of one router by its numbers, the oldest first."""

    def __init__(self) -> None:
        self._open: OrderedDict[int, _Mirrored] = OrderedDict()
        self.keys = 0  # keys of all their prompts

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, lease: int) -> bool:
        return lease in self._open

    @property
    def first(self) -> int:
        """The number of the oldest; there must be one."""
        return next(iter(self._open))

    def add(self, lease: int, mirrored: _Mirrored) -> None:
        """One more is open."""
        self._open[lease] = mirrored
        self.keys += len(mirrored.keys)

    def take(self, lease: int) -> _Mirrored | None:
        """It is over; None where it is not here."""
        mirrored = self._open.pop(lease, None)
        if mirrored is not None:
            self.keys -= len(mirrored.keys)
        return mirrored

    def oldest(self) -> _Mirrored:
        """The oldest is over; there must be one."""
        mirrored = self._open.popitem(last=False)[1]
        self.keys -= len(mirrored.keys)
        return mirrored


class Mirror:
    """Writes what other routers placed to where our own placements are written."""

    def __init__(self, router: Router, limits: SharingLimits, recounted: Callable[[str], None]) -> None:
        """`recounted(replica)` is called where less waits of ours than was told."""
        self._router, self._limits, self._recounted = router, limits, recounted
        self._last = 0
        self._growing: deque[tuple[_Mirrored, int, int]] = deque()  # long prompts: keys that are done, and that will be
        # Whether the router that is heard comes before this one: of two that sent one prompt at the same moment the
        # first counts the work. Set before `place`.
        self.behind = False

    def place(self, leases: Leases, shared: SharedPlacement, member: Member, home: Member | None, now_s: float) -> None:
        """Another router sent a prompt to a replica; `home` is the replica of its credit. Raises BadMessage."""
        if shared.lease in leases:
            return
        keys, router = unpacked(shared.keys), self._router
        credit, claim, kin = shared.credit, shared.claim, shared.kin
        if credit is not None and home is not None:
            router.index.drop(home.id, unpacked(credit.answer_keys))
            router.index.touch(home.id, keys[: credit.blocks], now_s)
        claimed = unpacked(claim.keys) if claim is not None else []
        self._last -= 1
        due_s = now_s + shared.left_ms / 1e3
        mirrored = _Mirrored(self._last, member, keys, shared.own_tokens, due_s, bool(claimed), kin)
        leases.add(shared.lease, mirrored)
        member.live.open(mirrored.number, keys, shared.own_tokens)
        router.reuse.observe(keys, now_s, final=kin is not None and kin.final)
        if kin is not None:
            router.conversations.went(kin.name, member.id, keys, kin.own_at, final=kin.final)
        if shared.left_ms:
            self._computed_once(member, keys, shared.cached_tokens, now_s)
        self._pin(mirrored, now_s)
        if claim is not None and claimed:
            router.knowledge.promise(member.id, mirrored.number, claimed, claim.block_tokens, claim.depth)
        while len(leases) > self._limits.leases_max or leases.keys > self._limits.lease_keys_max:
            self._close(leases.oldest(), now_s, computed=True)

    def _pin(self, mirrored: _Mirrored, now_s: float) -> None:
        """Hold the prompt where it was sent; a long one goes on with `grow`."""
        index, member, keys = self._router.index, mirrored.member, mirrored.keys
        blocks, step = min(len(keys), index.capacity(member.id)), self._limits.keys_max
        some = keys if len(keys) <= min(blocks, step) else keys[: min(blocks, step)]
        index.pin(member.id, mirrored.number, some, now_s)
        mirrored.partly = blocks > step
        if mirrored.partly and len(self._growing) < self._limits.growing_max:
            self._growing.append((mirrored, step, blocks))

    def grow(self, now_s: float) -> None:
        """Hold as many more keys of a long prompt as a message may have. To be called some times a second; a prompt
        that ends before stays held as far as it was."""
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

    def _computed_once(self, member: Member, keys: list[int], cached_tokens: int, now_s: float) -> None:
        """A prompt that is computed for another router may have the beginning of prompts of ours that wait there, and
        were placed when neither router knew of the other's: the engine computes it for whichever comes first."""
        if not self.behind or not keys:
            return
        for lease in member.queue.longest(member.speeds.units()[0], LEASES_LOOKED_AT):
            if lease.keys and lease.keys[0] == keys[0] and cached_tokens <= lease.cached_tokens + SLACK_TOKENS:
                blocks = common(lease.keys, keys[: len(lease.keys)])
                tokens = int(lease.prompt_tokens * blocks / len(lease.keys))
                if member.computed_for(lease, tokens, now_s):
                    self._recounted(member.id)

    def end(self, leases: Leases, end: SharedEnd, member: Member | None, now_s: float) -> None:
        """A lease of another router is over; `member` is the replica that gave the answer, if its cache is still
        there."""
        mirrored = leases.take(end.lease)
        if mirrored is not None:
            blocks = min(end.answer_blocks, ANSWER_BLOCKS_MAX)
            grown = answer_keys(end.end_key, blocks * BLOCK_BYTES) if end.end_key and blocks else []
            self._close(mirrored, now_s, computed=end.computed, grown=grown)
        if end.end_key and member is not None:
            answer = PastAnswer(member.id, end.prompt_tokens, end.completion_tokens, member.life)
            self._router.answers.put(end.end_key, answer)

    def end_before(self, leases: Leases, first: int, now_s: float) -> None:
        """Leases before this one are over, though nobody may have said how."""
        while leases and leases.first < first:
            mirrored = leases.oldest()
            self._close(mirrored, now_s, computed=now_s >= mirrored.due_s)

    def end_all(self, leases: Leases, now_s: float, *, go_on: bool) -> None:
        """The router is not heard any more. Its leases `go_on` where only the channel is gone: their prompts will be
        computed. Otherwise the router is gone, and its clients with it."""
        while leases:
            mirrored = leases.oldest()
            self._close(mirrored, now_s, computed=go_on or now_s >= mirrored.due_s)

    def _close(self, mirrored: _Mirrored, now_s: float, *, computed: bool, grown: list[int] | None = None) -> None:
        mirrored.over = True
        if mirrored.partly:
            grown = None  # the block would stand behind a gap
        member, number, router = mirrored.member, mirrored.number, self._router
        member.live.close(number, mirrored.keys, mirrored.own_tokens)
        if router.fleet.members.get(member.id) is not member:
            return  # another engine is at that address
        if computed:
            router.index.unpin(member.id, number, now_s, grown=grown or ())
            if mirrored.kin is not None:
                kin = mirrored.kin
                router.conversations.ended(kin.name, member.id, grown or (), now_s, final=kin.final)
        else:
            router.index.retract(member.id, number)
        if mirrored.claimed:
            router.knowledge.kept(member.id, number, now_s, computed=computed)
