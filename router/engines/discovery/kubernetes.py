"""Replicas are pods, found through the API server with the official client (`kubernetes.aio`): by label selector, or by
the labels of known serving stacks where there is none.

This needs the extra `kubernetes`, and a Role that may list and watch pods in each namespace, nothing else. Of the
client only its configuration (service account, kubeconfig) and its HTTP are used, not its models, which make objects
of everything in a pod, at milliseconds each. Importing the client costs some 20 MB and 0.2 s, so it is imported only
where it is needed.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Protocol
from urllib.parse import quote, urlencode

import aiohttp
import msgspec
import yaml

from router.core.facts.replicas import Replica
from router.engines import fetch
from router.engines.discovery import Status
from router.engines.discovery.pod_watch import Api, Gone, PodFollower, WatchFailed
from router.engines.discovery.pods import Rule, replicas_of

log = logging.getLogger(__name__)

OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
CONNECT_S = 2.0  # a lost SYN is sent again after one second
EVENT_BYTES_MAX = 4 << 20  # largest event, which has a pod; etcd takes 1.5 MB
PAGE_BYTES_MAX = 64 << 20  # largest page, which has 50 pods
STATUS_BYTES_MAX = 16 << 10  # read of an answer that is an error


class Sought(Protocol):
    """The settings `discovery.*` that this needs."""

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Namespaces of the pods; empty for the router's own."""

    @property
    def selector(self) -> str:
        """Label selector of the pods; empty for those of known stacks."""

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
        """Whether a replica may be on this machine."""

    @property
    def resync_s(self) -> float:
        """Seconds between two lists."""

    @property
    def replicas_max(self) -> int:
        """Most replicas, over all namespaces."""


class KubernetesDiscovery:
    """Pods of all namespaces. A namespace that cannot be read does not hold up the others: the first set is yielded
    once each was tried and one was read; later the last good view of such a namespace stays in use."""

    source = "kubernetes"

    def __init__(self, settings: Sought, api: Api | None = None, random: Random | None = None) -> None:
        """Raises ValueError, with a message for people, if the extra is missing or the settings say too little."""
        self._settings = settings
        self._selector = settings.selector.strip()
        self._rule = Rule(settings.scheme, settings.port, not self._selector, settings.loopback)
        self._api = api or Client(self._selector, settings.kubeconfig)
        self._namespaces = tuple(dict.fromkeys(settings.namespaces)) or (own_namespace(settings.kubeconfig),)
        self._random = random or Random()  # noqa: S311 - spreads retries
        self._followers: Sequence[PodFollower] = ()
        self._given: frozenset[Replica] | None = None
        self._left_out = 0

    def status(self) -> Status:
        """The view's state now."""
        replicas = sum(replica.ready for replica in self._given or ())
        if not self._followers:
            return Status(fresh=False, why="discovery has not begun", replicas=replicas)
        followers = dict(zip(self._namespaces, self._followers, strict=True))
        stale = {namespace: follower for namespace, follower in followers.items() if follower.why}
        errors = sum(follower.errors for follower in self._followers)
        if not stale:
            return Status(fresh=True, errors=errors, replicas=replicas)
        since_s = min(follower.stale_since_s for follower in stale.values())
        why = "; ".join(f"namespace {namespace}: {follower.why}" for namespace, follower in stale.items())
        return Status(
            fresh=False,
            why=why,
            stale_s=asyncio.get_running_loop().time() - since_s,
            errors=errors,
            replicas=replicas,
        )

    async def watch(self) -> AsyncIterator[frozenset[Replica]]:
        """Yield the complete set now, and again whenever it changes. Call it once."""
        changed = asyncio.Event()
        self._followers = [
            PodFollower(
                self._api,
                namespace,
                self._rule,
                resync_s=self._settings.resync_s,
                changed=changed.set,
                random=self._random,
            )
            for namespace in self._namespaces
        ]
        tasks = [asyncio.create_task(follower.run()) for follower in self._followers]
        try:
            while True:
                await changed.wait()
                changed.clear()
                if not all(follower.tried for follower in self._followers):
                    continue
                if not any(follower.known for follower in self._followers):
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

    def _found_nothing(self) -> None:
        """Log that no pod is a replica: that is no failure, and nothing else would say so."""
        fields = {
            "source": self.source,
            "selector": self._selector or "none, so pods of known stacks",
            "namespaces": ",".join(self._namespaces),
            "pods": sum(len(follower.view.pods) for follower in self._followers),
        }
        log.warning("discovery finds no replica", extra={"event": "discovery_empty", "fields": fields})

    def _replicas(self) -> frozenset[Replica]:
        claims = [claim for follower in self._followers for claim in follower.view.claims()]
        given = {replica.id: replica.instance for replica in self._given or ()}
        replicas, left_out = replicas_of(claims, given, self._settings.replicas_max)
        if left_out and not self._left_out:
            fields = {"source": self.source, "replicas_max": self._settings.replicas_max, "left_out": left_out}
            log.warning(
                "there are more replicas than discovery.replicas_max",
                extra={"event": "replicas_over_max", "fields": fields},
            )
        self._left_out = left_out
        return replicas


