"""List and watch of one InferencePool, and of the pods that it selects.

The pool's object and its pods are two watches. If the pool's selector or ports change, its pods are listed again while
the existing view stays in use until that list is complete. A change therefore removes no replica without need. A
deleted pool has no replicas from that time on, because its deletion is intended. A pool that cannot be followed (no
selector, no ports) keeps its last good members, and the view counts as stale.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from random import Random

from router.engines.discovery.informer import Apis, Informer
from router.engines.discovery.pods import ParsedPod, PodMapping, PodReplica, PodView
from router.engines.discovery.pools import ParsedPool, PoolSelector, PoolView

log = logging.getLogger(__name__)


class _Membership:
    """The pods of one version of a pool's selector and ports, followed until `leave`."""

    def __init__(self, members: PoolSelector, follower: Informer[ParsedPod], view: PodView) -> None:
        self.members = members
        self.follower = follower
        self.view = view
        self._task = asyncio.create_task(follower.run())

    async def leave(self) -> None:
        """Close the watch."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class PoolInformer:
    """Follows a pool in `run`. `changed` is called after each change of its claims, and after the first try."""

    def __init__(
        self,
        apis: Apis,
        namespace: str,
        name: str,
        rule: PodMapping,
        *,
        resync_s: float,
        changed: Callable[[], None],
        random: Random,
    ) -> None:
        """Only scheme and loopback of `rule` are used; selector and ports are those of the pool."""
        self.label = f"InferencePool {namespace}/{name}"
        self._apis = apis
        self._namespace = namespace
        self._name = name
        self._rule = rule
        self._resync_s = resync_s
        self._changed = changed
        self._random = random
        self._wake = asyncio.Event()
        self._view = PoolView(name)
        self._pool = Informer(
            apis.pool(name),
            namespace,
            self._view,
            what="InferencePools",
            resync_s=resync_s,
            changed=self._wake.set,
            random=random,
        )
        self._now: _Membership | None = None  # the membership with the pods that the router uses
        self._next: _Membership | None = None  # the membership with pods that are being listed, to be used next
        self._past_errors = 0  # errors of memberships that were closed
        self._told: tuple[str, ...] | None = None  # last logged state of the pool
        self._faulty_since_s = 0.0

    # -- interface of KubernetesDiscovery ------------------------------------------------------------------------------

    @property
    def tried(self) -> bool:
        """True if everything was requested once, with or without an answer."""
        if not self._pool.tried or not self._pool.known:
            return self._pool.tried
        asked = self._next or self._now
        return asked is None or asked.follower.tried

    @property
    def known(self) -> bool:
        """True if there is a view. A pool that does not exist has an empty one."""
        return self._pool.known and (self._view.pool is None or (self._now is not None and self._now.follower.known))

    @property
    def why(self) -> str:
        """Reason why the view is stale; "" if it is fresh."""
        return "; ".join(dict.fromkeys(why for why, _ in self._stale()))

    @property
    def stale_since_s(self) -> float:
        """Start of the stale period, by the loop's clock. Only valid if `why` is not ""."""
        return min(since_s for _, since_s in self._stale())

    @property
    def errors(self) -> int:
        """Number of failures since the start."""
        return self._past_errors + self._pool.errors + sum(each.follower.errors for each in self._memberships())

    @property
    def pods(self) -> int:
        """Number of pods that the pool selects."""
        return len(self._now.view.objects) if self._now is not None else 0

    def claims(self) -> list[PodReplica]:
        """Return the claims of the pool's pods."""
        return self._now.view.claims() if self._now is not None else []

    def _memberships(self) -> list[_Membership]:
        return [each for each in (self._now, self._next) if each is not None]

    def _stale(self) -> list[tuple[str, float]]:
        """Return the reasons why the view is stale, each with its start."""
        found = [(self._pool.why, self._pool.stale_since_s)] if self._pool.why else []
        pool = self._view.pool
        if pool is not None and pool.trouble:
            found.append((pool.trouble, self._faulty_since_s))
        pods = self._next or self._now
        if pods is not None and pods.follower.why:
            found.append((pods.follower.why, pods.follower.stale_since_s))
        return found

    # -- following -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow until cancelled. Never raises."""
        following = asyncio.create_task(self._pool.run())
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                try:
                    await self._adjust()
                except Exception:  # a bug, after which the pool must still be followed
                    fields = {"source": "kubernetes", "pool": f"{self._namespace}/{self._name}"}
                    log.exception("bug: discovery failed", extra={"event": "bug", "fields": fields})
                self._changed()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            for each in self._memberships():
                await each.leave()

    async def _adjust(self) -> None:
        """Follow exactly the pods that the pool selects now."""
        if not self._pool.known:
            return
        pool = self._view.pool
        self._tell(pool)
        left = list[_Membership | None]()
        latest = self._next or self._now
        if pool is None:
            left = [self._now, self._next]
            self._now = self._next = None
        elif pool.members is not None and (latest is None or latest.members != pool.members):
            left, self._next = [self._next], None
            if self._now is None or self._now.members != pool.members:
                self._next = self._begin(pool.members)
        if self._next is not None and self._next.follower.known:
            left.append(self._now)
            self._now, self._next = self._next, None
        # The view is complete by now: it can be read while watches are closed.
        for each in filter(None, left):
            self._past_errors += each.follower.errors
            await each.leave()

    def _begin(self, members: PoolSelector) -> _Membership:
        view = PodView(replace(self._rule, port="", known_only=False, ports=members.ports))
        follower = Informer(
            self._apis.pods(members.selector),
            self._namespace,
            view,
            resync_s=self._resync_s,
            changed=self._wake.set,
            random=self._random,
        )
        return _Membership(members, follower, view)

    # -- logs ----------------------------------------------------------------------------------------------------------

    def _tell(self, pool: ParsedPool | None) -> None:
        """Log the state of the pool once, and again when it changes."""
        fields: dict[str, object] = {"source": "kubernetes", "pool": f"{self._namespace}/{self._name}"}
        if pool is None:
            said: tuple[str, ...] = ("missing",)
        elif pool.trouble or pool.members is None:
            said = ("unusable", pool.trouble)
        else:
            ports = ",".join(map(str, pool.members.ports))
            said = ("followed", pool.members.selector, ports, pool.picker, pool.failure_mode)
        if said == self._told:
            return
        self._told = said
        if pool is None:
            log.warning(
                "the InferencePool does not exist, so it selects no replicas",
                extra={"event": "pool_missing", "fields": fields},
            )
        elif said[0] == "unusable":
            self._faulty_since_s = asyncio.get_running_loop().time()
            log.warning(
                "InferencePool is not usable",
                extra={"event": "pool_unusable", "fields": fields | {"why": pool.trouble}},
            )
        else:
            _, selector, ports, picker, failure_mode = said
            fields |= {"selector": selector, "ports": ports, "picker": picker, "failure_mode": failure_mode}
            log.info("InferencePool is usable", extra={"event": "pool_followed", "fields": fields})
