"""The composition root: builds everything from Settings, owns the tasks, serves, drains."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Self

from aiohttp import web

from router import logs
from router.admin import Pages
from router.core.dialects import PATHS, spoken_on
from router.core.facts import Replica
from router.core.health import RetryBudget
from router.core.policies import POLICIES
from router.core.routing import Router
from router.discovery import Discovery
from router.discovery.static import StaticDiscovery
from router.metrics import Metrics, RequestRecord
from router.probe import Prober
from router.proxy import Proxy, refuse, request_id
from router.reading import RESPONSES, Reader, Refusal
from router.settings import Settings
from router.upstream import LINE_BYTES_MAX, Upstream

log = logging.getLogger(__name__)

CLOSE_S = 0.1  # for connections to close, once nothing is being answered


class App:
    """A running router: `async with App(settings) as app`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stack = AsyncExitStack()
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._draining = False
        self._sites: list[web.TCPSite] = []
        self.discovered = asyncio.Event()  # the first complete set of replicas is known
        self.url = self.admin_url = ""

    async def __aenter__(self) -> Self:
        """Start listening; replicas are looked for meanwhile, and `/readyz` says when one is there."""
        s = self._settings
        self.router = Router(
            POLICIES[s.routing.policy](),
            index_bytes_max=s.routing.index_bytes_max,
            memory_max=s.routing.memory_max,
            blocks_max_default=s.routing.blocks_max_default,
        )
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
        """Drain: not ready at once, running answers finish within `listen.drain_s`, then all is closed."""
        self._draining = True
        try:
            for site in self._sites:
                await site.stop()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.listen.drain_s):
                    await self.proxy.idle()
        finally:  # also when whoever waits has lost patience
            await self._stack.aclose()

    def _build(self) -> None:
        s = self._settings
        if not s.replicas:
            log.warning("no replicas are configured: give --replica URL, or `replicas` in the settings file")
        self._upstream = Upstream(
            connect_timeout_s=s.upstream.connect_timeout_s,
            first_byte_timeout_s=s.upstream.first_byte_timeout_s,
            idle_timeout_s=s.upstream.idle_timeout_s,
            keepalive_s=s.upstream.keepalive_s,
            held_bytes_max=s.limits.held_answer_bytes_max,
        )
        self._stack.push_async_callback(self._upstream.close)
        self._prober = Prober(
            self.router,
            self._upstream.lost,
            interval_s=s.probe.interval_s,
            timeout_s=s.probe.timeout_s,
            api_key=s.probe.api_key,
            models_interval_s=s.probe.models_interval_s,
            page_bytes_max=s.probe.page_bytes_max,
            kv_tokens_max=s.routing.kv_tokens_max,
        )
        self._stack.push_async_callback(self._prober.close)
        self.metrics = Metrics(self.router, lambda: self.proxy.in_flight, time.monotonic)
        self.pages = Pages(
            self.router,
            self.metrics,
            ready=lambda: not self._draining and bool(self.router.fleet.ready()),
            clock=time.monotonic,
            decisions_max=s.limits.decisions_max,
        )
        self.reader = Reader(
            self.router,
            offload_bytes_min=s.limits.offload_bytes_min,
            response_ids_max=s.limits.response_ids_max,
            ask_usage=s.api.ask_usage,
        )
        self.proxy = Proxy(
            self.router,
            self.reader,
            self._upstream,
            self._report,
            self.metrics.failed,
            clock=time.monotonic,
            budget=RetryBudget(s.upstream.retry_ratio, s.upstream.retry_floor_per_s),
            retries_max=s.upstream.retries_max,
            retry_on_timeout=s.upstream.retry_on_timeout,
            receipts=s.api.receipts,
        )
        self._task(self._upstream.watch())
        self._task(self._discover(StaticDiscovery(s.replicas)))
        self._stack.push_async_callback(self._stop_probes)

    async def _listen(self) -> None:
        s, passthrough = self._settings.listen, self._settings.api.passthrough
        main = web.Application(client_max_size=self._settings.limits.body_bytes_max)
        main.add_routes(self.pages.routes(admin=False, metrics=s.metrics_on_main))
        main.add_routes([web.get("/v1/models", self.pages.models), web.get("/v1/models/{model:.+}", self.pages.model)])
        main.add_routes([web.post(path, self.proxy.handle) for path in {**PATHS, **dict.fromkeys(passthrough)}])
        stored = RESPONSES + "/{response_id}"
        main.add_routes([web.route(m, stored, self.proxy.handle) for m in ("GET", "DELETE")])
        main.add_routes([web.route("*", stored + "/{action:cancel|input_items}", self.proxy.handle)])
        main.router.add_route("*", "/{path:.*}", self._not_found)
        admin = web.Application()
        admin.add_routes(self.pages.routes(admin=True, metrics=True))
        self.admin_url = await self._serve(admin, s.admin_host, s.admin_port)
        self.url = await self._serve(main, s.host, s.port)

    async def _serve(self, app: web.Application, host: str, port: int) -> str:
        runner = web.AppRunner(
            app,
            handler_cancellation=True,  # a client that leaves cancels the engine's work
            access_log=None,
            keepalive_timeout=self._settings.listen.keepalive_s,
            shutdown_timeout=CLOSE_S,  # draining is ours: aiohttp would wait twice
            max_line_size=LINE_BYTES_MAX,
            max_field_size=LINE_BYTES_MAX,
            auto_decompress=False,
        )
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            why = f"cannot listen on {host}:{port} (listen.host, listen.port, listen.admin_port): {error.strerror}"
            raise OSError(error.errno, why) from error
        self._sites.append(site)
        bound = runner.addresses[0]
        shown = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        return f"http://{shown}:{bound[1]}"

    async def _not_found(self, request: web.Request) -> web.StreamResponse:
        """Everything that is not for clients: cache flushes, sleep, adapter loading, and typos."""
        record = RequestRecord(id=request_id(request), route="other")
        message = f"There is no {request.method} {request.path[:200]} here."
        response = refuse(request, record, Refusal(404, "unknown_path", message), spoken_on(request.path))
        self.metrics.observe(record)
        return response

    def _report(self, record: RequestRecord) -> None:
        self.metrics.observe(record)
        self.pages.decisions.append(record)
        logs.log_request(record)

    async def _discover(self, discovery: Discovery) -> None:
        async for replicas in discovery.watch():
            self._replace(replicas)
            self.discovered.set()

    async def probe_now(self) -> None:
        """Ask every replica once, without waiting for the next round."""
        await self.discovered.wait()
        await asyncio.gather(*(self._prober.probe(id_, models=True) for id_ in list(self.router.fleet.members)))

    def _replace(self, replicas: frozenset[Replica]) -> None:
        joined, left = self.router.replace(sorted(replicas, key=lambda replica: replica.id))
        for id_ in left:
            self._probes.pop(id_).cancel()
            self.metrics.left(id_)
        for id_ in joined:
            self._probes[id_] = asyncio.create_task(_guarded(self._prober.watch(id_)))

    async def _stop_probes(self) -> None:
        for task in self._probes.values():
            task.cancel()
        await asyncio.gather(*self._probes.values(), return_exceptions=True)

    def _task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(_guarded(work))

        async def stop() -> None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

        self._stack.push_async_callback(stop)


async def _guarded(work: Coroutine[None, None, None]) -> None:
    """A background task that fails says so in the log; it is a bug."""
    try:
        await work
    except Exception:
        log.exception("background task failed")
        raise
