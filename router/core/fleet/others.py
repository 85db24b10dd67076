"""What other routers have open at one replica, as they say themselves (core/sharing).

Each says absolute sums, so what it says takes the place of what it said before. Sums of work fade as our own queue does
(prefill_queue.py): the prefill at its head goes on without a message, what waits behind it does not.

Counts that only grow, such as prompt tokens sent, are taken as differences between two messages of one router.
"""

from __future__ import annotations

from msgspec import Struct


class PeerSums(Struct, gc=False):  # a Struct for speed: core/facts/requests.py
    """What one router has open at one replica."""

    pending_ms: int = 0  # modelled prefill of all that waits there, the head included
    head_ms: int = 0  # part of it that is under way
    open: int = 0  # open leases
    waiting: int = 0  # open leases whose prefill is not over
    context_tokens: int = 0  # prompts of open leases
    decoding_tokens: int = 0  # prompts of open leases whose prefill is over
    sent_tokens: int = 0  # prompt tokens sent since the router began
    computed_tokens: int = 0  # tokens computed of prompts whose first token came, since the router began
    stall_ms: int = 0  # modelled prefill that interrupted streams, since the router began


NOTHING = PeerSums()


class Others:
    """Sums over all other routers. Without any all are 0."""

    __slots__ = (
        "_busy",
        "_said",
        "computed_tokens",
        "context_tokens",
        "decoding",
        "decoding_tokens",
        "open",
        "peak",
        "waiting",
    )

    def __init__(self) -> None:
        self._said: dict[str, PeerSums] = {}
        self._busy: dict[str, tuple[int, int, float]] = {}  # router -> (pending_ms, head_ms, when it was heard)
        self.open = self.waiting = self.decoding = self.context_tokens = self.decoding_tokens = 0
        self.computed_tokens = 0  # tokens that they had computed since we know them
        self.peak = 0  # most that waited at once since `restart_peak`

    def take(self, peer: str, sums: PeerSums, now_s: float) -> PeerSums:
        """A router says what it has open now. Returns by how much it differs from what it said before."""
        before = self._said.get(peer)
        # Of a router that is new to us, what it did before says nothing.
        news = PeerSums() if before is None else _difference(sums, before)
        before = before or NOTHING
        self._said[peer] = sums
        if sums.pending_ms:
            self._busy[peer] = sums.pending_ms, sums.head_ms, now_s
        else:
            self._busy.pop(peer, None)
        self.open += sums.open - before.open
        self.waiting += sums.waiting - before.waiting
        self.context_tokens += sums.context_tokens - before.context_tokens
        self.decoding_tokens += sums.decoding_tokens - before.decoding_tokens
        self.decoding = self.open - self.waiting
        self.computed_tokens += news.computed_tokens
        if self.waiting > self.peak:
            self.peak = self.waiting
        return news

    def idle(self, peer: str) -> PeerSums | None:
        """What a router that has nothing open would say now; None where that changes nothing."""
        said = self._said.get(peer)
        if said is None or not (said.open or said.pending_ms):
            return None
        return PeerSums(
            sent_tokens=said.sent_tokens, computed_tokens=said.computed_tokens, stall_ms=said.stall_ms
        )  # what it counts stays

    def forget(self, peer: str, now_s: float) -> None:
        """A router is there no more."""
        if peer in self._said:
            self.take(peer, NOTHING, now_s)
            del self._said[peer]

    def pending_ms(self, now_s: float) -> float:
        """Modelled time until everything that they sent there is prefilled."""
        sum_ms = 0.0
        for pending_ms, head_ms, heard_s in self._busy.values():
            gone_ms = (now_s - heard_s) * 1e3
            sum_ms += pending_ms - min(gone_ms, head_ms)
        return sum_ms

    def restart_peak(self) -> int:
        """The most of their requests that waited at once since the last call, or wait now."""
        peak, self.peak = max(self.peak, self.waiting), self.waiting
        return peak


def _difference(sums: PeerSums, before: PeerSums) -> PeerSums:
    """What a router counted between two messages; nothing where its counts went back."""
    return PeerSums(
        sent_tokens=max(0, sums.sent_tokens - before.sent_tokens),
        computed_tokens=max(0, sums.computed_tokens - before.computed_tokens),
        stall_ms=max(0, sums.stall_ms - before.stall_ms),
    )
