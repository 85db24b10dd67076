"""Two servers on one port."""

from __future__ import annotations

import socket
import ssl

import pytest

from router.http.request import Request
from router.http.server import Server
from tests.http.clients import LIMITS
from tests.http.wire import on_uvloop

pytestmark = pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="not on this system")


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("reuse_port", [False, True])
@on_uvloop
async def test_a_port_is_shared_if_both_say_so(tls: bool, reuse_port: bool) -> None:
    """With `reuse_port` two servers listen on one port, with TLS too; without it the second one has an error."""

    async def nothing(_: Request) -> None:
        pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if tls else None
    one, two = (Server(nothing, lambda *_: None, LIMITS, tls=context) for _ in range(2))
    host, port = await one.listen("127.0.0.1", 0, reuse_port=True)
    if reuse_port:
        assert await two.listen(host, port, reuse_port=True) == (host, port)
    else:
        with pytest.raises(OSError, match="ddress already in use"):
            await two.listen(host, port)
    await one.close()
    await two.close()