def own_namespace(kubeconfig: str) -> str:
    """The pod's own namespace, or that of the kubeconfig's current context. Raises ValueError if neither is known."""
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
            "discovery.namespaces: is needed outside of a pod (and so is discovery.kubeconfig), or where its service "
            "account's token is not mounted"
        ) from error


class _Refusal(msgspec.Struct):
    message: str = ""


class _Configuration(Protocol):
    host: str

    async def auth_settings(self) -> dict[str, dict[str, str]]:
        """Credentials for a request, refreshed first if that is due."""


class _Answer(Protocol):
    response: aiohttp.ClientResponse


class _Rest(Protocol):
    """The part of the client's RESTClientObject that is used."""

    configuration: _Configuration

    async def request(
        self, method: str, url: str, headers: dict[str, str], *, _request_timeout: aiohttp.ClientTimeout
    ) -> _Answer:
        """Send one request, without retries."""

    async def close(self) -> None:
        """Close all connections."""


class Client:
    """The official client, for `list` and `watch` of pods by one selector. When the API server refuses the token, or
    its certificate does not verify, the configuration is read anew: tokens of service accounts change while the router
    runs, and so may a kubeconfig's, and the cluster's authority."""

    def __init__(self, selector: str, kubeconfig: str) -> None:
        """Raises ValueError if the extra is missing."""
        try:
            import kubernetes.aio.client  # noqa: F401 - that it is there is found out at the start
        except ImportError as error:
            raise ValueError("discovery.source: kubernetes needs an extra: pip install '.[kubernetes]'") from error
        self._selector = selector
        self._kubeconfig = kubeconfig
        self._rest: _Rest | None = None
        self._connecting = asyncio.Lock()

    async def list(self, namespace: str, limit: int, token: str) -> bytes:
        """One page of a list of pods."""
        query = {"limit": str(limit)} | ({"continue": token} if token else {})
        async with self._asked("list", namespace, query) as response:
            page = await fetch.read(response, PAGE_BYTES_MAX)
        if len(page) > PAGE_BYTES_MAX:
            raise WatchFailed(f"a list of {limit} pods is longer than {PAGE_BYTES_MAX >> 20} MiB")
        return page

    @asynccontextmanager
    async def watch(self, namespace: str, version: str, seconds: int) -> AsyncIterator[AsyncIterator[bytes]]:
        """Events of pods behind a version."""
        query = {
            "watch": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(seconds),
            "allowWatchBookmarks": "true",
        }
        async with self._asked("watch", namespace, query) as response:
            yield _lines(response)

    async def close(self) -> None:
        """Close all connections."""
        rest, self._rest = self._rest, None
        if rest is not None:
            await rest.close()

    @asynccontextmanager
    async def _asked(self, verb: str, namespace: str, query: dict[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer with status 200. Raises Gone and WatchFailed for anything else."""
        try:
            response = await self._get(namespace, query)
            try:
                if response.status != 200:
                    await self._refused(verb, namespace, response)
                yield response
            finally:
                response.close() if verb == "watch" else response.release()
        except (aiohttp.ClientSSLError, ssl.SSLError) as error:
            await self.close()
            raise WatchFailed(f"no trust in the API server: {error}; certificates are read anew") from error
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            raise WatchFailed(f"no answer from the API server: {fetch.words(error)}: {error}") from error

    async def _get(self, namespace: str, query: dict[str, str]) -> aiohttp.ClientResponse:
        rest = await self._connected()
        try:
            auth = (await rest.configuration.auth_settings()).get("BearerToken", {})
        except Exception as error:  # any kind of error, as in _connected
            raise WatchFailed(f"cannot tell who we are: {type(error).__name__}: {error}") from error
        # Compression is not asked for: unpacking a list would hold up the event loop.
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if auth.get("value"):
            headers["Authorization"] = auth["value"].strip()
        query = ({"labelSelector": self._selector} if self._selector else {}) | query
        url = f"{rest.configuration.host}/api/v1/namespaces/{quote(namespace, safe='')}/pods?{urlencode(query)}"
        try:
            answer = await rest.request(
                "GET", url, headers=headers, _request_timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_S)
            )
        except RuntimeError as error:
            raise WatchFailed("who we are is read anew for another namespace") from error
        return answer.response

    async def _connected(self) -> _Rest:
        async with self._connecting:
            if self._rest is None:
                try:
                    self._rest = await self._connect()
                # any kind of error: from files, YAML, certificates, programs that print tokens
                except Exception as error:
                    hint = "" if self._kubeconfig else " Outside of a pod set discovery.kubeconfig."
                    raise WatchFailed(f"cannot tell who we are: {type(error).__name__}: {error}{hint}") from error
            return self._rest

    async def _connect(self) -> _Rest:
        from kubernetes.aio import config
        from kubernetes.aio.client import Configuration
        from kubernetes.aio.client.rest import RESTClientObject

        configuration = Configuration()
        if self._kubeconfig:
            await config.load_kube_config(
                config_file=self._kubeconfig, client_configuration=configuration, persist_config=False
            )
        else:
            await asyncio.to_thread(config.load_incluster_config, configuration)
            # Authorities of clusters that are older or made by hand give out certificates without an Authority Key
            # Identifier, which Python refuses from 3.13 on; the one authority in the pod's file is still checked.
            configuration.disable_strict_ssl_verification = True
        # the constructor reads certificates from files
        rest: _Rest = await asyncio.to_thread(RESTClientObject, configuration)
        return rest

    async def _refused(self, verb: str, namespace: str, response: aiohttp.ClientResponse) -> None:
        """Raise the error that a status means."""
        if response.status == 410:
            raise Gone
        if response.status == 401:
            await self.close()
            raise WatchFailed("401: the API server does not take our token; it is read anew", refused=True)
        said = await fetch.read(response, STATUS_BYTES_MAX)
        try:
            message = msgspec.json.decode(said, type=_Refusal).message[:300]
        except (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError):
            message = ""
        if response.status == 403:
            raise WatchFailed(
                f"403: we may not {verb} pods in namespace {namespace}, a Role with the verbs list and watch on pods "
                f"is needed there: {message}",
                refused=True,
            )
        if response.status == 400:
            raise WatchFailed(
                f"400: the API server does not take discovery.selector {self._selector!r}: {message}", refused=True
            )
        retry_after = response.headers.get("Retry-After", "")
        retry_after_s = float(retry_after) if retry_after.isascii() and retry_after.isdigit() else 0.0
        refused = 400 <= response.status < 500 and response.status not in (408, 429)
        raise WatchFailed(f"{response.status} from the API server: {message}", retry_after_s, refused=refused)


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    rest = b""
    try:
        async for piece in response.content.iter_any():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.strip():
                    yield line
            if len(rest) > EVENT_BYTES_MAX:
                raise WatchFailed(f"an event is longer than {EVENT_BYTES_MAX >> 20} MiB")
    except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
        raise WatchFailed(f"no answer from the API server: {type(error).__name__}: {error}") from error
    if rest.strip():
        raise WatchFailed("a watch ended within an event")
