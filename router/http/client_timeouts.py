"""Time limits for clients: to send a head, to send a body, to read an answer, to be idle.

A connection is examined once per sweep and never in between. No timer, clock or record is spent on a request or a
piece. The difference from the last sweep shows the client's progress.

- A head counts from the sweep that first found it. Its limit is two sweeps shorter than configured, so that a head is
  ended at its limit or a little earlier, never later.
- A body must arrive at a minimum rate. It begins with `head_timeout_s` seconds of credit, earns one second for every
  `body_bytes_per_s_min` bytes, and pays one a second. At most `keepalive_s` of credit are saved, so that a large body
  cannot be kept open with a few bytes an hour. In any case, all of it must have arrived after `body_timeout_s`.
- An answer counts as read by the bytes that the client's kernel has acknowledged (tcp_info). If bytes are left and none
  is acknowledged, the client blocks, regardless of the engine.

Time is an argument; no function here reads a clock.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Any

from router.http.receiver import BETWEEN, HEAD

SWEEP_S_MAX, SWEEP_S_MIN = 1.0, 0.01
SWEEPS_A_LIMIT = 10  # maximum number of sweeps within the shortest limit

HEAD_TIMEOUT, BODY_TIMEOUT, SEND_TIMEOUT, IDLE = "head_timeout", "body_timeout", "send_timeout", "idle"
TOO_MANY, TOO_MANY_OF_CLIENT, NO_HANDSHAKE = "connections_max", "connections_per_client_max", "tls_handshake"
BODY_BUDGET_FULL = "bodies_bytes_max"
REASONS = (HEAD_TIMEOUT, BODY_TIMEOUT, SEND_TIMEOUT, IDLE, TOO_MANY, TOO_MANY_OF_CLIENT, NO_HANDSHAKE, BODY_BUDGET_FULL)

_TCP_INFO = getattr(socket, "TCP_INFO", None)
_ACKED_AT, _INFO_BYTES = 120, 128  # tcpi_bytes_acked in struct tcp_info (linux/tcp.h), since Linux 4.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Limits on the size and the duration of clients' requests (config/schema.py: `listen`, `limits`)."""

    body_bytes_max: int
    bodies_bytes_max: int
    bodies_wait_s: float
    keepalive_s: float
    head_timeout_s: float
    body_bytes_per_s_min: int
    body_timeout_s: float
    send_timeout_s: float
    connections_max: int
    connections_per_client_max: int

    @property
    def sweep_s(self) -> float:
        """Seconds between two sweeps over a connection."""
        shortest_s = min(self.head_timeout_s, self.send_timeout_s, self.keepalive_s)
        return min(SWEEP_S_MAX, max(SWEEP_S_MIN, shortest_s / SWEEPS_A_LIMIT))


class ClientTimer:
    """State of one connection at the last sweep, and the time since which it has not changed."""

    __slots__ = ("_body_bytes", "_credit_s", "_looked_s", "_phase", "_reading_since_s", "_since_s", "_taken_bytes")

    def __init__(self) -> None:
        self._phase = (-1, -1)  # the receiver's stage, and the number of the request; -1: the client need not send
        self._since_s = self._looked_s = self._credit_s = 0.0
        self._body_bytes = 0
        self._taken_bytes = -1  # bytes acknowledged by the client; -1: no bytes were left to read
        self._reading_since_s = 0.0

    def reads(self, now_s: float, limits: ClientLimits, left_bytes: int, taken_bytes: int) -> bool:
        """Return False if the client does not read: `left_bytes` are unread, and it has read none for `send_timeout_s`.
        `taken_bytes` come from `count_acked_bytes`."""
        if not left_bytes:
            self._taken_bytes = -1
        elif taken_bytes != self._taken_bytes:
            self._taken_bytes, self._reading_since_s = taken_bytes, now_s
        else:
            return now_s - self._reading_since_s <= limits.send_timeout_s
        return True

    def pause(self) -> None:
        """Stop counting, because the client need not send now."""
        self._phase = (-1, -1)

    def sends(self, now_s: float, limits: ClientLimits, stage: int, requests: int, body_bytes: int) -> str:
        """Return the reason of REASONS if the client has exceeded a limit, else "". The receiver is at this `stage` of
        its `requests`-th request, and `body_bytes` of its body have arrived."""
        if (stage, requests) != self._phase:
            self._phase, self._since_s, self._looked_s = (stage, requests), now_s, now_s
            self._body_bytes, self._credit_s = body_bytes, limits.head_timeout_s
            return ""
        took_s, head_s = now_s - self._since_s, limits.head_timeout_s - 2 * limits.sweep_s
        if stage == BETWEEN:
            return IDLE if took_s > (limits.keepalive_s if requests else head_s) else ""
        if stage == HEAD:
            return HEAD_TIMEOUT if took_s > head_s else ""
        if took_s > limits.body_timeout_s:
            return BODY_TIMEOUT
        return "" if self._in_credit(now_s, limits, body_bytes) else BODY_TIMEOUT

    def _in_credit(self, now_s: float, limits: ClientLimits, body_bytes: int) -> bool:
        came_bytes, rate = body_bytes - self._body_bytes, limits.body_bytes_per_s_min
        earned_s = came_bytes / rate if rate else limits.keepalive_s * (came_bytes > 0)
        credit_s = min(self._credit_s - (now_s - self._looked_s) + earned_s, limits.keepalive_s)
        self._looked_s, self._body_bytes, self._credit_s = now_s, body_bytes, credit_s
        return credit_s > 0


def count_acked_bytes(sock: Any, left_bytes: int) -> int:  # noqa: ANN401 - a socket, or what uvloop has for one
    """Return the number of bytes that the client has acknowledged since it connected. If the kernel does not report it,
    return `left_bytes`, which are written and not sent yet: that number also changes when the client reads."""
    if _TCP_INFO is not None and sock is not None:
        try:
            info = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES)
        except OSError:
            return left_bytes
        if len(info) >= _INFO_BYTES:
            acked_bytes: int = struct.unpack_from("=Q", info, _ACKED_AT)[0]
            return acked_bytes
    return left_bytes
