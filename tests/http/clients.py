"""Lines, pages and limits for tests of clients."""

from __future__ import annotations

from router.http.client_timeouts import ClientLimits
from tests.http.wire import Wire
from tests.support.recorded import RECORDED

LIMITS = ClientLimits(
    body_bytes_max=1 << 20,
    bodies_bytes_max=64 << 20,
    bodies_wait_s=10.0,
    keepalive_s=75.0,
    head_timeout_s=10.0,
    body_bytes_per_s_min=1_024,
    body_timeout_s=300.0,
    send_timeout_s=60.0,
    connections_max=100,
    connections_per_client_max=100,
)


LINE = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\n"


async def play(wire: Wire) -> None:
    """A healthy answer."""
    wire.transport.write(RECORDED["held JSON"].raw)
