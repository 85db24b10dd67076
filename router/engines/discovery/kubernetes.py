"""Replicas from pods of a Kubernetes cluster, found through the API server.

Pods are found by label selector, by the labels of known serving stacks without one, or as members of InferencePools.
This needs the extra `kubernetes`, and a Role that may list and watch pods in each namespace and the named pools. No
other permission is needed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from random import Random
from typing import Protocol

import yaml

from router.core.types.replicas import Replica
from router.engines.discovery import Status
from router.engines.discovery.api_client import ApiClient
from router.engines.discovery.informer import Apis, Informer
from router.engines.discovery.pods import PodMapping, PodReplica, PodView, replicas_of
from router.engines.discovery.pool_informer import PoolInformer

log = logging.getLogger(__name__)

OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class KubernetesConfig(Protocol):
    """The required settings `discovery.*`."""

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Namespaces of the pods; empty for the router's own."""

    @property
    def selector(self) -> str:
        """Label selector of the pods; empty for those of known stacks."""

    @property
    def pools(self) -> tuple[str, ...]:
        """InferencePools that select the pods, `name` or `namespace/name`; empty if the selector is used instead."""

    @property
    def port(self) -> str:
        """Number or name of the engine's port."""

    @property
    def scheme(self) -> str:
        """Scheme of replicas' URLs."""

    @property
    def kubeconfig(self) -> str:
        """Path of a kubeconfig; empty for the service account."""

    @property
    def loopback(self) -> bool:
        """True if a replica may be on this machine."""

    @property
    def resync_s(self) -> float:
        """Seconds between two lists."""

    @property
    def replicas_max(self) -> int:
        """Maximum number of replicas, over all namespaces."""


class PodSource(Protocol):
    """Source of claims: the pods of a namespace, or a pool."""

    label: str  # name in messages

    @property
    def tried(self) -> bool:
        """True if it was queried at least once."""

    @property
    def known(self) -> bool:
        """True if there is a view."""

    @property
    def why(self) -> str:
        """Reason why the view is stale; "" if it is fresh."""

    @property
    def stale_since_s(self) -> float:
        """Start of the stale period, by the loop's clock."""

    @property
    def errors(self) -> int:
        """Number of failures since the start."""

    @property
    def pods(self) -> int:
        """Number of pods in the view."""

    def claims(self) -> list[PodReplica]:
        """Return the claims of the pods in the view."""

    async def run(self) -> None:
        """Follow the source until cancelled. Never raises."""


class _Namespace:
    """The pods of a namespace that the selector finds."""

    def __init__(
        self,
        apis: Apis,
        namespace: str,
        selector: str,
        rule: PodMapping,
        *,
        resync_s: float,
        changed: Callable[[], None],
        random: Random,
    ) -> None:
        self.label = f"namespace {namespace}"
        self._view = PodView(rule)
        self._follower = Informer(
            apis.pods(selector), namespace, self._view, resync_s=resync_s, changed=changed, random=random
        )
        self.run = self._follower.run
        self.claims = self._view.claims

    @property
    def tried(self) -> bool:
        return self._follower.tried

    @property
    def known(self) -> bool:
        return self._follower.known

    @property
    def why(self) -> str:
        return self._follower.why

    @property
    def stale_since_s(self) -> float:
        return self._follower.stale_since_s

    @property
    def errors(self) -> int:
        return self._follower.errors

    @property
    def pods(self) -> int:
        return len(self._view.objects)


