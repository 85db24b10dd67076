"""What faces clients: listener, reader, proxy, connections to replicas. One per process; whoever places is elsewhere
(placer.py)."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Awaitable, Iterable, Mapping
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Self

from router.core.dialects import PATHS, spoken_on
from router.core.facts.misses import Template
from router.edge.answering import filtered, refuse, request_id
from router.edge.callers import Callers
from router.edge.observer import Observer
from router.edge.proxy import Proxy
from router.edge.question import RESPONSES
from router.edge.reader import Reader
from router.edge.retry_budget import RetryBudget
from router.http.accepting import cannot_listen, url_of
from router.http.deadlines import ClientLimits
from router.http.outbox import Outbox
from router.http.request import BadRequest, Refusal, Request, date_line
from router.http.server import Server
from router.http.upstream import Upstream
from router.loop import closed_on_error, in_background
from router.placer import MODELS, Page, Placer
from router.settings import secrets, tls
from router.settings.keys import ANYBODY, Caller, Keys, files_of_settings, keys_of
from router.settings.schema import Settings
from router.telemetry import logs
from router.telemetry.process_counts import CLOSED, CONNECTIONS, PROMPTS, SPANS_DROPPED, UNEXPLAINED
from router.telemetry.record import RequestRecord
from router.telemetry.tracing import Tracer
from router.tokens.encoder import Prompts, make_prompts
from router.tokens.request_tokens import Asker, Tokens

RESPONSE_METHODS = ("GET", "DELETE")
RESPONSE_ACTIONS = ("cancel", "input_items")
METHODS = ("GET", "POST", "DELETE")  # others lead nowhere

_ALIVE = Page(200, "text/plain; charset=utf-8", b"ok\n")
_LEAVING = Page(503, "text/plain; charset=utf-8", b"not ready\n")


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
        self._tracer: Tracer | None = None
        self._observer = _observer(settings) if settings.observatory.enabled else None
        self._asking_tls: ssl.SSLContext | None = None  # of the session that asks replicas for tokens
        self._stack = AsyncExitStack()
        self._ended: list[RequestRecord] = []
        self.url = ""

    async def __aenter__(self) -> Self:
        async with closed_on_error(self._stack):
            self._build()
            await self._listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drain: no new connections, running answers finish within `listen.drain_s`, then all is closed. At once if
        the block was cancelled."""
        try:
            if kind is None or not issubclass(kind, asyncio.CancelledError):
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.listen.drain_s):
                        await self._server.drain()
                        await self.proxy.idle()
        finally:  # also when whoever waits has lost patience
            await self.cut_all("The router has ended before the answer was whole.")
            await self._stack.aclose()

    def lame_duck(self) -> None:
        """`/readyz` says 503 here whatever the hub says, and answers end their connections; all else goes on."""
        self._server.lame_duck()

    async def cut_all(self, why: str) -> None:
        """End whatever is still being answered, so that its clients know; nobody else is to blame."""
        self.proxy.cut_why = why
        await self._server.cancel_all()
        await asyncio.sleep(0)  # what was said last is written at the end of the turn

    def reload(self, settings: Settings) -> None:
        """Take over what may change while it runs (see reloading.py). Nothing under way is touched. May raise
        SettingsError, but only before anything has changed."""
        s = settings
        with files_of_settings():
            keys = keys_of(s)
            admin_token = secrets.read(s.admin.token, s.admin.token_file)
            api_key = secrets.read(s.upstream.api_key, s.upstream.api_key_file)
            listener_tls, replica_tls = tls.for_listener(s.listen), tls.for_replicas(s.upstream)
            tls.renew(self._asking_tls, s.upstream)
        self._settings, self._callers.keys = s, keys
        self.show(admin_token=admin_token, api_key=api_key)
        self.upstream.configure(
            connect_timeout_s=s.upstream.connect_timeout_s,
            first_byte_timeout_s=s.upstream.first_byte_timeout_s,
            idle_timeout_s=s.upstream.idle_timeout_s,
            keepalive_s=s.upstream.keepalive_s,
            held_bytes_max=s.limits.held_answer_bytes_max,
        )
        self.proxy.configure(
            retries_max=s.upstream.retries_max,
            retry_on_timeout=s.upstream.retry_on_timeout,
            receipts=s.api.receipts,
        )
        self._budget.ratio, self._budget.floor_per_s = s.upstream.retry_ratio, s.upstream.retry_floor_per_s
        self.reader.ask_usage = s.api.ask_usage
        self.reader.configure(repairs=s.observatory.repairs, append_only=s.observatory.append_only)
        self._inference = frozenset((*PATHS, *s.api.passthrough))
        self._server.configure(_client_limits(s))
        self._server.tls, self.upstream.tls = listener_tls, replica_tls

    @property
    def keys(self) -> Keys | None:
        """Who may ask; None where anybody may. Replaced as a whole: what runs goes on."""
        return self._callers.keys

    def show(self, *, admin_token: str, api_key: str) -> None:
        """From now on the metrics need this token, and replicas are shown this key."""
        self._callers.admin_token = admin_token
        self.reader.credentials(passed_on=self.keys is None, api_key=api_key)

    @property
    def in_flight(self) -> int:
        """Requests being answered."""
        return self.proxy.in_flight

    def lost(self, replica: str) -> None:
        """Nobody listens there any more."""
        self.upstream.lost(replica)

    def stuck(self, replica: str) -> None:
        """It accepts and does not answer."""
        self.upstream.stuck(replica)

    def left(self, replica: str) -> None:
        """The replica is no longer one."""
        self.upstream.forget(replica)

    def ready(self, replica: str) -> None:
        """Do nothing: which replicas are ready is the placer's to know."""

    def templates(self) -> Mapping[str, Iterable[Template]]:
        """Prefixes that conversations of our clients share, new or changed since the last call."""
        return {"": self._observer.templates()} if self._observer is not None else {}

    def figures(self) -> dict[str, int]:
        """Totals of this edge for the hub's metrics; open connections are a level."""
        server, prompts = self._server, self._prompts
        closed = {CLOSED + why: count for why, count in server.closed.items()}
        outcomes = prompts.counts() if prompts is not None else {}
        return closed | {
            CONNECTIONS: server.connections,
            SPANS_DROPPED: self._tracer.dropped if self._tracer is not None else 0,
            UNEXPLAINED: self._observer.unexplained if self._observer is not None else 0,
            **{PROMPTS + outcome: count for outcome, count in outcomes.items()},
        }

    def _build(self) -> None:
        s = self._settings
        self._outbox = Outbox(asyncio.get_running_loop())
        if s.tracing.endpoint:
            self._tracer = _tracer(s)
            self._stack.push_async_callback(self._tracer.close)  # last: answers that are cut have spans too
        self.upstream = Upstream(
            connect_timeout_s=s.upstream.connect_timeout_s,
            first_byte_timeout_s=s.upstream.first_byte_timeout_s,
            idle_timeout_s=s.upstream.idle_timeout_s,
            keepalive_s=s.upstream.keepalive_s,
            held_bytes_max=s.limits.held_answer_bytes_max,
            outbox=self._outbox,
            alive=self._placer.alive,
            tls=tls.for_replicas(s.upstream),
        )
        self._stack.push_async_callback(self.upstream.close)
        self.reader = Reader(
            self._placer,
            self._tokens() if s.events.enabled else None,
            offload_bytes_min=s.limits.offload_bytes_min,
            ask_usage=s.api.ask_usage,
            secret=secrets.read(s.auth.secret, s.auth.secret_file),
            json_depth_max=s.limits.json_depth_max,
            observer=self._observer,
            repairs=s.observatory.repairs,
            append_only=s.observatory.append_only,
            step_header=s.observatory.step_header,
            step_field=s.observatory.step_field,
        )
        self._stack.callback(self.reader.close)
        self._callers = Callers(keys_of(s), "")
        self.show(
            admin_token=secrets.read(s.admin.token, s.admin.token_file),
            api_key=secrets.read(s.upstream.api_key, s.upstream.api_key_file),
        )
        self._budget = RetryBudget.full(s.upstream.retry_ratio, s.upstream.retry_floor_per_s)
        self.proxy = Proxy(
            self._placer,
            self.reader,
            self.upstream,
            self._report,
            clock=time.monotonic,
            budget=self._budget,
            retries_max=s.upstream.retries_max,
            retry_on_timeout=s.upstream.retry_on_timeout,
            receipts=s.api.receipts,
            tracer=self._tracer,
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
            self._asking_tls = tls.for_replicas(s.upstream)
            asker = Asker(api_key=s.probe.api_key, timeout_s=s.probe.timeout_s, tls=self._asking_tls)
            self._stack.push_async_callback(asker.close)
        return Tokens(own, asker, offload_bytes_min=s.limits.offload_bytes_min)

    async def _listen(self) -> None:
        s = self._settings
        self._server = Server(
            self._handle,
            self._refuse,
            _client_limits(s),
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

    def _handle(self, request: Request) -> Awaitable[None]:
        """Whose it is, and then by path: to an engine, one of our own pages, or nowhere. No coroutine of its own: each
        costs what four calls do."""
        try:
            caller = self._callers.who(request)
        except Refusal as refusal:
            return self._refused(request, refusal)
        generates = request.method == "POST" and request.path in self._inference
        if generates or self._about_response(request):
            return self.proxy.handle(request, caller)
        return self._answer(request, caller)

    async def _refused(self, request: Request, refusal: Refusal) -> None:
        self._refuse(request, refusal)

    async def _answer(self, request: Request, caller: Caller) -> None:
        """Of our own."""
        page = await self._page(request, caller) if request.method in ("GET", "HEAD") else None
        if page is None:
            message = f"There is no {request.method} {request.path[:200]} here."
            self._refuse(request, Refusal(404, "unknown_path", message), caller)
            return
        request.answer(page.status, (date_line(), f"content-type: {page.content_type}\r\n".encode()), page.body)

    def _about_response(self, request: Request) -> bool:
        """Stored responses: fetched, deleted, cancelled, listed."""
        if not request.path.startswith(RESPONSES + "/"):
            return False
        id_, slash, action = request.path.removeprefix(RESPONSES + "/").partition("/")
        if not id_.strip(".") or request.method not in METHODS:
            return False  # dots would be another path to an engine that tidies paths up
        if not slash:  # with one and nothing behind it, engines tell where they are: they redirect
            return request.method in RESPONSE_METHODS
        return action in RESPONSE_ACTIONS

    async def _page(self, request: Request, caller: Caller) -> Page | None:
        path = request.path
        if path == "/healthz":
            return _ALIVE  # whatever has become of the hub
        if path == "/readyz" and self._server.closing:
            return _LEAVING
        if path == "/metrics" and not self._settings.listen.metrics_on_main:
            return None
        page = await self._placer.page(path)
        if caller.tenant is not None and page is not None and path.startswith(MODELS):
            return filtered(page, path, caller.tenant.allows)
        return page

    def _refuse(self, request: Request, refusal: Refusal | BadRequest, caller: Caller = ANYBODY) -> None:
        record = RequestRecord(id=request_id(request), route="other", at_s=time.time(), tenant=caller.name)
        refuse(request, record, refusal, spoken_on(request.path))
        self._placer.report(record)

    def _report(self, record: RequestRecord) -> None:
        """Told on at the end of the loop's turn, all of a turn together: that is done in half the time."""
        if not self._ended:
            self._server.loop.call_soon(self._tell)
        self._ended.append(record)

    def _tell(self) -> None:
        ended, self._ended = self._ended, []
        for record in ended:
            self._placer.report(record)
        logs.log_requests(ended)


def _tracer(settings: Settings) -> Tracer:
    tracing = settings.tracing
    return Tracer(
        tracing.endpoint,
        sample_ratio=tracing.sample_ratio,
        service_name=tracing.service_name,
        queue_spans_max=tracing.queue_spans_max,
        scheme="https" if settings.listen.tls_certificate else "http",
    )


def _observer(settings: Settings) -> Observer:
    s = settings.observatory
    return Observer(
        memory_bytes_max=s.memory_bytes_max,
        prompt_bytes_max=s.prompt_bytes_max,
        templates_max=s.templates_max,
        looks_per_s_max=s.looks_per_s_max,
        compare_ms_per_s_max=s.compare_ms_per_s_max,
        excerpts=s.excerpts,
    )


def _client_limits(settings: Settings) -> ClientLimits:
    listen = settings.listen
    return ClientLimits(
        body_bytes_max=settings.limits.body_bytes_max,
        keepalive_s=listen.keepalive_s,
        head_timeout_s=listen.head_timeout_s,
        body_bytes_per_s_min=listen.body_bytes_per_s_min,
        send_timeout_s=listen.send_timeout_s,
        connections_max=listen.connections_max,
        connections_per_client_max=listen.connections_per_client_max,
    )
