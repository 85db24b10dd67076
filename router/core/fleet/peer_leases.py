"""Open work of other routers at one replica, as they report it (core/peer_sync).

Each router reports absolute sums, so a report replaces the previous one. Waiting prefills of all routers form one
queue: its head is the prompt that was placed first, and progresses with the clock (Member.wait_ms). Monotonic counters,
such as prompt tokens sent, are used as differences between two reports of one router.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from router.core.types.peer_load import ZERO_LOAD, PeerLoad

LEFT_MAX = 64  # limit of lost routers with a remembered count of sent tokens
FIRST_TOKENS_MAX = 64  # limit of remembered first tokens of other routers at one replica


class PeerLoadView:
    """Sums over all other routers; all are 0 without any."""

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
        self._said: dict[str, PeerLoad] = {}
        self._left: dict[str, int] = {}  # lost router -> prompt tokens that it had sent by then
        # router -> (placement time of its head, modelled prefill of the head)
        self._heads: dict[str, tuple[float, int]] = {}
        self._first_tokens: list[tuple[float, int]] = []  # (time, computed tokens of its prompt), ascending
        self._placed_s: dict[str, float] = {}  # router -> sum of its open leases' times of placement
        self.placed_sum_s = 0.0  # sum over these routers
        self.waiting_ms = 0
        self.open = self.waiting = self.decoding = self.context_tokens = self.decoding_tokens = 0
        self.computed_tokens = 0  # their computed prompt tokens, since they became known
        self.peak = 0  # maximum of waiting requests since `restart_peak`

    def take(self, peer: str, sums: PeerLoad, clock_s: float) -> PeerLoad | None:
        """Take a router's report. `clock_s` is the offset of our clock from its clock. Return its previous report, if
        any."""
        before = self._said.get(peer)
        self._said[peer] = sums
        if sums.waiting_ms:
            self._heads[peer] = clock_s + sums.head_at_ms / 1e3, sums.head_ms
        elif peer in self._heads:
            del self._heads[peer]
        old = before if before is not None else ZERO_LOAD
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

    def get_load(self, peer: str) -> PeerLoad:
        """Return the last report of one router."""
        return self._said.get(peer, ZERO_LOAD)

    def forget(self, peer: str) -> bool:
        """Drop a router that is no longer there. Return True if it had open work here."""
        if peer not in self._said:
            return False
        self._left[peer] = self._said[peer].sent_tokens
        if len(self._left) > LEFT_MAX:
            del self._left[next(iter(self._left))]
        self.take(peer, ZERO_LOAD, 0.0)
        del self._said[peer]
        return True

    def tokens_since(self, peer: str, sent_tokens: int) -> int | None:
        """Return the prompt tokens that a router sent since it was forgotten; `sent_tokens` is its total. None if it is
        new, or another process that counts from 0."""
        left = self._left.pop(peer, None)
        return sent_tokens - left if left is not None and left <= sent_tokens else None

    def head(self) -> tuple[float, int]:
        """Return (time of placement, modelled prefill) of the request placed first among those waiting. There must be
        one."""
        return min(self._heads.values())

    def first_token(self, at_s: float, tokens: int) -> None:
        """Record a first token of another router, and the computed tokens of its prompt."""
        insort(self._first_tokens, (at_s, tokens))
        del self._first_tokens[:-FIRST_TOKENS_MAX]
        self.computed_tokens += tokens

    @property
    def first_token_s(self) -> float:
        """Time of the last first token of any other router."""
        return self._first_tokens[-1][0] if self._first_tokens else 0.0

    def batch(self, until_s: float, within_s: float) -> tuple[float, int]:
        """Return the other routers' part of the batch with its first tokens at `until_s`; first tokens at most
        `within_s` apart are of one batch. The result is (time of their last first token before the batch, their
        computed tokens in it)."""
        known = self._first_tokens
        begin = bisect_left(known, (until_s - within_s, 0))
        end = bisect_left(known, (until_s + within_s, 0))
        return known[begin - 1][0] if begin else 0.0, sum([tokens for _, tokens in known[begin:end]])

    def restart_peak(self) -> int:
        """Return the maximum of their waiting requests since the last call, and restart it at the current number."""
        peak, self.peak = max(self.peak, self.waiting), self.waiting
        return peak
