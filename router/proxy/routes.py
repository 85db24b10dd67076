"""Dispatch of requests by path: to an engine, to one of the router's pages, or to a 404."""

from __future__ import annotations

import time
from collections.abc import Awaitable

from router import __version__
from router.config.api_keys import ANONYMOUS, PING, READY_ALIASES, READY_PAGE, Caller
from router.config.schema import Settings
from router.core.dialects import PATHS, dialect_of
from router.http.body_budget import no_room
from router.http.cors import Cors, EnginesCors, asks_permission
from router.http.request import Refusal, Request, date_line
from router.http.upstream import Upstream
from router.ingress.auth import METRICS, Authenticator
from router.ingress.local_responses import filter_models, principal_of, refuse, request_id
from router.ingress.paths import is_for_engines, strip_trailing_slash
from router.ingress.rate_reservation import AuthResult, reserve_rate
from router.placement_api import MODELS, REQUESTS, HttpPage, PlacementService, json_page
from router.proxy.http_proxy import Proxy
from router.proxy.preflights import Preflights
from router.telemetry.request_record import begin_record

ACCEPT_CHARS_MAX = 1_024  # longest `Accept` header that is parsed

_ALIVE = HttpPage(200, "text/plain; charset=utf-8", b"ok\n")
_LEAVING = HttpPage(503, "text/plain; charset=utf-8", b"not ready\n")


_VERSION = json_page({"version": __version__})

_WELCOME = HttpPage(
    200,
    "text/plain; charset=utf-8",
    f"""warmroute {__version__}, a router for LLM servers. Clients use this address, with or without /v1.

  /v1/models    models of the replicas
  /healthz      liveness of this process
  /readyz       readiness: a replica is ready; also /health and /ping, as on engines
  /version      version of this router
  /metrics      for Prometheus, unless turned off here

The dashboard and the runbook are on the admin port (8001 by default): /dashboard, /runbook.
""".encode(),
)


