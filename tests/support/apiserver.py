"""A fake Kubernetes API server: a real aiohttp server on port 0, for pods and InferencePools, with the faults that
real ones have.

    async with ApiServer() as api:
        api.store.create(pod("a", ip="127.0.0.1", port=engine.port))
        settings = DiscoverySettings(source="kubernetes", selector="app=vllm", kubeconfig=str(api.kubeconfig(folder)))

What it holds is in `api.store` and `api.pools` (podstore.py); watchers hear of a change at once, however it was made.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import yaml
from aiohttp import web

from tests.support.podstore import Gone, PodStore, expired, failure

LOOK_S = 0.01  # between two looks of a watch for changes
ACCEPT_TURNS = 5  # turns of the loop, some more than asyncio takes from accepting a connection to telling of it


@dataclass
class ApiServer:
    """`async with ApiServer() as api`. Everything below `port` may be changed at any time."""

    store: PodStore = field(default_factory=PodStore)
    pools: PodStore = field(default_factory=PodStore)
    knows_pools: bool = True  # whether the definition of InferencePools is installed
    port: int = 0
    token: str = "secret-token"
    host: str = "127.0.0.1"
    tls: ssl.SSLContext | None = None  # speak TLS, from the next `up` on
    forbidden: set[str] = field(default_factory=set)  # verbs that the role does not have, and namespaces
    odd: Callable[[str, web.Request], Awaitable[web.StreamResponse | None]] | None = (
        None  # its answer to a verb, if any
    )
    failing: tuple[int, str] | None = None  # (status, Retry-After): all requests are answered so
    slow_s: float = 0.0  # before a list is answered
    stalled: bool = False  # half-open: requests are taken and not answered, watches send nothing
    dropping: bool = False  # changes made meanwhile are told no watcher that is connected
    repeating: bool = False  # every event is sent twice
    gone_as_status: bool = False  # 410 as the answer's status instead of an ERROR event
    bookmark_s: float = 1.0
    asked: Counter[str] = field(default_factory=Counter)  # requests by verb
    watching: set[asyncio.Transport] = field(default_factory=set)  # connections of watches
    accepted: set[asyncio.Transport] = field(default_factory=set)  # all connections since `up`

    async def __aenter__(self) -> Self:
        await self.up()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.down()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    async def up(self) -> None:
        """Listen: on a free port first, then on the same again."""
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/{namespace}/pods", self._pods)
        if self.knows_pools:
            app.router.add_get(
                "/apis/inference.networking.k8s.io/v1/namespaces/{namespace}/inferencepools", self._inferencepools
            )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05, access_log=None)
        await self._runner.setup()
        self._note_connections()
        await web.TCPSite(self._runner, self.host, self.port, ssl_context=self.tls).start()
        self.port = self._runner.addresses[0][1]

    def _note_connections(self) -> None:
        """Remember each connection: aiohttp's server forgets those that come while it waits for others to end, and
        nothing else may refer to them then."""
        server = self._runner.server
        assert server is not None
        told, accepted = server.connection_made, self.accepted

        def made(handler: Any, transport: asyncio.Transport) -> None:
            accepted.add(transport)
            told(handler, transport)

        server.connection_made = made  # type: ignore[method-assign]  # of this server alone

    async def down(self) -> None:
        """Close the listener and all connections."""
        self.close_watches()
        await self._runner.cleanup()
        for _ in range(ACCEPT_TURNS):  # a connection that was accepted meanwhile is known to the server only then
            await asyncio.sleep(0)
            while self.accepted:
                self.accepted.pop().abort()

    def close_watches(self) -> None:
        """Break the connections of all watches, in the middle of their answers."""
        for transport in list(self.watching):
            transport.abort()

    def kubeconfig(self, folder: Path, namespace: str = "default") -> Path:
        """Write a file that leads here, with the token in a file of its own beside it."""
        (folder / "token").write_text(self.token)
        context = {"cluster": "fake", "user": "fake", "namespace": namespace}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "contexts": [{"name": "fake", "context": context}],
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "fake", "user": {"tokenFile": str(folder / "token")}}],
        }
        path = folder / "kubeconfig"
        path.write_text(yaml.safe_dump(config))
        return path

    # -- requests ----------------------------------------------------------------------------------------------------

    async def _pods(self, request: web.Request) -> web.StreamResponse:
        return await self._asked(request, self.store, "pods")

    async def _inferencepools(self, request: web.Request) -> web.StreamResponse:
        return await self._asked(request, self.pools, "inferencepools")

    async def _asked(self, request: web.Request, store: PodStore, what: str) -> web.StreamResponse:
        verb = "watch" if request.query.get("watch") in ("1", "true", "True") else "list"
        self.asked[verb] += 1
        if self.failing is not None:
            status, retry_after = self.failing
            return self._failed(status, "Failing", "told to", {"Retry-After": retry_after} if retry_after else None)
        if request.headers.get("Authorization", "").lower() != f"bearer {self.token}".lower():
            return self._failed(401, "Unauthorized", "Unauthorized")
        namespace = request.match_info["namespace"]
        if self.odd is not None and (answer := await self.odd(verb, request)) is not None:
            return answer
        if not self.forbidden.isdisjoint((verb, namespace, what)):
            message = f'{what} is forbidden: User "fake" cannot {verb} resource "{what}" in the namespace "{namespace}"'
            return self._failed(403, "Forbidden", message)
        while self.stalled:
            await asyncio.sleep(LOOK_S)
        if verb == "watch":
            return await self._watch(request, store, namespace)
        if self.slow_s:
            await asyncio.sleep(self.slow_s)
        query = request.query
        try:
            page = store.list(
                namespace,
                query.get("labelSelector", ""),
                int(query.get("limit", "0")),
                query.get("continue", ""),
                _name(query),
            )
        except Gone:
            return self._answer(410, expired(query["continue"]))
        return self._answer(200, page)

    async def _watch(self, request: web.Request, store: PodStore, namespace: str) -> web.StreamResponse:
        behind = int(request.query.get("resourceVersion") or store.revision)
        if behind > store.revision:
            return self._failed(504, "Timeout", "Too large resource version")
        if behind < store.compacted and self.gone_as_status:
            return self._answer(410, expired(str(behind)))
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        transport = request.transport
        assert isinstance(transport, asyncio.Transport)
        self.watching.add(transport)
        with contextlib.suppress(ConnectionError):
            try:
                await response.prepare(request)
                await self._tell(request, response, store, namespace, behind)
            finally:
                self.watching.discard(transport)
        return response

    async def _tell(
        self, request: web.Request, response: web.StreamResponse, store: PodStore, namespace: str, behind: int
    ) -> None:
        """Events until the time is over that the watcher has asked for."""
        loop, query = asyncio.get_running_loop(), request.query
        end_s = loop.time() + float(query.get("timeoutSeconds", "1800"))
        bookmark_s = loop.time() + self.bookmark_s
        while self.stalled or loop.time() < end_s:
            if not self.stalled:
                try:
                    events = list(store.events(namespace, query.get("labelSelector", ""), behind, _name(query)))
                except Gone:
                    await self._send(response, {"type": "ERROR", "object": expired(str(behind))})
                    return
                behind = store.revision
                for event in [] if self.dropping else events:
                    for _ in range(1 + self.repeating):
                        await self._send(response, event)
                if loop.time() >= bookmark_s and query.get("allowWatchBookmarks") in ("1", "true", "True"):
                    bookmark_s = loop.time() + self.bookmark_s
                    await self._send(response, store.bookmark())
            await asyncio.sleep(LOOK_S)

    async def _send(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(json.dumps(event).encode() + b"\n")

    def _failed(
        self, status: int, reason: str, message: str, headers: dict[str, str] | None = None
    ) -> web.StreamResponse:
        return self._answer(status, failure(status, reason, message), headers)

    @staticmethod
    def _answer(status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> web.StreamResponse:
        return web.json_response(body, status=status, headers=headers)


def _name(query: Mapping[str, str]) -> str:
    """The name that a question asks for alone; "" where it asks for all."""
    field_, _, name = query.get("fieldSelector", "").partition("=")
    assert field_ in ("", "metadata.name"), field_
    return name
