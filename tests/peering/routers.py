"""Several routers in this process that share one store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from router.router_server import RouterServer
from tests.support.fakes import FakeEngine, running
from tests.support.waiting import until


def routers_of(app: RouterServer) -> int:
    """Routers that this one hears, itself included."""
    assert app.control.link is not None
    return app.control.link.link.routers


def whole(app: RouterServer) -> bool:
    """Whether it hears others."""
    assert app.control.link is not None
    return app.control.link.link.connected


@asynccontextmanager
async def several(count: int, url: str, *engines: FakeEngine, **settings: Any) -> AsyncIterator[list[RouterServer]]:
    """So many routers before these engines; all hear each other when the block begins."""
    async with AsyncExitStack() as stack:
        apps = [
            await stack.enter_async_context(running(*engines, peering__redis_url=url, **settings)) for _ in range(count)
        ]
        await until(lambda: all(routers_of(app) == count and whole(app) for app in apps))
        yield apps
