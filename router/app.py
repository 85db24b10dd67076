"""The composition root: builds everything from Settings, owns the tasks, serves, drains."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Any, Self

import msgspec
from aiohttp import web

from router import logs
from router.addresses import event_endpoints, event_topics, template_kwargs, tokenizers
from router.admin import Pages
from router.announce import Announcer
from router.core.dialects import PATHS, spoken_on
from router.core.facts import Grade, Replica
from router.core.health import RetryBudget
from router.core.kv_stream import Limits
from router.core.policies import POLICIES
from router.core.routing import Router
from router.discovery import Discovery
from router.discovery.static import StaticDiscovery
from router.events import Subscriber
from router.metrics import Metrics, RequestRecord
from router.probe import Prober
from router.prompts import Prompts
from router.proxy import Proxy, refuse, request_id
from router.ranks import Ranks
from router.reading import RESPONSES, Reader, Refusal
from router.settings import Settings
from router.tokens import Tokens
from router.upstream import LINE_BYTES_MAX, Upstream

log = logging.getLogger(__name__)

CHECK_S = 1.0
TOKENIZERS_S = 20.0  # of loading, before serving begins without them
CLOSE_S = 0.1  # for connections to close, once nothing is being answered


class App:
    """A running router: `async with App(settings) as app`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stack = AsyncExitStack()
        self._watching: dict[str, list[asyncio.Task[None]]] = {}  # by replica
        self._draining = False
        self._events: Subscriber | None = None
        self._prompts: Prompts | None = None
        self._grades: dict[str, Grade] = {}  # as last logged
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
            held_blocks_max=s.events.blocks_max,
            graded=self._graded,
            resync=lambda id_: self._events.resync(id_) if self._events else None,
            suspect=lambda id_: self._events.suspect(id_, "connection refused") if self._events else None,
        )
        try:
            self._build()
            if self._prompts is not None:
                await self._load_tokenizers(self._prompts)  # first: it holds up everything else
            await self._follow()
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
            self._lost,
            interval_s=s.probe.interval_s,
            timeout_s=s.probe.timeout_s,
            api_key=s.probe.api_key,
            models_interval_s=s.probe.models_interval_s,
            page_bytes_max=s.probe.page_bytes_max,
            kv_tokens_max=s.routing.kv_tokens_max,
        )
        self._stack.push_async_callback(self._prober.close)
        self.metrics = Metrics(
            self.router, lambda: self.proxy.in_flight, time.monotonic, self._stream_figures, self._prompt_figures
        )
        self.pages = Pages(
            self.router,
            self.metrics,
            ready=lambda: not self._draining and bool(self.router.fleet.ready()),
            clock=time.monotonic,
            decisions_max=s.limits.decisions_max,
            streams=self._stream,
        )
        self.reader = Reader(
            self.router,
            self._tokens() if s.events.enabled else None,
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
            self._lost,
            clock=time.monotonic,
            budget=RetryBudget(s.upstream.retry_ratio, s.upstream.retry_floor_per_s),
            retries_max=s.upstream.retries_max,
            retry_on_timeout=s.upstream.retry_on_timeout,
            receipts=s.api.receipts,
        )
        self._ranks = Ranks(
            interval_s=s.probe.interval_s,
            again_s=s.probe.models_interval_s,
            timeout_s=s.probe.timeout_s,
            api_key=s.probe.api_key,
            page_bytes_max=s.probe.page_bytes_max,
        )
        self._stack.push_async_callback(self._ranks.close)
        self._task(self._upstream.watch())
        self._task(self._check())

    def _tokens(self) -> Tokens:
        s = self._settings
        self._prompts = Prompts(
            tokenizers(s.tokens.sources),
            deadline_s=s.tokens.deadline_s,
            cache_bytes_max=s.tokens.cache_bytes_max,
            template_kwargs=template_kwargs(s.tokens.template_kwargs),
        )
        tokens = Tokens(
            self.router,
            self._prompts,
            ask_replicas=s.tokens.ask_replicas,
            verify=s.tokens.verify,
            verify_interval_s=s.tokens.verify_interval_s,
            offload_bytes_min=s.limits.offload_bytes_min,
            timeout_s=s.probe.timeout_s,
            event_wait_s=s.events.wait_s,
            api_key=s.probe.api_key,
        )
        self._stack.push_async_callback(tokens.close)
        self._task(tokens.watch())
        return tokens

    async def _load_tokenizers(self, prompts: Prompts) -> None:
        """Not for ever: a hub may be slow, or behind a firewall that swallows what is sent to it."""
        try:
            async with asyncio.timeout(TOKENIZERS_S):
                await prompts.prepare_all()
        except TimeoutError:
            log.warning("tokenizers are not loaded yet: until they are, prompts are placed by estimate")

    async def _follow(self) -> None:
        """Events, and then replicas: each is followed from the moment it is known."""
        s = self._settings
        if s.events.enabled:
            self._events = Subscriber(
                self.router.knowledge,
                endpoints=event_endpoints(s.events.endpoints),
                bind=s.events.bind,
                topics=event_topics(s.events.topics),
                api_key=s.probe.api_key,
                poll_s=s.events.poll_s,
                limits=Limits(
                    silence_s=s.events.replay_timeout_s,
                    suspended_max_s=s.events.suspend_s,
                    queue_bytes_max=s.events.queue_bytes_max,
                ),
            )
            await self._events.start()
            self._stack.push_async_callback(self._events.close)
            if s.events.announce:
                announcer = Announcer(self.router, api_key=s.probe.api_key)
                self._stack.push_async_callback(announcer.close)
                self._task(announcer.watch())
        self._stack.push_async_callback(self._stop_watching)
        self._task(self._discover(StaticDiscovery(s.replicas)))

    def _graded(self, replica: str, grade: Grade, why: str) -> None:
        """Each change of a replica's grade is logged once, with its reason; a fall from `exact` is a warning."""
        fell = self._grades.get(replica) is Grade.EXACT
        self._grades[replica] = grade
        fields = {"replica": replica, "grade": grade.value, "why": why}
        log.log(logging.WARNING if fell else logging.INFO, "replica's grade", extra={"fields": fields})

    def _lost(self, replica: str) -> None:
        """Nobody listens there any more; who comes back may have another number of ranks."""
        self._upstream.lost(replica)
        self._ranks.doubt(replica)

    async def _check(self) -> None:
        """Hold what events say against what engines count."""
        while True:
            await asyncio.sleep(CHECK_S)
            self.router.check(time.monotonic())

    def _stream_figures(self) -> dict[str, dict[str, float | None]]:
        if self._events is None:
            return {}
        rows = self._events.stats().items()
        return {id_: {**msgspec.to_builtins(row.counts), "blocks": row.blocks, "lag_s": row.lag_s} for id_, row in rows}

    def _prompt_figures(self) -> dict[str, int]:
        return dict(self._prompts.counts()) if self._prompts else {}

    def _stream(self, replica: str) -> dict[str, Any] | None:
        stats = self._events.stat(replica) if self._events else None
        return msgspec.to_builtins(stats) if stats else None

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
        async for replicas in self._ranks.follow(discovery.watch()):
            self._replace(replicas)
            self.discovered.set()

    async def probe_now(self) -> None:
        """Ask every replica once, without waiting for the next round."""
        await self.discovered.wait()
        await asyncio.gather(*(self._prober.probe(id_, models=True) for id_ in list(self.router.fleet.members)))

    def _replace(self, replicas: frozenset[Replica]) -> None:
        by_id = {replica.id: replica for replica in replicas}
        joined, left = self.router.replace(by_id[id_] for id_ in sorted(by_id))
        for id_ in left:
            for task in self._watching.pop(id_):
                task.cancel()
            self.metrics.left(id_)
            self._grades.pop(id_, None)
        for id_ in joined:
            work: list[Coroutine[None, None, None]] = [self._prober.watch(id_)]
            if self._events is not None:
                work.append(self._events.watch(by_id[id_]))
            self._watching[id_] = [asyncio.create_task(_guarded(each)) for each in work]

    async def _stop_watching(self) -> None:
        tasks = [task for tasks in self._watching.values() for task in tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(_guarded(work))

        async def stop() -> None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            work.close()  # it may not have begun

        self._stack.push_async_callback(stop)


async def _guarded(work: Coroutine[None, None, None]) -> None:
    """A background task that fails says so in the log; it is a bug."""
    try:
        await work
    except Exception:
        log.exception("background task failed")
        raise
