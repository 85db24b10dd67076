"""What faces clients: listener, reader, proxy, connections to replicas. One per process; whoever places is elsewhere
(placing.py)."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Self

from router import logs, tls
from router.core.dialects import PATHS, spoken_on
from router.core.health import RetryBudget
from router.outbox import Outbox
from router.patience import ClientLimits
from router.placing import CLOSED, CONNECTIONS, LINES_DROPPED, PROMPTS, Page, Placer
from router.prompts import Prompts
from router.proxy import Proxy, refuse, request_id
from router.reading import RESPONSES, Reader, Refusal
from router.receiving import BadRequest, Request
from router.running import cannot_listen, in_background, make_prompts, url_of
from router.serving import Server, date_line
from router.settings import Settings
from router.tallies import RequestRecord
from router.tokens import Asker, Tokens
from router.upstream import Upstream

RESPONSE_METHODS = ("GET", "DELETE")
RESPONSE_ACTIONS = ("cancel", "input_items")
METHODS = ("GET", "POST", "DELETE")  # others lead nowhere

_ALIVE = Page(200, "text/plain; charset=utf-8", b"ok\n")


class Edge:
    """`async with Edge(settings, placer) as edge`; leaving it drains."""

    def __init__(
        self,
        settings: Settings,
        placer: Placer,
        *,
        listening: socket.socket | None = None,
        shared_prompts: Prompts | None = None,
    ) -> None:
        """Without a `listening` socket one is bound where the settings say. `shared_prompts` are the hub's, where it is
        in this process."""
        self._settings = settings
        self._placer = placer
        self._socket = listening
        self._shared_prompts = shared_prompts
        self._prompts: Prompts | None = None  # our own
        self._stack = AsyncExitStack()
        self._ended: list[RequestRecord] = []
        self.url = ""

    async def __aenter__(self) -> Self:
        try:
            self._build()
            await self._listen()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drain: no new connections, running answers finish within `listen.drain_s`, then all is closed."""
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.listen.drain_s):
                    await self._server.drain()
                    await self.proxy.idle()
        finally:  # also when whoever waits has lost patience
            await self._stack.aclose()

    @property
    def in_flight(self) -> int:
        """Requests being answered."""
        return self.proxy.in_flight

    def lost(self, replica: str) -> None:
        """Nobody listens there any more."""
        self.upstream.lost(replica)

    def left(self, replica: str) -> None:
        """The replica is no longer one."""
        self.upstream.forget(replica)

    def figures(self) -> dict[str, int]:
        """What is counted here for the hub's metrics, where the hub is in another process."""
        prompts = self._prompts.counts() if self._prompts is not None else {}
        told = {LINES_DROPPED: logs.dropped()} | {PROMPTS + outcome: count for outcome, count in prompts.items()}
        return told | self.connections()

    def connections(self) -> dict[str, int]:
        """Clients' connections: how many are open, and how many we closed, by reason."""
        server = self._server
        return {CONNECTIONS: server.connections} | {CLOSED + why: count for why, count in server.closed.items()}

    def _build(self) -> None:
        s = self._settings
        self._outbox = Outbox(asyncio.get_running_loop())
        self.upstream = Upstream(
            connect_timeout_s=s.upstream.connect_timeout_s,
            first_byte_timeout_s=s.upstream.first_byte_timeout_s,
            idle_timeout_s=s.upstream.idle_timeout_s,
            keepalive_s=s.upstream.keepalive_s,
            held_bytes_max=s.limits.held_answer_bytes_max,
            outbox=self._outbox,
            tls=tls.for_replicas(s.upstream),
        )
        self._stack.push_async_callback(self.upstream.close)
        self.reader = Reader(
            self._placer,
            self._tokens() if s.events.enabled else None,
            offload_bytes_min=s.limits.offload_bytes_min,
            ask_usage=s.api.ask_usage,
            json_depth_max=s.limits.json_depth_max,
        )
        self._stack.callback(self.reader.close)
        self.proxy = Proxy(
            self._placer,
            self.reader,
            self.upstream,
            self._report,
            clock=time.monotonic,
            budget=RetryBudget(s.upstream.retry_ratio, s.upstream.retry_floor_per_s),
            retries_max=s.upstream.retries_max,
            retry_on_timeout=s.upstream.retry_on_timeout,
            receipts=s.api.receipts,
        )
        self._inference = frozenset((*PATHS, *s.api.passthrough))
        self._stack.push_async_callback(in_background(self.upstream.watch()))

    def _tokens(self) -> Tokens:
        s = self._settings
        own = self._shared_prompts
        if own is None:
            own = self._prompts = make_prompts(s)
            self._stack.callback(own.close)
        asker = None
        if s.tokens.ask_replicas:
            asker = Asker(api_key=s.probe.api_key, timeout_s=s.probe.timeout_s, tls=tls.for_replicas(s.upstream))
            self._stack.push_async_callback(asker.close)
        return Tokens(own, asker, offload_bytes_min=s.limits.offload_bytes_min)

    async def _listen(self) -> None:
        s = self._settings
        self._server = Server(
            self._handle,
            self._turn_away,
            ClientLimits(
                body_bytes_max=s.limits.body_bytes_max,
                keepalive_s=s.listen.keepalive_s,
                head_timeout_s=s.listen.head_timeout_s,
                body_bytes_per_s_min=s.listen.body_bytes_per_s_min,
                send_timeout_s=s.listen.send_timeout_s,
                connections_max=s.listen.connections_max,
                connections_per_client_max=s.listen.connections_per_client_max,
            ),
            tls=tls.for_listener(s.listen),
            outbox=self._outbox,
        )
        self._stack.push_async_callback(self._server.close)
        try:
            bound = await (
                self._server.take(self._socket)
                if self._socket is not None
                else self._server.listen(s.listen.host, s.listen.port)
            )
        except OSError as error:
            raise cannot_listen(error, s.listen.host, s.listen.port) from error
        self.url = url_of(*bound, tls=self._server.tls is not None)

    # -- requests ------------------------------------------------------------------------------------------------

    async def _handle(self, request: Request) -> None:
        """By path: to an engine, one of our own pages, or nowhere."""
        generates = request.method == "POST" and request.path in self._inference
        if generates or self._about_response(request):
            await self.proxy.handle(request)
            return
        page = await self._page(request) if request.method in ("GET", "HEAD") else None
        if page is None:
            message = f"There is no {request.method} {request.path[:200]} here."
            self._turn_away(request, Refusal(404, "unknown_path", message))
            return
        request.answer(page.status, (date_line(), f"content-type: {page.content_type}\r\n".encode()), page.body)

    def _about_response(self, request: Request) -> bool:
        """Stored responses: fetched, deleted, cancelled, listed."""
        if not request.path.startswith(RESPONSES + "/"):
            return False
        id_, _, action = request.path.removeprefix(RESPONSES + "/").partition("/")
        if not id_.strip(".") or request.method not in METHODS:
            return False  # dots would be another path to an engine that tidies paths up
        return action in RESPONSE_ACTIONS or (not action and request.method in RESPONSE_METHODS)

    async def _page(self, request: Request) -> Page | None:
        path = request.path
        if path == "/healthz":
            return _ALIVE  # whatever has become of the hub
        if path == "/metrics" and not self._settings.listen.metrics_on_main:
            return None
        return await self._placer.page(path)

    def _turn_away(self, request: Request, refusal: Refusal | BadRequest) -> None:
        record = RequestRecord(id=request_id(request), route="other")
        refuse(request, record, refusal, spoken_on(request.path))
        self._placer.report(record)

    def _report(self, record: RequestRecord) -> None:
        """Told on at the end of the loop's turn, all of a turn together: that is done in half the time."""
        if not self._ended:
            asyncio.get_running_loop().call_soon(self._tell)
        self._ended.append(record)

    def _tell(self) -> None:
        ended, self._ended = self._ended, []
        for record in ended:
            self._placer.report(record)
        for record in ended:
            logs.log_request(record)
