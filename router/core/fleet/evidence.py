"""Evidence from requests that a replica works, or does not: times of first tokens and answers, and disconnects.

It is judged in stall_detector.py, outlier_detection.py, eligibility.py and activity.py.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf

from msgspec import Struct

from router.core.fleet.lease import Lease

ON_TIME_FACTOR, ON_TIME_MS = 3.0, 1_500.0  # a first token is on time within 3 x its modelled time + 1,500 ms
LATE_S = 3.0  # for this time after a late first token, first tokens that arrived together prove nothing
TIMED_MAX = 8  # first tokens of a replica that are compared with those of its peers


class TtftSample(Struct, gc=False):  # a Struct for speed: core/types/requests.py
    """A first token, with the time that the fleet's model predicted."""

    at_s: float
    took_ms: float
    queued: bool
    expected_ms: float  # time that the fleet's model predicted


@dataclass(slots=True)
class Evidence:
    """Times are those of this router's requests, except for `alive_s`: moving counters are a sign of life, too."""

    alive_s: float = 0.0  # last sign of life
    on_time_s: float = -inf  # last first token that was on time, or end of an answer that did not stream
    late_s: float = -inf  # last first token that was late
    unseen_end_s: float = 0.0  # end of the last answer that did not stream
    # requests placed there with an answer that does not pass this router: nothing was learned from them
    unobserved_responses: int = 0
    late_disconnects: int = 0  # clients that left after their first token was late, since the last sign of life
    # modelled prefill of requests that their clients abandoned before its end; the engine may have worked on it
    abandoned_prefill_ms: float = 0.0
    timed: deque[TtftSample] = field(default_factory=lambda: deque(maxlen=TIMED_MAX))

    def alive(self, now_s: float) -> None:
        """Record a sign of life."""
        self.alive_s, self.late_disconnects, self.abandoned_prefill_ms = now_s, 0, 0.0

    def judge_first_token(self, took_ms: float, expected_ms: float, now_s: float) -> None:
        """Record if a first token was on time, by the time that its prefill took."""
        if took_ms > ON_TIME_FACTOR * expected_ms + ON_TIME_MS:
            self.late_s = now_s
        elif now_s - self.late_s > LATE_S:
            self.on_time_s = now_s

    def on_response_end(self, lease: Lease, now_s: float) -> None:
        """Record the successful end of an answer."""
        self.alive(now_s)
        if not lease.streams:
            self.unseen_end_s = now_s
            if now_s - self.late_s > LATE_S:
                self.on_time_s = now_s

    def on_client_disconnect(self, lease: Lease, *, late: bool) -> None:
        """Record that the client of a lease left. `late`: its first token was overdue at that time."""
        if late:
            self.late_disconnects += 1
        elif lease.first_token_s is None:
            self.abandoned_prefill_ms += lease.prefill_ms
