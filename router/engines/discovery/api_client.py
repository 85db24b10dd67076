"""Client of an API server, based on the official client (`kubernetes.aio`): lists and watches pods and InferencePools.

Only the official client's configuration (service account, kubeconfig) and HTTP layer are used. Its models are not used,
because they convert every field of a pod to objects and take milliseconds for each pod. An import of the client costs
about 20 MB and 0.2 s, so it is imported only when needed.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import quote, urlencode

import aiohttp
import msgspec

from router.engines import http_client
from router.engines.discovery.informer import Api, Gone, WatchFailed

CONNECT_S = 2.0  # a lost SYN is sent again after one second
EVENT_BYTES_MAX = 4 << 20  # maximum size of an event with one pod; etcd accepts 1.5 MB
PAGE_BYTES_MAX = 64 << 20  # maximum size of a page with 50 pods
STATUS_BYTES_MAX = 16 << 10  # maximum read from an error response
POOL_API = "inference.networking.k8s.io/v1"  # group and version of InferencePools


class _Refusal(msgspec.Struct):
    message: str = ""


class _Configuration(Protocol):
    host: str

    async def auth_settings(self) -> dict[str, dict[str, str]]:
        """Return credentials for a request, refreshed first if that is due."""


class _Answer(Protocol):
    response: aiohttp.ClientResponse


class _Rest(Protocol):
    """Part of the client's RESTClientObject that is used."""

    configuration: _Configuration

    async def request(
        self, method: str, url: str, headers: dict[str, str], *, _request_timeout: aiohttp.ClientTimeout
    ) -> _Answer:
        """Send one request, without retries."""

    async def close(self) -> None:
        """Close all connections."""


