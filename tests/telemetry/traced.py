"""A router that sends spans to a collector of the tests, and what is asked of it."""

from __future__ import annotations

from typing import Any

from aiohttp import ClientSession

from tests.telemetry.collector import Collector, Got

CHAT = "/v1/chat/completions"


def traced(collector: Collector, ratio: float = 1.0, **more: Any) -> dict[str, Any]:
    """Settings."""
    return {"tracing__endpoint": collector.url, "tracing__sample_ratio": ratio, **more}


def body(**more: Any) -> dict[str, Any]:
    """A chat request."""
    return {"model": "m", "messages": [{"role": "user", "content": "a word " * 50}], **more}


async def ask(client: ClientSession, url: str, headers: Any = None, **more: Any) -> tuple[int, bytes]:
    """Status and body of the answer."""
    async with client.post(url + CHAT, json=body(**more), headers=headers) as response:
        return response.status, await response.read()


def check_nested(spans: list[Got]) -> Got:
    """Every span lies within its parent in time, all but the first have one among them; returns the first."""
    by_id = {got.id: got for got in spans}
    assert len(by_id) == len(spans)
    roots = [got for got in spans if got.parent not in by_id]
    assert len(roots) == 1, [got.name for got in roots]
    for got in spans:
        assert got.span.start_time_unix_nano <= got.span.end_time_unix_nano, got.name
        if got.parent in by_id:
            outer = by_id[got.parent].span
            assert outer.start_time_unix_nano <= got.span.start_time_unix_nano, got.name
            assert got.span.end_time_unix_nano <= outer.end_time_unix_nano, got.name
        for event in got.span.events:
            assert got.span.start_time_unix_nano <= event.time_unix_nano <= got.span.end_time_unix_nano
    return roots[0]
