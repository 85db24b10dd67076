"""Random histories of pods and faults: after recovery the view is the truth, and until then the last good one.

WARMROUTE_DISCOVERY_RUNS says how many (96 in the suite, 10,000 in CI); each is some forty steps of simulated time,
told by its seed. What recovery means stands in cluster.py.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from random import Random

import looptime
import pytest

from router.config.schema import DiscoverySettings
from router.engines.discovery import informer
from router.engines.discovery.kubernetes import KubernetesDiscovery
from tests.engines.discovery.cluster import NAMESPACES, SELECTOR, WATCH_MAX_S, MemoryApi, Pods

pytestmark = pytest.mark.promise(
    "Two seconds after an outage the view is current; until then the last good one is used.", "discovery"
)

RUNS = int(os.environ.get("WARMROUTE_DISCOVERY_RUNS", "96"))
SHARES = 8  # that run side by side
RECOVERED_S = 2.0
RESYNC_S = 60.0
OUTAGES = ["refused", "blackhole", "5xx", "429", "401", "403", "stalled"]


class History(Pods):
    """`await History(seed).run()`."""

    def __init__(self, seed: int) -> None:
        super().__init__(Random(seed))
        self.api = MemoryApi(self.store, self.random)
        settings = DiscoverySettings("kubernetes", NAMESPACES, SELECTOR, resync_s=RESYNC_S)
        self.discovery = KubernetesDiscovery(settings, self.api, Random(seed))
        self.views: list[set[tuple[str, str, str]]] = []
        self.calm = True  # nothing is wrong that could hold up an event
        self.hanging = False  # nor a request
        self.tally: Counter[str] = Counter()

    async def run(self) -> None:
        """All of it. Raises AssertionError."""
        for _ in range(self.random.randrange(6)):
            self.create()
        following_task = asyncio.create_task(self._follow())
        try:
            for _ in range(self.random.randrange(1, 4)):
                for _ in range(self.random.randrange(1, 15)):
                    await self.step()
                await self.recover()
        finally:
            following_task.cancel()
            await asyncio.gather(following_task, return_exceptions=True)

    async def _follow(self) -> None:
        async for replicas in self.discovery.watch():
            self.views.append({(replica.id, replica.name, replica.instance) for replica in replicas if replica.ready})

    async def recover(self) -> None:
        """Two seconds later the view is the truth."""
        heal_s = self.api.recover()
        if heal_s and (informer.PAGE_PODS <= 2 or self.api.dear):
            heal_s += RESYNC_S + WATCH_MAX_S  # lists are not cheap: what was lost is found at the next one that is due
        self.tally["dead or deaf"] += bool(heal_s)
        await asyncio.sleep(heal_s + RECOVERED_S)
        self.check("after recovery")
        status = self.discovery.status()
        assert status.fresh, status
        assert status.replicas == len(self.views[-1])
        self.calm, self.hanging = True, False

    def check(self, when: str) -> None:
        """Whether the view is the truth."""
        assert self.views, f"nothing was yielded {when}"
        assert self.views[-1] == self.truth(), when
        self.tally["checks"] += 1

    async def step(self) -> None:
        """Something happens, and then some time passes."""
        happens = self.random.choices([self.change, self.fault, self.outage], [10, 3, 1])[0]
        self.tally[happens.__name__] += 1
        if happens == self.outage:
            await self.outage()
        else:
            happens()
        self.api.poke()
        pause_s = self.random.choice([0.0, 0.0, 0.01, 0.3, 3.0, 25.0])
        await asyncio.sleep(pause_s)
        if self.calm and pause_s >= 0.3 and self.views:
            self.check("in calm")

    # -- faults ----------------------------------------------------------------------------------------------------

    def fault(self) -> None:
        """Of watches and lists. Those that end, break, tell twice or find their version compacted hold up nothing."""
        match self.random.randrange(10):
            case 0:
                for watch in self.api.watches:
                    watch.end = True
            case 1:
                for watch in self.api.watches:
                    watch.broken = True
            case 2:
                self.store.compact()
            case 3 | 4:
                self.api.repeating = 0.7
                self.busy(6)
            case 5:
                self.store.compact()
                for watch in self.api.watches:
                    watch.end = True
            case 6:
                self.calm, self.api.slow_s = False, self.random.choice([0.2, 1.0, 5.0, 12.0])
            case 7 | 8:
                self.calm = False
                for watch in self.api.watches:
                    watch.dropping = True
                self.busy(3)
            case 9:
                self.calm = False
                for watch in self.api.watches:
                    watch.stalled = True
                self.busy(3)

    def busy(self, changes_max: int) -> None:
        """Pods change, one right after the other."""
        for _ in range(self.random.randrange(changes_max + 1)):
            self.change()

    async def outage(self) -> None:
        """Nothing can be asked, and no watch is left: nothing is yielded, whatever happens to pods, and after a while
        that is said."""
        self.calm, self.api.mode = False, self.random.choice(OUTAGES)
        for watch in self.api.watches:
            watch.broken = True
        self.api.poke()
        await asyncio.sleep(0.05)  # answers that are on their way
        if self.api.slow_s:
            await asyncio.sleep(13.0)
        given = len(self.views)  # 0: one namespace was read, and the other one is given up only now
        self.busy(3)
        self.hanging |= self.api.mode == "stalled"
        long_s = 12.0 if self.hanging else 3.0  # until even a list that hangs is given up
        away_s = 600.0 if self.random.random() < 0.02 else self.random.choice([0.5, long_s])
        await asyncio.sleep(away_s)
        assert len(self.views) == given or not given, "the view has changed while nobody could know"
        status = self.discovery.status()
        if away_s >= long_s:
            assert not status.fresh
            assert status.stale_s > 0
            assert status.errors


def history(seed: int, kind: type[History] = History) -> Counter[str]:
    """One, in a loop and a time of its own."""
    pages = informer.PAGE_PODS
    informer.PAGE_PODS = 50 if seed % 2 else 2  # one page, and the long way
    loop = looptime.new_event_loop()
    try:
        run = kind(seed)
        loop.run_until_complete(run.run())
    except AssertionError as error:
        raise AssertionError(f"history {seed}: {error}") from error
    finally:
        informer.PAGE_PODS = pages
        loop.close()
    return run.tally


@pytest.mark.parametrize("share", range(SHARES))
def test_view_is_truth_after_recovery(share: int) -> None:
    """Goal 17: whatever happened, two seconds after recovery the view is what there is; while the API server is away
    it stays as it was, and is known to be stale."""
    tally: Counter[str] = Counter()
    for seed in range(share, RUNS, SHARES):
        tally += history(seed)
    print(f"\n{share}: {dict(tally)}")
    assert tally["checks"] > RUNS / SHARES
