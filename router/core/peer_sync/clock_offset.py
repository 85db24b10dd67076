"""Estimation of the delay of another router's messages, without synchronized clocks.

The lag of a router is the minimum, over recent messages, of our clock at reception minus its clock at sending: the
clock offset plus the delay. Each router sends its lags to the others. The clock offset is the same in both directions
with opposite signs, so half of the sum of both lags is the mean of both delays (as in NTP: Mills, RFC 5905).
"""

from __future__ import annotations

KEPT_S = 10.0  # a lag is the minimum of the last 10 to 20 s, because clocks drift and delays change
DELAY_S_MAX = 1.0  # limit of the estimate


class ClockOffset:
    """Delay of one other router's messages."""

    __slots__ = ("_before_ms", "_now_ms", "_since_s", "delay_s")

    def __init__(self) -> None:
        self.delay_s = 0.0  # 0 until both routers have each other's lag
        self._now_ms: int | None = None
        self._before_ms: int | None = None
        self._since_s = 0.0

    @property
    def lag_ms(self) -> int | None:
        """Lag of the router; None before its first message."""
        if self._now_ms is None or self._before_ms is None:
            return self._now_ms
        return min(self._now_ms, self._before_ms)

    def note_message(self, sent_ms: int, their_lag_ms: int | None, now_s: float) -> None:
        """Record a message, with its sending time by its sender's clock, and the sender's lag for our messages."""
        lag_ms = int(now_s * 1e3) - sent_ms
        if self._now_ms is None or now_s - self._since_s > KEPT_S:
            self._before_ms, self._now_ms, self._since_s = self._now_ms, lag_ms, now_s
        elif lag_ms < self._now_ms:
            self._now_ms = lag_ms
        own_ms = self.lag_ms
        if their_lag_ms is not None and own_ms is not None:
            self.delay_s = min(max(0.0, (own_ms + their_lag_ms) / 2e3), DELAY_S_MAX)
