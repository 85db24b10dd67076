"""What knows the replicas and places: index, probes, events, metrics, admin pages. One for all edges (placer.py)."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

import msgspec

from router.admin.listener import listen
from router.admin.observatory import Observatory
from router.admin.pages import Pages
from router.admin.prewarm import Page as PrewarmPage
from router.admin.replicas import Additions
from router.core.admission.holding import TICK_S
from router.core.facts.placements import Grade
from router.core.facts.replicas import Replica
from router.core.fleet.breaker import State
from router.core.kv_events.stream import Limits
from router.core.observatory.explain import Explainer
from router.core.observatory.ledger.ledger import Ledger
from router.core.placement.policies import POLICIES
from router.core.placement.router import Router
from router.engines.announce import Announcer
from router.engines.discovery.sources import source_of
from router.engines.discovery.static import StaticDiscovery
from router.engines.discovery.together import Together
from router.engines.kv_events.subscriber import Subscriber
from router.engines.probe import Prober
from router.engines.ranks import Ranks
from router.hub.local_placer import LocalPlacer
from router.loop import closed_on_error, guarded, in_background
from router.placer import Edges, NoEdges
from router.prewarm.sending import Sender
from router.prewarm.warmer import Warmer
from router.settings import secrets, tls
from router.settings.keys import Keys, files_of_settings, keys_of
from router.settings.networks import allowed
from router.settings.pairs import event_endpoints, event_topics
from router.settings.schema import Settings
from router.telemetry.metrics import Figures, Metrics, RequestRecord
from router.telemetry.process_counts import Totals
from router.tokens.encoder import Prompts, make_prompts
from router.tokens.request_tokens import Asker
from router.tokens.trust import Trust

log = logging.getLogger(__name__)

LOOK_S = 0.25  # between two looks for stuck replicas
LOOKS_A_CHECK = 4  # events are held against counters every so many
STALE_PROBES = 3  # intervals after which an engine's word on its load counts no more
TOKENIZERS_S = 20.0  # of loading, before serving begins without them


class Hub:
    """`async with Hub(settings, ...) as hub`: knows replicas from then on; `/readyz` says when one is ready."""

    def __init__(
        self,
        settings: Settings,
        *,
        admin_socket: socket.socket | None = None,
    ) -> None:
        """Without an `admin_socket`, one is bound to the address in the settings."""
        self.settings = settings  # in force now
        self.edges: Edges = NoEdges()
        self._admin_socket = admin_socket
        self._stack = AsyncExitStack()
        self._tls = tls.for_replicas(settings.upstream)
        self._watching: dict[str, list[asyncio.Task[None]]] = {}  # by replica
        self._events: Subscriber | None = None
        self.prompts: Prompts | None = None
        self._grades: dict[str, Grade] = {}  # as last logged
        self.totals = Totals(lambda: self.edges.figures())
        self.observatory: Observatory | None = None
        self._draining = False
        self.discovered = asyncio.Event()  # the first complete set of replicas is known
        self.admin_url = ""

    async def __aenter__(self) -> Self:
        s = self.settings
        self.router = Router(
            POLICIES[s.routing.policy](),
            index_bytes_max=s.routing.index_bytes_max,
            memory_max=s.routing.memory_max,
            blocks_max_default=s.routing.blocks_max_default,
            held_blocks_max=s.events.blocks_max,
            held_bytes_max=s.events.index_bytes_max,
            repeats=s.events.announce,
            graded=self._graded,
            resync=lambda id_: self._events.resync(id_) if self._events else None,
            slow_start_s=s.upstream.slow_start_s,
            stuck_after_s=s.upstream.stuck_after_s,
            stood=self._stood,
            cleared=lambda id_: self.warmer.cleared(id_),
            suspect=lambda id_: self._events.suspect(id_, "connection refused") if self._events else None,
            explainer=Explainer(s.observatory.blocks_max, replay_window_s=s.observatory.replay_window_s)
            if s.observatory.enabled
            else None,
        )
        async with closed_on_error(self._stack):
            self._build()
            if self.prompts is not None:
                await self._load_tokenizers(self.prompts)  # first: it holds up everything else
            await self._follow()
            await self._listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def _build(self) -> None:
        s = self.settings
        if not s.replicas and s.discovery.source == StaticDiscovery.source:
            log.warning("no replicas are configured: give --replica URL, or `replicas` or `discovery` in the settings")
        self._prober = Prober(
            self.router,
            self._lost,
            on_ready=self._became_ready,
            interval_s=s.probe.interval_s,
            timeout_s=s.probe.timeout_s,
            api_key=s.probe.api_key,
            models_interval_s=s.probe.models_interval_s,
            page_bytes_max=s.probe.page_bytes_max,
            kv_tokens_max=s.routing.kv_tokens_max,
            tls=self._tls,
        )
        self._stack.push_async_callback(self._prober.close)
        self.metrics = Metrics(self.router, time.monotonic, self._figures(), process=True)
        self.admin_token = secrets.read(s.admin.token, s.admin.token_file)
        self._upstream_key = secrets.read(s.upstream.api_key, s.upstream.api_key_file)
        self._replicas = StaticDiscovery(s.replicas)
        self._discoveries = Together(self._replicas, source_of(s.discovery), replicas_max=s.discovery.replicas_max)
        self.pages = Pages(
            self.router,
            self.metrics,
            ready=self._ready,
            clock=time.monotonic,
            decisions_max=s.limits.decisions_max,
            streams=self._stream,
            window=lambda id_: self.admission.window(id_),
            added=lambda id_: Replica(id_).url in self._replicas.added,
            warming=lambda id_: self.warmer.warming(id_),
            discoveries=lambda: msgspec.to_builtins(self._discoveries.statuses()),
        )
        if s.observatory.enabled:
            self.observatory = Observatory(
                self.router,
                s.observatory,
                tenant=self.metrics.tenant,
                clock=time.monotonic,
                decisions=self.pages.newest,
                window=lambda id_: self.admission.window(id_),
            )
            self._task(self.observatory.watch(lambda: self.edges.templates()))
        self.placer = LocalPlacer(
            self.router,
            clock=time.monotonic,
            event_wait_s=s.events.wait_s,
            response_ids_max=s.limits.response_ids_max,
            private_responses=bool(s.auth.keys_file),
            observe=self.observe,
            failed=self._failed,
            refused=self._refused,
            page=self.pages.page,
            limits=s.admission,
            load_stale_s=STALE_PROBES * s.probe.interval_s,
            shed=self.metrics.shed,
        )
        self.admission = self.placer.admission
        self._prewarm()
        self.keys = keys_of(s)
        if s.events.enabled:
            self._trust()
        self._ranks = Ranks(
            interval_s=s.probe.interval_s,
            again_s=s.probe.models_interval_s,
            timeout_s=s.probe.timeout_s,
            api_key=s.probe.api_key,
            page_bytes_max=s.probe.page_bytes_max,
            tls=self._tls,
        )
        self._stack.push_async_callback(self._ranks.close)
        self._task(self.totals.own_stalls.watch())
        self._task(self._check())
        self._task(self._admit())

    def _prewarm(self) -> None:
        s, observatory = self.settings, self.observatory
        sender = Sender(
            self.router,
            self.admission,
            clock=time.monotonic,
            api_key=lambda: self._upstream_key or s.probe.api_key,
            tls=self._tls,
        )
        self.warmer = Warmer(
            self.router,
            sender,
            s.prewarm,
            clock=time.monotonic,
            hottest=observatory.hottest if observatory is not None else lambda _: (),
            counted=self.metrics.prewarmed,
            released=lambda id_: self.edges.ready(id_),
        )
        self._stack.push_async_callback(self.warmer.close)
        self.prewarm_page = PrewarmPage(self.router, self.warmer)
        if observatory is not None:
            observatory.warming = self.warmer.warming

    def _trust(self) -> None:
        s = self.settings
        self.prompts = make_prompts(s)
        self._stack.callback(self.prompts.close)
        asker = Asker(api_key=s.probe.api_key, timeout_s=s.probe.timeout_s, tls=self._tls)
        self._stack.push_async_callback(asker.close)
        trust = Trust(
            self.router,
            self.prompts,
            asker,
            ask_replicas=s.tokens.ask_replicas,
            verify=s.tokens.verify,
            verify_interval_s=s.tokens.verify_interval_s,
        )
        self._task(trust.watch())

    async def _load_tokenizers(self, prompts: Prompts) -> None:
        """Not for ever: a hub may be slow, or behind a firewall that swallows what is sent to it."""
        try:
            async with asyncio.timeout(TOKENIZERS_S):
                await prompts.prepare_all()
        except TimeoutError:
            log.warning("tokenizers are not loaded yet: until they are, prompts are placed by estimate")

    async def _follow(self) -> None:
        """Events, and then replicas: each is followed from the moment it is known."""
        s = self.settings
        if s.events.enabled:
            self._events = Subscriber(
                self.router.knowledge,
                endpoints=event_endpoints(s.events.endpoints),
                bind=s.events.bind,
                topics=event_topics(s.events.topics),
                api_key=s.probe.api_key,
                tls=self._tls,
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
                announcer = Announcer(self.router, api_key=s.probe.api_key, tls=self._tls)
                self._stack.push_async_callback(announcer.close)
                self._task(announcer.watch())
        self._stack.push_async_callback(self._stop_watching)
        self._task(self._discover())

    @property
    def keys(self) -> Keys | None:
        """Whose requests are told apart; None where the router asks for no keys. Replaced as a whole."""
        return self._keys

    @keys.setter
    def keys(self, keys: Keys | None) -> None:
        self._keys = keys
        tenants = keys.tenants if keys is not None else {}
        self.metrics.know_tenants(tenants, self.settings.auth.tenants_max)
        self.admission.set_tenants(tenants)

    # -- what it is told -----------------------------------------------------------------------------------------

    def observe(self, record: RequestRecord) -> None:
        """A request ended; its log line is the edge's."""
        self.metrics.observe(record)
        self.pages.decisions.append(record)
        if self.observatory is not None:
            self.observatory.observe(record)

    def serve(self, edges: Edges) -> None:
        """From now on these edges place here, are told of replicas, and are asked what they have counted."""
        self.edges = edges

    def drain(self) -> None:
        """From now on `/readyz` says that no more should come."""
        self._draining = True
        self.admission.release()

    def reload(self, settings: Settings) -> None:
        """Take over what may change while it runs (see reloading.py). Replicas come and go as in any other discovery.
        May raise SettingsError, but only before anything has changed."""
        upstream = settings.upstream
        with files_of_settings():
            keys = keys_of(settings)
            admin_token = secrets.read(settings.admin.token, settings.admin.token_file)
            upstream_key = secrets.read(upstream.api_key, upstream.api_key_file)
            tls.renew(self._tls, upstream)  # sessions of probes go on with it
        self.settings, self.keys, self.admin_token = settings, keys, admin_token
        self._upstream_key = upstream_key
        self.router.configure(slow_start_s=upstream.slow_start_s, stuck_after_s=upstream.stuck_after_s)
        self.admission.configure(settings.admission)
        self.warmer.configure(settings.prewarm)
        self._additions.allowed = allowed(settings.admin.replicas_allowed)
        self._replicas.replace(settings.replicas)

    def reloaded(self, result: str) -> None:
        """The settings were read again: `ok` if they hold now, `refused` if the old ones do."""
        self.metrics.reloaded(result, time.time())

    def _ready(self) -> bool:
        return not self._draining and bool(self.router.fleet.ready())

    def _graded(self, replica: str, grade: Grade, why: str) -> None:
        """Each change of a replica's grade is logged once, with its reason; a fall from `exact` is a warning."""
        fell = self._grades.get(replica) is Grade.EXACT
        self._grades[replica] = grade
        fields = {"replica": replica, "grade": grade.value, "why": why}
        log.log(logging.WARNING if fell else logging.INFO, "replica's grade", extra={"fields": fields})

    def _stood(self, replica: str, state: State, why: str) -> None:
        """Requests say of a replica what its health checks do not: each change is logged once."""
        level = logging.INFO if state is State.CLOSED else logging.WARNING
        log.log(level, "replica's breaker", extra={"fields": {"replica": replica, "state": state.value, "why": why}})

    def _failed(self, replica: str, kind: str) -> None:
        """An attempt failed; whoever left meanwhile has no series any more."""
        self.metrics.failed(replica if replica in self.router.fleet.members else None, kind)

    def _refused(self, replica: str) -> None:
        """An edge found that nobody listens there: all ranks of that server are gone at once."""
        for id_ in self.router.fleet.same_server(replica):
            if self.router.observe_health(id_, False, "connection refused", proof=True):
                self.router.forget(id_)
                self._prober.hurry(id_)
                fields = {"replica": id_, "why": "connection refused"}
                log.warning("replica does not answer as it should", extra={"fields": fields})
        self._lost(replica)

    def _lost(self, replica: str) -> None:
        """Nobody listens there any more; who comes back may have another number of ranks."""
        self.edges.lost(replica)
        for id_ in self.router.fleet.same_server(replica):
            self.warmer.refused(id_)
        self._ranks.doubt(replica)

    def _became_ready(self, replica: str) -> None:
        self.warmer.ready(replica)
        self.edges.ready(replica)

    async def _check(self) -> None:
        """Look for stuck replicas, and now and then hold what events say against what engines count."""
        look = 0
        while True:
            await asyncio.sleep(LOOK_S)
            for found in self.router.look(time.monotonic()):
                for replica in found:
                    self.edges.stuck(replica)
                await asyncio.sleep(0)  # replicas are judged a few at a time: others are not to wait for all of them
            look += 1
            if not look % LOOKS_A_CHECK:
                self.router.check(time.monotonic())

    async def _admit(self) -> None:
        """Let in who waits, when something else than the end of an answer made room."""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.admission.tick()
            except Exception:  # whoever waits must not wait for ever
                log.exception("bug: admission failed inside the hub")

    # -- what it shows -------------------------------------------------------------------------------------------

    def _stream_figures(self) -> dict[str, dict[str, float | None]]:
        if self._events is None:
            return {}
        rows = self._events.stats().items()
        return {id_: {**msgspec.to_builtins(row.counts), "blocks": row.blocks, "lag_s": row.lag_s} for id_, row in rows}

    def _figures(self) -> Figures:
        totals = self.totals
        return Figures(
            in_flight=lambda: self.edges.in_flight,
            streams=self._stream_figures,
            prompts=lambda: totals.prompts(dict(self.prompts.counts()) if self.prompts else {}),
            queued=lambda: self.admission.queued(),
            held=lambda: self.admission.held(),
            discoveries=lambda: msgspec.to_builtins(self._discoveries.statuses()),
            ledger=self._ledger,
            totals=totals,
        )

    def _ledger(self) -> Ledger | None:
        return self.observatory.settled() if self.observatory is not None else None

    def _stream(self, replica: str) -> dict[str, Any] | None:
        stats = self._events.stat(replica) if self._events else None
        return msgspec.to_builtins(stats) if stats else None

    async def _listen(self) -> None:
        self._additions = Additions(self._replicas, allowed(self.settings.admin.replicas_allowed))
        routes = [*self.pages.routes(), *self._additions.routes(), *self.prewarm_page.routes()]
        if self.observatory is not None:
            routes += self.observatory.routes()
        self.admin_url = await listen(
            self._stack, routes, self.settings, token=lambda: self.admin_token, sock=self._admin_socket
        )

    # -- replicas ------------------------------------------------------------------------------------------------

    async def _discover(self) -> None:
        async for replicas in self._ranks.follow(self._discoveries.watch()):
            self._replace(replicas)
            self.discovered.set()

    async def probe_now(self) -> None:
        """Ask every replica once, without waiting for the next round."""
        await self.discovered.wait()
        await asyncio.gather(*(self._prober.probe(id_, models=True) for id_ in list(self.router.fleet.members)))

    def _replace(self, replicas: frozenset[Replica]) -> None:
        """A complete set. Where another engine has come to an address, all that was there ends, and begins anew."""
        by_id, members = {replica.id: replica for replica in replicas}, self.router.fleet.members
        before = {id_: member.replica for id_, member in members.items()}
        joined, left = self.router.replace(by_id[id_] for id_ in sorted(by_id))
        for id_ in left:
            log.info("replica left", extra={"fields": _named(before[id_])})
            for task in self._watching.pop(id_):
                task.cancel()
            self.metrics.left(id_)
            self._prober.left(id_)
            self._grades.pop(id_, None)
            self.warmer.left(id_)
            self.edges.left(id_)
        for id_ in before.keys() - left:
            if (ready := by_id[id_].ready) != before[id_].ready:
                text = "replica is ready again" if ready else "replica is not ready"
                log.info(text, extra={"fields": _named(by_id[id_])})
                (self._became_ready if ready else self.edges.left)(id_)
            if self._events is not None and members[id_].replica != before[id_]:
                self._events.update(members[id_].replica)
        for id_ in joined:
            self.metrics.joined(id_)
            self.warmer.joined(id_, new=self.discovered.is_set())
            log.info("replica joined", extra={"fields": _named(by_id[id_])})
            work: list[Coroutine[None, None, None]] = [self._prober.watch(id_)]
            if self._events is not None:
                work.append(self._events.watch(by_id[id_]))
            self._watching[id_] = [asyncio.create_task(guarded(each)) for each in work]

    async def _stop_watching(self) -> None:
        tasks = [task for tasks in self._watching.values() for task in tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _task(self, work: Coroutine[None, None, None]) -> None:
        self._stack.push_async_callback(in_background(work))


def _named(replica: Replica) -> dict[str, str]:
    """For a log line: the facts that there are."""
    facts = {"replica": replica.id, "name": replica.name, "node": replica.node, "instance": replica.instance}
    return {name: fact for name, fact in facts.items() if fact}
