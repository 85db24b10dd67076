"""How often is asked what an API server says no to, in simulated time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from random import Random

import looptime
import pytest

from router.config.schema import DiscoverySettings
from router.engines.discovery import informer
from router.engines.discovery.kubernetes import KubernetesDiscovery
from tests.engines.discovery.cluster import SELECTOR, MemoryApi
from tests.support.podstore import PodStore, pod

HOUR_S = 3600.0


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop with a time of its own."""
    made = looptime.new_event_loop()
    yield made
    made.close()


@pytest.mark.long
@pytest.mark.parametrize(("mode", "least", "most"), [("403", 1800, 2200), ("401", 1800, 2200), ("5xx", 7000, 16000)])
def test_a_refusal_is_not_asked_again_at_once(
    mode: str, least: int, most: int, loop: asyncio.AbstractEventLoop, caplog: pytest.LogCaptureFixture
) -> None:
    """What only people can change (a missing Role, a token) is asked for every two seconds, each try being an event of
    the API server's audit log; a server that fails is asked sooner. The log says every ten minutes that it goes on, and
    two seconds after the right is granted the view is right."""

    async def outage() -> None:
        api = MemoryApi(PodStore(), Random(1), mode=mode)
        api.store.create(pod("a", namespace="one"))
        discovery = KubernetesDiscovery(DiscoverySettings("kubernetes", ("one",), SELECTOR), api, Random(1))
        sets = discovery.watch()
        first = asyncio.ensure_future(anext(sets))
        await asyncio.sleep(HOUR_S)
        assert least <= api.asked <= most
        told = [record for record in caplog.records if record.message == "discovery is stale"]
        assert len(told) == HOUR_S // informer.STILL_S
        assert not first.done()
        api.recover()
        await asyncio.sleep(2.0)
        assert {replica.name for replica in first.result()} == {"one/a"}
        await sets.aclose()  # type: ignore[attr-defined]  # an iterator by its type, a generator in fact

    loop.run_until_complete(outage())


@pytest.mark.parametrize("mode", ["429", "5xx", "refused", "403"])
def test_a_watch_is_kept_while_no_other_can_be_had(mode: str, loop: asyncio.AbstractEventLoop) -> None:
    """An API server that turns away every new read goes on telling those whom it already tells: for as long as it does
    the view is right, though it counts as stale; afterwards it is fresh, and its watches are as few as before."""

    async def throttled() -> None:
        api = MemoryApi(PodStore(), Random(1))
        api.store.create(pod("a", namespace="one"))
        discovery = KubernetesDiscovery(DiscoverySettings("kubernetes", ("one",), SELECTOR), api, Random(1))
        views = list[set[str]]()

        async def follow() -> None:
            async for replicas in discovery.watch():
                views.append({replica.name for replica in replicas if replica.ready})

        following = asyncio.create_task(follow())
        await asyncio.sleep(1.0)
        api.mode = mode
        await asyncio.sleep(60.0)
        for number in range(1, 6):
            api.store.create(pod(f"b{number}", namespace="one", ip=f"10.0.1.{number}"))
            api.poke()
            await asyncio.sleep(1.0)
            assert f"one/b{number}" in views[-1]
        api.store.terminate("a", "one")
        api.poke()
        await asyncio.sleep(1.0)
        assert "one/a" not in views[-1]
        assert not discovery.status().fresh
        api.recover()
        await asyncio.sleep(2.0)
        assert discovery.status().fresh
        assert len(api.watches) == 1
        assert views[-1] == {f"one/b{number}" for number in range(1, 6)}
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        assert not api.watches

    loop.run_until_complete(throttled())
