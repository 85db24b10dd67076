"""The store's clock, from which the ids of its streams are made. It is the common clock of all routers.

The reply to an added message has its id. The store made the id between the request and the reply, so the difference of
the two clocks is known to half of that time. The quickest of the last few replies counts.
"""

from __future__ import annotations

from collections import deque

SAMPLES = 8  # replies that count: two seconds of an idle router, so that a store's clock may be set


class StoreClock:
    """Difference between this router's clock and the store's."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES)  # (time until the reply, offset), in s
        self.offset_s = 0.0  # this router's clock when the store's clock is 0

    def note_reply(self, sent_s: float, now_s: float, id_ms: int) -> None:
        """Record the id of a message."""
        self._samples.append((now_s - sent_s, (sent_s + now_s) / 2 - id_ms / 1e3))
        self.offset_s = min(self._samples)[1]

    def store_s(self, at_s: float) -> float:
        """Return the store's clock at a time of this router's."""
        return at_s - self.offset_s
