"""Loads in progress at one replica: one link for each tier, on which loads follow one another.

vLLM serializes its transfers of one direction, independent of other work on its GPU (0.32,
kv_offload/cpu/gpu_worker.py). So a load ends once the loads before it have ended and its own bytes are moved.

The router sees no end of a load, only first tokens. The end of a load is the time of the first token minus the modelled
prefill of the tokens that were not loaded. The duration of a load is the time from one such end to the next on the same
link, or from the placement if that is later. While a long prompt is computed there, the end of a load only shows after
that prefill, so such loads teach nothing.
"""

from __future__ import annotations

from router.core.estimators.tier_load import LoadFit, LoadFits
from router.core.fleet.lease import Lease, PendingTierLoad

LOADS_MAX = 4_096  # limit of loads counted on one link
ALONE = 0.9  # minimum part of a lease's loaded tokens from one tier, for the time to count for that tier


class TierQueue:
    """Link of one tier of one replica. Durations are in milliseconds, points in time in seconds."""

    __slots__ = ("_head_since_s", "_under_way", "_waiting_ms", "ended_s", "fit")

    def __init__(self) -> None:
        self.fit = LoadFit()
        self.ended_s = 0.0  # estimated time at which the last observed load ended
        self._under_way: dict[int, float] = {}  # lease -> modelled time, in the order of placement
        self._waiting_ms = 0.0
        self._head_since_s = 0.0

    def __len__(self) -> int:
        return len(self._under_way)

    def pending_ms(self, now_s: float) -> float:
        """Return the modelled time until all loads in progress are complete."""
        if not self._under_way:
            return 0.0
        head_ms = next(iter(self._under_way.values()))
        left_ms = self._waiting_ms - min((now_s - self._head_since_s) * 1e3, head_ms)
        return max(0.0, left_ms)

    def join(self, lease: int, load_ms: float, now_s: float) -> None:
        """Add a requested load."""
        if len(self._under_way) >= LOADS_MAX:
            return
        if not self._under_way:
            self._head_since_s = now_s
        self._under_way[lease] = load_ms
        self._waiting_ms += load_ms

    def leave(self, lease: int, now_s: float) -> None:
        """Remove a load that ended, or that belongs to an ended request. No effect if it was removed before."""
        if lease not in self._under_way:
            return
        head = next(iter(self._under_way))
        self._waiting_ms -= self._under_way.pop(lease)
        if lease == head:
            self._head_since_s = now_s
        if not self._under_way:
            self._waiting_ms = 0.0  # clears rounding errors


class TierLinks:
    """Links of one replica, by tier."""

    __slots__ = ("_links",)

    def __init__(self) -> None:
        self._links: dict[str, TierQueue] = {}

    def __bool__(self) -> bool:
        return bool(self._links)

    def items(self) -> list[tuple[str, TierQueue]]:
        """Return tiers and links, for metrics."""
        return list(self._links.items())

    def get_or_create(self, tier: str) -> TierQueue:
        """Return the tier's link."""
        link = self._links.get(tier)
        if link is None:
            link = self._links[tier] = TierQueue()
        return link

    def pending_ms(self, tier: str, now_s: float) -> float:
        """Return the modelled time until all loads in progress from the tier are complete."""
        link = self._links.get(tier)
        return link.pending_ms(now_s) if link is not None else 0.0

    def begin(self, lease: Lease, fits: LoadFits, now_s: float) -> None:
        """Add the loads of a placed lease to the links of their tiers."""
        for tier, tokens in lease.to_load.tokens.items() if lease.to_load is not None else ():
            link = self.get_or_create(tier)
            link.join(lease.id, fits.model(tier, link.fit).ms(tokens), now_s)

    def leave(self, lease: Lease, now_s: float) -> None:
        """Remove the loads of a lease."""
        for tier in lease.to_load.tokens if lease.to_load is not None else ():
            self.get_or_create(tier).leave(lease.id, now_s)

    def on_load_complete(self, lease: Lease, load: PendingTierLoad, now_s: float, *, alone: bool) -> None:
        """Record that a lease's loads are complete, as its first token shows. Their duration is noted if the lease was
        `alone`."""
        ended_s = now_s - lease.prefill_ms / 1e3
        for tier in load.tokens:
            link = self.get_or_create(tier)
            if alone:
                began_s = max(lease.placed_s, link.ended_s)
                load.took_ms = max(load.took_ms or 0.0, (ended_s - began_s) * 1e3)
            link.ended_s = max(link.ended_s, ended_s)
            link.leave(lease.id, now_s)

    def forget_speed(self) -> None:
        """Forget the learned durations, because another model may be served there now."""
        for link in self._links.values():
            link.fit = LoadFit()


def learn_load(links: TierLinks, fits: LoadFits, lease: Lease, cached_tokens: int) -> None:
    """Learn load times from a lease that ended well. `cached_tokens` is the total of its prompt tokens that were
    cached."""
    load = lease.to_load
    if load is None or load.took_ms is None:
        return
    tiers = load.tokens
    most = max(tiers, key=lambda tier: tiers[tier])
    to_load = sum(tiers.values())
    tokens = min(to_load, cached_tokens - (lease.cached_tokens - to_load))
    if tokens < ALONE * to_load or tiers[most] < ALONE * to_load:
        return  # some tokens were no longer there, or several links had a part
    fits.observe(most, links.get_or_create(most).fit, tokens, load.took_ms)
