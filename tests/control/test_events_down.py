"""Event streams that have no connection, in a whole router."""

from __future__ import annotations

import logging

import pytest

from router.control.replica_lifecycle import EVENTS_DOWN_S
from router.router_server import RouterServer
from tests.support.fakes import FakeEngine, running
from tests.support.waiting import until


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    """Fields of the warnings so far."""
    return [record.fields for record in caplog.records if getattr(record, "event", "") == "events_down"]  # type: ignore[attr-defined]


async def down_for(app: RouterServer, seconds: float) -> None:
    """As the router looks once a second, at a time when the stream has been down for so long."""
    (follower,) = app.control.events._followers.values()  # type: ignore[union-attr]
    await until(lambda: follower.down_since_s is not None)
    assert follower.down_since_s is not None
    app.control.lifecycle.look_for_lost_events(follower.down_since_s + seconds)


async def test_a_stream_that_is_down_beside_a_ready_replica_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """After a minute, and not while the replica is down itself."""
    source = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:1", "topic": ""}
    async with FakeEngine(kv_event_sources={"0": source}) as engine, running(engine) as app:
        with caplog.at_level(logging.WARNING):
            await down_for(app, EVENTS_DOWN_S - 1)
            assert not lines(caplog)
            app.control.router.fleet.observe_health(engine.url, False, "connection refused", proof=True)
            await down_for(app, EVENTS_DOWN_S)
            assert not lines(caplog)
            await app.control.probe_now()
            for _ in range(3):
                await down_for(app, EVENTS_DOWN_S + 1)
        (found,) = lines(caplog)
        assert found == {"replica": engine.url, "why": "not connected to tcp://127.0.0.1:1 yet", "for_s": 61}