class ApiClient:
    """The official client, for `list` and `watch`.

    The configuration is read again when the API server refuses the token or its certificate does not verify. Tokens of
    service accounts change while the router runs; a kubeconfig's token and the cluster's authority can change too.
    """

    def __init__(self, kubeconfig: str) -> None:
        """Raises ValueError if the extra is missing."""
        try:
            import kubernetes.aio.client  # noqa: F401 - checks at the start that the package is installed
        except ImportError as error:
            raise ValueError("discovery.source: kubernetes needs an extra: pip install '.[kubernetes]'") from error
        self._kubeconfig = kubeconfig
        self._rest: _Rest | None = None
        self._connecting = asyncio.Lock()

    def pods(self, selector: str) -> Api:
        """Return the API for pods with these labels, or for all pods of a namespace without a selector."""
        return _WatchRequest(
            self,
            path="/api/v1/namespaces/{}/pods",
            query={"labelSelector": selector} if selector else {},
            what="pods",
            needed="pods",
            refused=f"discovery.selector {selector!r}",
            unknown="pods",
        )

    def pool(self, name: str) -> Api:
        """Return the API for the one InferencePool of this name. The request names it too, because a Role can be
        limited to names (`resourceNames`)."""
        return _WatchRequest(
            self,
            path=f"/apis/{POOL_API}/namespaces/{{}}/inferencepools",
            query={"fieldSelector": f"metadata.name={name}"},
            what="inferencepools",
            needed=f"inferencepools of the group {POOL_API.partition('/')[0]}, by the name {name},",
            refused=f"the name {name!r} in discovery.pools",
            unknown=f"InferencePools of {POOL_API}: install the CRDs of the Gateway API inference extension, "
            "1.0 or newer",
        )

    async def close(self) -> None:
        """Close all connections."""
        rest, self._rest = self._rest, None
        if rest is not None:
            await rest.close()

    @asynccontextmanager
    async def open_response(
        self, of: _WatchRequest, verb: str, namespace: str, query: dict[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield a response with status 200. Raises Gone or WatchFailed for any other outcome."""
        try:
            response = await self._get(of, namespace, query)
            try:
                if response.status != 200:
                    await self._raise_for_status(of, verb, namespace, response)
                yield response
            finally:
                response.close() if verb == "watch" else response.release()
        except (aiohttp.ClientSSLError, ssl.SSLError) as error:
            await self.close()
            raise WatchFailed(
                f"the certificate of the API server is not trusted: {error}; certificates are read again"
            ) from error
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            raise WatchFailed(f"no answer from the API server: {http_client.describe_error(error)}: {error}") from error

    async def _get(self, of: _WatchRequest, namespace: str, query: dict[str, str]) -> aiohttp.ClientResponse:
        rest = await self._ensure_connected()
        try:
            auth = (await rest.configuration.auth_settings()).get("BearerToken", {})
        except Exception as error:  # any kind of error, as in _connected
            raise WatchFailed(f"the router's credentials cannot be read: {type(error).__name__}: {error}") from error
        # No compression is requested: decompressing a list would block the event loop.
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if auth.get("value"):
            headers["Authorization"] = auth["value"].strip()
        url = f"{rest.configuration.host}{of.path.format(quote(namespace, safe=''))}?{urlencode(of.query | query)}"
        try:
            answer = await rest.request(
                "GET", url, headers=headers, _request_timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_S)
            )
        except RuntimeError as error:
            raise WatchFailed("credentials are read again for another namespace") from error
        return answer.response

    async def _ensure_connected(self) -> _Rest:
        async with self._connecting:
            if self._rest is None:
                try:
                    self._rest = await self._connect()
                # any kind of error: from files, YAML, certificates, programs that print tokens
                except Exception as error:
                    hint = "" if self._kubeconfig else " Outside of a pod, set discovery.kubeconfig."
                    raise WatchFailed(
                        f"the router's credentials cannot be read: {type(error).__name__}: {error}{hint}"
                    ) from error
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
            # Authorities of clusters that are older or created by hand issue certificates without an Authority Key
            # Identifier. Python rejects these from 3.13 on. The certificate is still verified against the one authority
            # in the pod's file.
            configuration.disable_strict_ssl_verification = True
        # the constructor reads certificates from files
        rest: _Rest = await asyncio.to_thread(RESTClientObject, configuration)
        return rest

    async def _raise_for_status(
        self, of: _WatchRequest, verb: str, namespace: str, response: aiohttp.ClientResponse
    ) -> None:
        """Raise the error that corresponds to a status."""
        if response.status == 410:
            raise Gone
        if response.status == 401:
            await self.close()
            raise WatchFailed("401: the API server rejects the router's token; the token is read again", refused=True)
        said = await http_client.read_body(response, STATUS_BYTES_MAX)
        try:
            message = msgspec.json.decode(said, type=_Refusal).message[:300]
        except (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError):
            message = ""
        if response.status == 403:
            raise WatchFailed(
                f"403: the router may not {verb} {of.what} in namespace {namespace}, a Role with the verbs list and "
                f"watch on {of.needed} is required there: {message}",
                refused=True,
            )
        if response.status == 400:
            raise WatchFailed(f"400: the API server rejects {of.refused}: {message}", refused=True)
        if response.status == 404:
            raise WatchFailed(f"404: the API server has no {of.unknown}: {message}", refused=True)
        retry_after = response.headers.get("Retry-After", "")
        retry_after_s = float(retry_after) if retry_after.isascii() and retry_after.isdigit() else 0.0
        refused = 400 <= response.status < 500 and response.status not in (408, 429)
        raise WatchFailed(f"{response.status} from the API server: {message}", retry_after_s, refused=refused)


@dataclass(frozen=True, slots=True)
class _WatchRequest:
    """Objects of one kind for `Api`, with the texts for possible errors."""

    client: ApiClient
    path: str  # path on the API server; {} is replaced by the namespace
    query: dict[str, str]  # query of the URL: selectors of the listed objects
    what: str  # name of the kind in the API
    needed: str  # permission that a Role must grant
    refused: str  # subject of status 400
    unknown: str  # subject of status 404

    async def list(self, namespace: str, limit: int, token: str) -> bytes:
        """Return one page of a list."""
        query = {"limit": str(limit)} | ({"continue": token} if token else {})
        async with self.client.open_response(self, "list", namespace, query) as response:
            page = await http_client.read_body(response, PAGE_BYTES_MAX)
        if len(page) > PAGE_BYTES_MAX:
            raise WatchFailed(f"a list of {limit} {self.what} is longer than {PAGE_BYTES_MAX >> 20} MiB")
        return page

    @asynccontextmanager
    async def watch(self, namespace: str, version: str, seconds: int) -> AsyncIterator[AsyncIterator[bytes]]:
        """Yield the events after a version."""
        query = {
            "watch": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(seconds),
            "allowWatchBookmarks": "true",
        }
        async with self.client.open_response(self, "watch", namespace, query) as response:
            yield _lines(response)


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
        raise WatchFailed("a watch ended in the middle of an event")
