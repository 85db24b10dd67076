"""The name of a store: asked for once at a time, and never for longer than a session may take to open."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest

from router.peering import name_lookup
from router.peering.clients import TlsFiles
from router.peering.redis_store import open_session
from router.peering.session import StoreFailed
from router.peering.store_url import parse_address


async def test_a_resolver_that_is_silent_holds_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a session is opened while the resolver is silent, one thread waits for it; each attempt fails in
    time, and the first one after its answer finds the name."""
    answered, asked = threading.Event(), list[str]()

    def silent(host: str, *_: Any, **__: Any) -> list[Any]:
        asked.append(host)
        answered.wait(60)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    for _ in range(5):
        with pytest.raises(StoreFailed, match="not resolved in time"):
            async with open_session(parse_address("redis://store.example"), "f", 0.01, TlsFiles()):
                pass
    assert asked == ["store.example"]
    waiting = asyncio.create_task(name_lookup.resolve_host("store.example", 60))
    answered.set()
    await waiting
    assert not name_lookup._open


async def test_a_name_that_is_none_is_told() -> None:
    """With the name, and as a store that cannot be reached; addresses are not asked for."""
    with pytest.raises(StoreFailed, match=r"no\.such\.host\.invalid does not resolve") as failed:
        async with open_session(parse_address("redis+sentinel://no.such.host.invalid/m"), "f", 20, TlsFiles()):
            pass
    assert failed.value.kind == "unreachable"
    await name_lookup.resolve_host("127.0.0.1", 0)
    await name_lookup.resolve_host("::1", 0)
