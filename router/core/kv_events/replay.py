"""When a KvStream (stream.py) asks for a replay: again if there is silence, not too often, and now and then."""

from __future__ import annotations

from dataclasses import dataclass

from router.core.kv_events.steps import AskReplay, StreamLimits

STUCK_MAX = 2  # replays with the same hole, or without a batch that came, before batches are lost for good
PROOFS_BURST, PROOF_EVERY_S = 10, 1.0  # a publisher that always contradicts itself is not asked more often
LOOK_FIRST_S = 1.0  # time to the first check: batches missed before the subscription took effect are found soon


@dataclass(slots=True)
class Asking:
    """The replay under way, and the next one."""

    limits: StreamLimits
    token: int = 0  # number of the last request; answers to older requests are ignored
    again_at_s: float = 0.0  # time to ask again, if the replay stays silent until then
    asks: int = 0  # requests in a row without an answer
    stuck: int = 0  # replays in a row that ended at the same hole
    batches: int = 0  # batches of this replay that were applied
    proved: bool = False  # the replay began with the batch that it has to begin with
    look_at_s: float = float("inf")  # time of the next check, while all is well
    _proofs_at_s: float = float("-inf")

    def reset(self) -> None:
        """Ignore all answers to requests so far."""
        self.token += 1
        self.again_at_s, self.asks, self.stuck = 0.0, 0, 0
        self.batches, self.proved = 0, False

    def request(self, first: int) -> AskReplay:
        """A request for a replay from batch `first`, beside whatever goes on."""
        self.token += 1
        return AskReplay(first, self.token)

    def ask(self, first: int, now_s: float) -> AskReplay:
        """Ask, and wait for the answer: longer each time."""
        self.batches, self.proved = 0, False
        self.again_at_s = now_s + self.limits.silence_s * 2**self.asks
        self.asks += 1
        return self.request(first)

    def allowed(self, now_s: float) -> bool:
        """Whether another proof may be asked for now; if not, `again_at_s` says when."""
        next_s = max(self._proofs_at_s, now_s) + PROOF_EVERY_S
        if next_s - now_s > PROOFS_BURST * PROOF_EVERY_S:
            self.again_at_s = now_s + PROOF_EVERY_S
            return False
        self._proofs_at_s = next_s
        return True

    def heard(self, now_s: float) -> None:
        """An answer came."""
        self.again_at_s = now_s + self.limits.silence_s

    def hole(self) -> bool:
        """The replay has a hole: whether it is worth asking again."""
        self.asks = 0
        self.stuck = 0 if self.batches else self.stuck + 1
        if self.stuck <= STUCK_MAX:
            return True
        self.stuck = 0
        return False

    def all_is_well(self, now_s: float) -> None:
        """Plan the first check, which is soon: nothing is waited for any more."""
        self.look_at_s = now_s + min(LOOK_FIRST_S, self.limits.look_s)