class Routes:
    """Routing table of the main listener."""

    def __init__(
        self, callers: Authenticator, proxy: Proxy, placer: PlacementService, upstream: Upstream, settings: Settings
    ) -> None:
        self._callers = callers
        self._proxy = proxy
        self._placer = placer
        self._upstream = upstream
        self.leaving = False  # set when the router stops; `/readyz` then returns 503 regardless of the control plane
        self.configure(settings)

    def configure(self, settings: Settings) -> None:
        """Apply these settings to later requests."""
        self._inference = frozenset((*PATHS, *settings.api.passthrough))
        self._metrics_here = settings.listen.metrics_on_main
        origins = settings.listen.cors_origins
        self._preflights: Preflights | None = None
        self.cors = Cors(origins) if origins else None
        if _lets_engines_decide(settings):
            self.cors = shown = EnginesCors()
            self._preflights = Preflights(self._placer, self._upstream, shown)

    def handle(self, request: Request) -> Awaitable[None]:
        """Answer a request: authenticate its caller, then dispatch by path. This is no coroutine, since one costs as
        much as four calls."""
        if self._preflights is not None:
            if b"origin" in request.fields:
                return self._handle_cors(request, self._preflights)
        elif self.cors is not None and asks_permission(request):
            return self._permission(request, self.cors)
        return self._handle(request)

    def _handle(self, request: Request) -> Awaitable[None]:
        if request.path.endswith("/"):
            strip_trailing_slash(request)
        try:
            caller = self._callers.authenticate(request)
        except Refusal as refusal:
            return self._send_refusal(request, refusal, ANONYMOUS)
        if not is_for_engines(request, self._inference):
            return self._answer(request, caller)
        if request.body_bytes and not self._holds(request, caller):
            return self._send_refusal(request, no_room(), caller)
        return self._proxy.handle(request, caller)

    def admit(self, request: Request) -> bool:
        """True if the body of a request should be read, of which only the head has arrived. The router's own pages take
        no body. The body is accounted to its tenant. Raises Refusal for a client without a key, and for a tenant over
        its rate."""
        if self.cors is not None and asks_permission(request):
            return False
        if request.path.endswith("/"):
            strip_trailing_slash(request)
        caller = self._callers.authenticate_head(request)
        if caller.tenant is not None:
            request.budget_owner = caller.tenant.name
        wanted = is_for_engines(request, self._inference)
        if wanted:
            reserve_rate(self._placer, request, caller)
        return wanted

    def _holds(self, request: Request, caller: Caller) -> bool:
        """Account for a body that has arrived; True if the budget allows it. A body that is already accounted stays
        with the tenant of that time."""
        if caller.tenant is not None and not request.held_bytes:
            request.budget_owner = caller.tenant.name
        return request.hold()

    def refuse(self, request: Request, refusal: Refusal, caller: Caller = ANONYMOUS) -> None:
        """Answer with an error and report it. Method and path are empty if they were not read."""
        if isinstance(request.met, AuthResult):
            caller = request.met.caller
        record = begin_record(request_id(request), "other", time.time(), caller.name)
        refuse(request, record, refusal, dialect_of(request.path))
        self._placer.record_request(record)

    async def _send_refusal(self, request: Request, refusal: Refusal, caller: Caller) -> None:
        self.refuse(request, refusal, caller)

    async def _handle_cors(self, request: Request, preflights: Preflights) -> None:
        """Answer a request of a browser page under the engines' CORS policy."""
        if not asks_permission(request):
            await preflights.learn()
        elif (answer := await preflights.ask(request, known=request.path in self._inference)) is not None:
            request.answer(answer.status, answer.lines, answer.head)
            return
        await self._handle(request)

    async def _permission(self, request: Request, cors: Cors) -> None:
        """Answer a browser's preflight, which carries no key yet."""
        if cors.allows(request):
            request.answer(204, (date_line(),), b"")
            return
        origin = request.header(b"origin")[:200]
        message = f"Pages of {origin!a} may not use this router (listen.cors_origins)."
        self.refuse(request, Refusal(403, "origin_not_allowed", message))

    async def _answer(self, request: Request, caller: Caller) -> None:
        """Answer with one of the router's pages, or with a 404."""
        shown = request.method in ("GET", "HEAD") or (request.method == "POST" and request.path == PING)
        page = await self._page(request, caller) if shown else None
        if page is None:
            message = f"{request.method} {request.path[:200]} does not exist here."
            if request.path.startswith("/v1/v1/"):
                message += " This client adds /v1 itself, as Anthropic's does: give it the base URL without /v1."
            self.refuse(request, Refusal(404, "unknown_path", message), caller)
            return
        lines = date_line(), f"content-type: {page.content_type}\r\n".encode()
        own = request.path != METRICS and not request.path.startswith(REQUESTS)  # these show more than engines do
        request.answer(page.status, lines, page.body, own=own)

    async def _page(self, request: Request, caller: Caller) -> HttpPage | None:
        path = READY_PAGE if request.path in READY_ALIASES else request.path
        if path == "/version":
            return _VERSION
        if path == "/healthz":
            return _ALIVE  # liveness is a property of this process: the control plane may not answer
        if path == "/":
            return _WELCOME
        if path == READY_PAGE and self.leaving:
            return _LEAVING
        if path == METRICS:
            return await self._placer.page(path, None, _accept(request)) if self._metrics_here else None
        if path.startswith(REQUESTS):
            return await self._placer.page(path, principal_of(caller, receipts=self._proxy.receipts))
        page = await self._placer.page(path)
        if caller.tenant is not None and page is not None and path.startswith(MODELS):
            return filter_models(page, path, caller.tenant.allows)
        return page


def _lets_engines_decide(settings: Settings) -> bool:
    """True if the engines' CORS policy applies at the router. The router must require no list of origins, key or client
    certificate, and must present none to engines. A page can then do nothing here that it could not do at an engine."""
    listen, upstream = settings.listen, settings.upstream
    asks = listen.cors_origins or settings.auth.keys_file or listen.tls_client_ca
    return not (asks or upstream.api_key or upstream.api_key_file or upstream.tls_certificate)


def _accept(request: Request) -> str:
    """Return the `Accept` header; "" if it is not ASCII, or is longer than any scraper's."""
    value = request.header(b"accept")
    return value if len(value) <= ACCEPT_CHARS_MAX and value.isascii() else ""
