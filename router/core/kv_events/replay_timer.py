"""Schedule of replay requests of a KvStream (stream.py): retries after silence, a rate limit, and periodic checks."""

from __future__ import annotations

from dataclasses import dataclass

from router.core.kv_events.stream_steps import RequestReplay, StreamLimits

STUCK_MAX = 2  # replays with the same gap, or without a batch that arrived, before batches count as lost
PROOFS_BURST, PROOF_EVERY_S = 10, 1.0  # limits requests to a publisher that always contradicts itself
LOOK_FIRST_S = 1.0  # time to the first check, which finds batches missed before the subscription took effect


@dataclass(slots=True)
class ReplayTimer:
    """State of the current replay request and time of the next one."""

    limits: StreamLimits
    token: int = 0  # number of the last request; answers to older requests are ignored
    again_at_s: float = 0.0  # time of the next request, if the replay stays silent until then
    asks: int = 0  # consecutive requests without an answer
    stuck: int = 0  # consecutive replays that ended at the same gap
    batches: int = 0  # batches of this replay that were applied
    proved: bool = False  # the replay began with the required batch
    look_at_s: float = float("inf")  # time of the next check, while the stream is in order
    _proofs_at_s: float = float("-inf")

    def reset(self) -> None:
        """Ignore all answers to earlier requests."""
        self.token += 1
        self.again_at_s, self.asks, self.stuck = 0.0, 0, 0
        self.batches, self.proved = 0, False

    def request(self, first: int) -> RequestReplay:
        """Return a replay request from batch `first`, without a change of the retry state."""
        self.token += 1
        return RequestReplay(first, self.token)

    def ask(self, first: int, now_s: float) -> RequestReplay:
        """Return a replay request and schedule its retry, later each time."""
        self.batches, self.proved = 0, False
        self.again_at_s = now_s + self.limits.silence_s * 2**self.asks
        self.asks += 1
        return self.request(first)

    def acquire_proof(self, now_s: float) -> bool:
        """True if another proof may be requested now. If not, `again_at_s` is the time of the next attempt."""
        next_s = max(self._proofs_at_s, now_s) + PROOF_EVERY_S
        if next_s - now_s > PROOFS_BURST * PROOF_EVERY_S:
            self.again_at_s = now_s + PROOF_EVERY_S
            return False
        self._proofs_at_s = next_s
        return True

    def postpone_retry(self, now_s: float) -> None:
        """Postpone the retry after an answer."""
        self.again_at_s = now_s + self.limits.silence_s

    def on_gap(self) -> bool:
        """Record a gap in the replay. Returns True if another request is worthwhile."""
        self.asks = 0
        self.stuck = 0 if self.batches else self.stuck + 1
        if self.stuck <= STUCK_MAX:
            return True
        self.stuck = 0
        return False

    def on_contiguous(self, now_s: float) -> None:
        """Schedule the first check, which is soon because no answer is outstanding."""
        self.look_at_s = now_s + min(LOOK_FIRST_S, self.limits.look_s)
