"""What other routers have open at one replica, as they say themselves (core/sharing).

Each says absolute sums, so what it says takes the place of what it said before. Work that waits is one queue, whoever
sent it: its head is the prompt that was placed first, and goes on with the clock (Member.wait_ms).

Counts that only grow, such as prompt tokens sent, are taken as differences between two messages of one router.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from router.core.facts.peers import NOTHING, PeerSums

LEFT_MAX = 64  # routers that are not heard any more of which it is known what they had sent
FIRST_TOKENS_MAX = 64  # moments remembered of one replica at which others had a first token


class Others:
    """Sums over all other routers. Without any all are 0."""

    __slots__ = (
        "_first_tokens",
        "_heads",
        "_left",
        "_placed_s",
        "_said",
        "computed_tokens",
        "context_tokens",
        "decoding",
        "decoding_tokens",
        "open",
        "peak",
        "placed_sum_s",
        "waiting",
        "waiting_ms",
    )

    def __init__(self) -> None:
        self._said: dict[str, PeerSums] = {}
        self._left: dict[str, int] = {}  # router that is not heard any more -> prompt tokens it had sent by then
        self._heads: dict[str, tuple[float, int]] = {}  # router -> (when its head was placed, modelled prefill of it)
        self._first_tokens: list[tuple[float, int]] = []  # (moment, tokens computed for it), ascending
        self._placed_s: dict[str, float] = {}  # router -> sum of its open leases' times of placement
        self.placed_sum_s = 0.0  # sum of these
        self.waiting_ms = 0
        self.open = self.waiting = self.decoding = self.context_tokens = self.decoding_tokens = 0
        self.computed_tokens = 0  # prompt tokens that they had computed since we know them
        self.peak = 0  # most that waited at once since `restart_peak`

    def take(self, peer: str, sums: PeerSums, clock_s: float) -> PeerSums | None:
        """Take what a router has open; `clock_s` is what our clock shows more than its clock. Returns what it said
        before, if anything."""
        before = self._said.get(peer)
        self._said[peer] = sums
        if sums.waiting_ms:
            self._heads[peer] = clock_s + sums.head_at_ms / 1e3, sums.head_ms
        elif peer in self._heads:
            del self._heads[peer]
        old = before if before is not None else NOTHING
        self.waiting_ms += sums.waiting_ms - old.waiting_ms
        self.open += sums.open - old.open
        self.waiting += sums.waiting - old.waiting
        self.context_tokens += sums.context_tokens - old.context_tokens
        self.decoding_tokens += sums.decoding_tokens - old.decoding_tokens
        self.decoding = max(0, self.open - self.waiting)
        if sums.open:
            self._placed_s[peer] = sums.placed_ms / 1e3 + sums.open * clock_s
        elif peer in self._placed_s:
            del self._placed_s[peer]
        self.placed_sum_s = sum(self._placed_s.values())
        if self.waiting > self.peak:
            self.peak = self.waiting
        return before

    def of(self, peer: str) -> PeerSums:
        """What one router said last."""
        return self._said.get(peer, NOTHING)

    def forget(self, peer: str) -> bool:
        """A router is there no more; returns whether it had been here."""
        if peer not in self._said:
            return False
        self._left[peer] = self._said[peer].sent_tokens
        if len(self._left) > LEFT_MAX:
            del self._left[next(iter(self._left))]
        self.take(peer, NOTHING, 0.0)
        del self._said[peer]
        return True

    def sent_meanwhile(self, peer: str, sent_tokens: int) -> int | None:
        """Prompt tokens that a router has sent since it was forgotten, of `sent_tokens` in all; None where it was not
        heard before, or is another process that counts from 0."""
        left = self._left.pop(peer, None)
        return sent_tokens - left if left is not None and left <= sent_tokens else None

    def head(self) -> tuple[float, int]:
        """(when it was placed, modelled prefill) of what was placed first of all that waits; something must."""
        return min(self._heads.values())

    def first_token(self, at_s: float, tokens: int) -> None:
        """One of them had a first token then, of a prompt of which so many tokens were computed."""
        insort(self._first_tokens, (at_s, tokens))
        del self._first_tokens[:-FIRST_TOKENS_MAX]
        self.computed_tokens += tokens

    @property
    def first_token_s(self) -> float:
        """When any of them last had a first token."""
        return self._first_tokens[-1][0] if self._first_tokens else 0.0

    def batch(self, until_s: float, within_s: float) -> tuple[float, int]:
        """(when any of them last had a first token before the batch whose first tokens came at `until_s`, tokens of
        theirs that were computed in it): first tokens `within_s` of each other are of one batch."""
        known = self._first_tokens
        begin = bisect_left(known, (until_s - within_s, 0))
        end = bisect_left(known, (until_s + within_s, 0))
        return known[begin - 1][0] if begin else 0.0, sum([tokens for _, tokens in known[begin:end]])

    def restart_peak(self) -> int:
        """The most of their requests that waited at once since the last call, or wait now."""
        peak, self.peak = max(self.peak, self.waiting), self.waiting
        return peak