class KubernetesDiscovery:
    """Discovery of the pods of all namespaces, or of all pools.

    A namespace or a pool that cannot be read does not delay the others. The first set is yielded after each was tried
    and one was read. After that, the last good view of a failed one stays in use.
    """

    source = "kubernetes"

    def __init__(
        self, settings: KubernetesConfig, apis: Apis | None = None, random: Random | None = None, *, split: bool = False
    ) -> None:
        """`split`: pods have roles, which their labels name. Raises ValueError, with a readable message, if the extra
        is missing or the settings are incomplete."""
        self._settings = settings
        self._selector = settings.selector.strip()
        self._rule = PodMapping(settings.scheme, settings.port, not self._selector, settings.loopback, split=split)
        self._api = apis or ApiClient(settings.kubeconfig)
        self._namespaces = tuple(dict.fromkeys(settings.namespaces))
        self._pools = tuple(dict.fromkeys(settings.pools))
        if not self._namespaces and not (self._pools and all("/" in pool for pool in self._pools)):
            self._namespaces = (find_namespace(settings.kubeconfig),)
        self._random = random or Random()  # noqa: S311 - spreads retries
        self._sources: Sequence[PodSource] = ()
        self._given: frozenset[Replica] | None = None
        self._left_out = 0

    def status(self) -> Status:
        """Return the current state of the view."""
        replicas = sum(replica.ready for replica in self._given or ())
        if not self._sources:
            return Status(fresh=False, why="discovery has not started", replicas=replicas)
        stale = [(source.label, why, source.stale_since_s) for source in self._sources if (why := source.why)]
        errors = sum(source.errors for source in self._sources)
        if not stale:
            return Status(fresh=True, errors=errors, replicas=replicas)
        return Status(
            fresh=False,
            why="; ".join(f"{label}: {why}" for label, why, _ in stale),
            stale_s=asyncio.get_running_loop().time() - min(since_s for *_, since_s in stale),
            errors=errors,
            replicas=replicas,
        )

    async def watch(self) -> AsyncIterator[frozenset[Replica]]:
        """Yield the complete set now, and again whenever it changes. Call it once."""
        changed = asyncio.Event()
        self._sources = self._begin(changed.set)
        tasks = [asyncio.create_task(source.run()) for source in self._sources]
        try:
            while True:
                await changed.wait()
                changed.clear()
                if not all(source.tried for source in self._sources):
                    continue
                if not any(source.known for source in self._sources):
                    continue
                replicas = self._replicas()
                if replicas != self._given:
                    self._given = replicas
                    if not replicas:
                        self._found_nothing()
                    yield replicas
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._api.close()

    def _begin(self, changed: Callable[[], None]) -> Sequence[PodSource]:
        resync_s, random = self._settings.resync_s, self._random
        if not self._pools:
            return [
                _Namespace(
                    self._api, namespace, self._selector, self._rule, resync_s=resync_s, changed=changed, random=random
                )
                for namespace in self._namespaces
            ]
        named = [pool.rpartition("/") for pool in self._pools]
        return [
            PoolInformer(
                self._api,
                namespace or self._namespaces[0],
                name,
                self._rule,
                resync_s=resync_s,
                changed=changed,
                random=random,
            )
            for namespace, _, name in named
        ]

    def _found_nothing(self) -> None:
        """Log that no pod is a replica. This is not a failure, so no other line would report it."""
        sought = {
            "selector": self._selector or "none: pods of known engine deployments",
            "namespaces": ",".join(self._namespaces),
        }
        if self._pools:
            sought = {"pools": ",".join(self._pools)}
        fields = {"source": self.source, **sought, "pods": sum(source.pods for source in self._sources)}
        log.warning("discovery finds no replica", extra={"event": "discovery_empty", "fields": fields})

    def _replicas(self) -> frozenset[Replica]:
        claims = [claim for source in self._sources for claim in source.claims()]
        given = {replica.id: replica.instance for replica in self._given or ()}
        replicas, left_out = replicas_of(claims, given, self._settings.replicas_max)
        if left_out and not self._left_out:
            fields = {"source": self.source, "replicas_max": self._settings.replicas_max, "left_out": left_out}
            log.warning(
                "more replicas are found than discovery.replicas_max",
                extra={"event": "replicas_over_max", "fields": fields},
            )
        self._left_out = left_out
        return replicas


def find_namespace(kubeconfig: str) -> str:
    """Return the pod's own namespace, or that of the kubeconfig's current context. Raises ValueError if neither is
    known."""
    if kubeconfig:
        try:
            config = yaml.safe_load(Path(kubeconfig).read_text(encoding="utf-8"))
            contexts = {each["name"]: each["context"] for each in config["contexts"]}
            return str(contexts[config["current-context"]].get("namespace") or "default")
        except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"discovery.kubeconfig: {kubeconfig} has no current context: {error!r}") from error
    try:
        return OWN_NAMESPACE.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(
            "discovery.namespaces: is required outside of a pod (together with discovery.kubeconfig), "
            "and in a pod without a mounted service account token"
        ) from error
