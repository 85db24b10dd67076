"""Loads under way at one replica: from each tier a link, on which one load follows another.

vLLM chains its transfers of one direction, whatever else its GPU does meanwhile (0.32, kv_offload/cpu/gpu_worker.py),
so a load ends when those before it have ended and it has moved its own bytes. We see no load end. We see first tokens:
before one, by the model of prefill, lies the prefill of what was not loaded, and before that the load's end. From one
such end to the next on the same link, or from the placement where that is later, is what a load took. While a long
prompt is computed there, a load's end is seen when that is done, so nothing is learned then.
"""

from __future__ import annotations

from router.core.fleet.lease import Lease, ToLoad
from router.core.learned.loads import LoadFit, LoadFits

LOADS_MAX = 4_096  # loads under way that are counted on one link
ALONE = 0.9  # part of a lease's loaded tokens that one tier must have for its time to say anything of that tier


class TierLink:
    """One tier's link of one replica. Times in milliseconds, except moments."""

    __slots__ = ("_head_since_s", "_under_way", "_waiting_ms", "ended_s", "fit")

    def __init__(self) -> None:
        self.fit = LoadFit()
        self.ended_s = 0.0  # time at which the last load ended, as far as that was seen
        self._under_way: dict[int, float] = {}  # lease -> modelled time, in the order of placement
        self._waiting_ms = 0.0
        self._head_since_s = 0.0

    def __len__(self) -> int:
        return len(self._under_way)

    def pending_ms(self, now_s: float) -> float:
        """Modelled time until all that is under way is loaded."""
        if not self._under_way:
            return 0.0
        head_ms = next(iter(self._under_way.values()))
        left_ms = self._waiting_ms - min((now_s - self._head_since_s) * 1e3, head_ms)
        return max(0.0, left_ms)

    def join(self, lease: int, load_ms: float, now_s: float) -> None:
        """A load is asked for."""
        if len(self._under_way) >= LOADS_MAX:
            return
        if not self._under_way:
            self._head_since_s = now_s
        self._under_way[lease] = load_ms
        self._waiting_ms += load_ms

    def leave(self, lease: int, now_s: float) -> None:
        """The load is over, or its request is. One that has left already changes nothing."""
        if lease not in self._under_way:
            return
        head = next(iter(self._under_way))
        self._waiting_ms -= self._under_way.pop(lease)
        if lease == head:
            self._head_since_s = now_s
        if not self._under_way:
            self._waiting_ms = 0.0  # sheds rounding errors


class TierLinks:
    """The links of one replica, by tier."""

    __slots__ = ("_links",)

    def __init__(self) -> None:
        self._links: dict[str, TierLink] = {}

    def __bool__(self) -> bool:
        return bool(self._links)

    def items(self) -> list[tuple[str, TierLink]]:
        """Tier and link, for figures."""
        return list(self._links.items())

    def of(self, tier: str) -> TierLink:
        """The tier's link."""
        link = self._links.get(tier)
        if link is None:
            link = self._links[tier] = TierLink()
        return link

    def pending_ms(self, tier: str, now_s: float) -> float:
        """Modelled time until all that is under way from the tier is loaded."""
        link = self._links.get(tier)
        return link.pending_ms(now_s) if link is not None else 0.0

    def begin(self, lease: Lease, fits: LoadFits, now_s: float) -> None:
        """A lease was placed that is to load."""
        for tier, tokens in lease.to_load.tokens.items() if lease.to_load is not None else ():
            link = self.of(tier)
            link.join(lease.id, fits.model(tier, link.fit).ms(tokens), now_s)

    def leave(self, lease: Lease, now_s: float) -> None:
        """A lease loads no more."""
        for tier in lease.to_load.tokens if lease.to_load is not None else ():
            self.of(tier).leave(lease.id, now_s)

    def loaded(self, lease: Lease, load: ToLoad, now_s: float, *, alone: bool) -> None:
        """The first token of a lease was seen, so its load is over: note how long that took, if it was `alone`."""
        ended_s = now_s - lease.prefill_ms / 1e3
        for tier in load.tokens:
            link = self.of(tier)
            if alone:
                began_s = max(lease.placed_s, link.ended_s)
                load.took_ms = max(load.took_ms or 0.0, (ended_s - began_s) * 1e3)
            link.ended_s = max(link.ended_s, ended_s)
            link.leave(lease.id, now_s)

    def forget_speed(self) -> None:
        """Another model may be served there now."""
        for link in self._links.values():
            link.fit = LoadFit()


def learn_load(links: TierLinks, fits: LoadFits, lease: Lease, cached_tokens: int) -> None:
    """Learn from a lease that ended well and had, in all, so many tokens of its prompt cached."""
    load = lease.to_load
    if load is None or load.took_ms is None:
        return
    tiers = load.tokens
    most = max(tiers, key=lambda tier: tiers[tier])
    to_load = sum(tiers.values())
    tokens = min(to_load, cached_tokens - (lease.cached_tokens - to_load))
    if tokens < ALONE * to_load or tiers[most] < ALONE * to_load:
        return  # not all of it was there, or several links had a part
    fits.observe(most, links.of(most).fit, tokens, load.took_ms)
