"""What other routers have open at one replica, as they say themselves (core/sharing).

Each says absolute sums, so what it says takes the place of what it said before. Work that waits is one queue, whoever
sent it: its head is the prompt that was placed first, and goes on with the clock (Member.wait_ms).

Counts that only grow, such as prompt tokens sent, are taken as differences between two messages of one router.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from msgspec import Struct

FIRST_TOKENS_MAX = 64  # moments remembered of one replica at which others had a first token


class PeerSums(Struct, gc=False):  # a Struct for speed: core/facts/requests.py
    """What one router has open at one replica."""

    waiting_ms: int = 0  # modelled prefill of all that waits there, what is done of it included
    head_ms: int = 0  # part of it that is the head's
    head_age_ms: int = 0  # time since the head was placed
    open: int = 0  # open leases
    waiting: int = 0  # open leases whose prefill is not over
    context_tokens: int = 0  # prompts of open leases
    decoding_tokens: int = 0  # prompts of open leases whose prefill is over
    sent_tokens: int = 0  # prompt tokens sent since the router began
    computed_ms: int = 0  # modelled prefill of prompts whose first token came, since the router began
    stall_ms: int = 0  # modelled prefill that interrupted streams, since the router began


NOTHING = PeerSums()


class Others:
    """Sums over all other routers. Without any all are 0."""

    __slots__ = (
        "_first_tokens",
        "_heads",
        "_said",
        "computed_ms",
        "context_tokens",
        "decoding",
        "decoding_tokens",
        "open",
        "peak",
        "waiting",
        "waiting_ms",
    )

    def __init__(self) -> None:
        self._said: dict[str, PeerSums] = {}
        self._heads: dict[str, tuple[float, int]] = {}  # router -> (when its head was placed, modelled prefill of it)
        self._first_tokens: list[float] = []  # moments, ascending
        self.waiting_ms = 0
        self.open = self.waiting = self.decoding = self.context_tokens = self.decoding_tokens = 0
        self.computed_ms = 0  # modelled prefill that they had computed since we know them
        self.peak = 0  # most that waited at once since `restart_peak`

    def take(self, peer: str, sums: PeerSums, now_s: float) -> PeerSums:
        """A router said then what it has open. Returns by how much it differs from what it said before."""
        before = self._said.get(peer)
        # Of a router that is new to us, what it did before says nothing.
        news = PeerSums() if before is None else _difference(sums, before)
        before = before or NOTHING
        self._said[peer] = sums
        if sums.waiting_ms:
            self._heads[peer] = now_s - sums.head_age_ms / 1e3, sums.head_ms
        else:
            self._heads.pop(peer, None)
        self.waiting_ms += sums.waiting_ms - before.waiting_ms
        self.open += sums.open - before.open
        self.waiting += sums.waiting - before.waiting
        self.context_tokens += sums.context_tokens - before.context_tokens
        self.decoding_tokens += sums.decoding_tokens - before.decoding_tokens
        self.decoding = self.open - self.waiting
        self.computed_ms += news.computed_ms
        if self.waiting > self.peak:
            self.peak = self.waiting
        return news

    def idle(self, peer: str) -> PeerSums | None:
        """What a router that has nothing open would say now; None where that changes nothing."""
        said = self._said.get(peer)
        if said is None or not (said.open or said.waiting_ms):
            return None
        return PeerSums(
            sent_tokens=said.sent_tokens, computed_ms=said.computed_ms, stall_ms=said.stall_ms
        )  # what it counts stays

    def forget(self, peer: str, now_s: float) -> None:
        """A router is there no more."""
        if peer in self._said:
            self.take(peer, NOTHING, now_s)
            del self._said[peer]

    def head(self) -> tuple[float, int]:
        """(when it was placed, modelled prefill) of what was placed first of all that waits; something must."""
        return min(self._heads.values())

    @property
    def first_token_s(self) -> float:
        """When any of them last had a first token."""
        return self._first_tokens[-1] if self._first_tokens else 0.0

    def first_token(self, at_s: float) -> None:
        """Another router had a first token then."""
        insort(self._first_tokens, at_s)
        del self._first_tokens[:-FIRST_TOKENS_MAX]

    def last_before(self, at_s: float) -> float:
        """When any of them last had a first token before this moment, as far as is remembered."""
        place = bisect_left(self._first_tokens, at_s)
        return self._first_tokens[place - 1] if place else 0.0

    def restart_peak(self) -> int:
        """The most of their requests that waited at once since the last call, or wait now."""
        peak, self.peak = max(self.peak, self.waiting), self.waiting
        return peak


def _difference(sums: PeerSums, before: PeerSums) -> PeerSums:
    """What a router counted between two messages; nothing where its counts went back."""
    return PeerSums(
        sent_tokens=max(0, sums.sent_tokens - before.sent_tokens),
        computed_ms=max(0, sums.computed_ms - before.computed_ms),
        stall_ms=max(0, sums.stall_ms - before.stall_ms),
    )
