"""The placer of this process: it asks the Router here, after admission has had its say."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Hashable

from router.core.admission.queue import Pool, Ticket
from router.core.admission.windows import Limits, NoLimits
from router.core.facts.replicas import REST_MAX_S
from router.core.facts.requests import Priority
from router.core.fleet.lease import Lease
from router.core.placement.router import Router
from router.core.placement.wanted import Wanted
from router.hub.admitter import Admitter, Answered
from router.hub.owners import ResponseOwners
from router.placer import LEFT, Page, TokenView
from router.telemetry.record import RequestRecord

LISTEN_S = 0.001


class LocalPlacer:
    """Places by the Router in this process."""

    def __init__(
        self,
        router: Router,
        *,
        clock: Callable[[], float],
        event_wait_s: float,
        response_ids_max: int,
        private_responses: bool = False,
        observe: Callable[[RequestRecord], None],
        failed: Callable[[str, str], None],
        refused: Callable[[str], None],
        page: Callable[[str], Awaitable[Page | None]],
        limits: Limits | None = None,
        load_stale_s: float = 3.0,
        shed: Callable[[str, Priority], None] = lambda *_: None,
    ) -> None:
        """Without `limits` nobody waits for a place; `shed(code, priority)` hears of each request turned away."""
        self._router = router
        self.admission: Admitter[Wanted] = Admitter(
            router, self, limits or NoLimits(), stale_s=load_stale_s, clock=clock, shed=shed
        )
        self._clock = clock
        self._event_wait_s = event_wait_s
        self.owners = ResponseOwners(response_ids_max, private=private_responses)
        self.resolve = router.models.resolve
        self.engines = router.models.engines
        self.known_as = router.models.names.known_as
        self.first_token = router.first_token
        self.finish = self.admission.finish
        self.made_response = self.owners.learn
        self.report = observe
        self.failed = failed
        self.refused = refused
        self.page = page

    def follows(self) -> bool:
        """See Placer."""
        return self._router.knowledge.follows

    def token_view(self, model: str) -> TokenView | None:
        """See Placer."""
        models = self._router.models
        if not models.follows(model):
            return None
        return TokenView(*models.engine(model), models.adapter(model), tuple(self._router.knowledge.block_sizes()))

    async def place(self, wanted: Wanted, exclude: frozenset[str]) -> Lease:
        """See Placer. Whoever no longer wants to wait leaves no trace."""
        if wanted.tokens is not None and self.behind(wanted) and not exclude:
            await self.listen(wanted)
        ticket = self.admission.ask(wanted, exclude, lambda answer: self._answered(future, answer))
        if not isinstance(ticket, Ticket):
            return ticket
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()  # no answer comes before a turn does
        try:
            return await future
        except asyncio.CancelledError:
            self.admission.take_back(ticket)
            if future.done() and not future.cancelled() and future.exception() is None:  # at the last moment
                self.finish(future.result(), LEFT, self._clock())
            raise

    def stands(self, lease: Lease) -> bool:
        """See Placer."""
        member = self._router.fleet.members.get(lease.replica)
        return member is not None and member.replica.ready and lease.id in member.leases

    def _answered(self, future: asyncio.Future[Lease], answer: Lease | Exception) -> None:
        if isinstance(answer, Exception):
            if not future.done():
                future.set_exception(answer)
        elif future.done():  # cancelled, and its task has not run since
            self.finish(answer, LEFT, self._clock())
        else:
            future.set_result(answer)

    async def listen(self, wanted: Wanted) -> None:
        """An answer may be here before the event of its last block, and the next request right behind it: the event is
        waited for, but not for long."""
        until_s = self._clock() + self._event_wait_s
        while self.behind(wanted) and self._clock() < until_s:  # noqa: ASYNC110 - rare, short
            await asyncio.sleep(LISTEN_S)

    def behind(self, wanted: Wanted) -> bool:
        """Whether events that bear on this prompt are known to be on their way."""
        return wanted.tokens is not None and self._router.knowledge.behind(wanted.tokens, self._clock())

    def ask(self, wanted: Wanted, exclude: frozenset[str], answered: Answered) -> Lease | Ticket:
        """Place, whatever is on its way, or wait: see Admitter. Raises NoReplica, Shed."""
        return self.admission.ask(wanted, exclude, answered)

    def route(self, wanted: Wanted, exclude: frozenset[str], full: Collection[str], *, may_hold: bool = False) -> Lease:
        """See admitter.Places."""
        only = self.owners.owner(wanted.response_id, wanted.tenant)
        return self._router.route(
            wanted.ask,
            wanted.model,
            wanted.chain,
            self._clock(),
            ring_key=wanted.ring_key,
            tokens=wanted.tokens,
            body_tokens=wanted.body_tokens,
            exclude=exclude,
            only=only,
            full=full,
            sighting=wanted.sighting,
            may_hold=may_hold and only is None,
        )

    def alive(self, replica: str) -> None:
        """See Placer."""
        self._router.alive(replica, self._clock())

    def rest(self, replica: str, for_s: float) -> None:
        """See Placer."""
        if for_s > 0:
            self._router.rest(replica, self._clock() + min(for_s, REST_MAX_S))

    def pool(self, wanted: Wanted) -> Pool:
        """See admitter.Places."""
        return wanted.model, self.owners.owner(wanted.response_id, wanted.tenant)

    def prompt_tokens(self, wanted: Wanted) -> int:
        """See admitter.Places."""
        prompt = wanted.ask.prompt
        if wanted.tokens is not None and wanted.tokens.tokens:
            return wanted.tokens.tokens
        if prompt is None:
            return wanted.body_tokens
        return self._router.models.tokens(wanted.model or "").tokens_of(prompt)

    def identity(self, wanted: Wanted) -> Hashable | None:
        """See admitter.Places: the whole prompt, and whose it is."""
        return (wanted.tenant, wanted.chain.end_key) if wanted.chain is not None else None

    def turned_away(self, wanted: Wanted) -> None:
        """See admitter.Places."""
        if self._router.explainer is not None and wanted.chain is not None:
            self._router.explainer.turned_away(wanted.chain)

    def others_ready(self, tried: frozenset[str]) -> bool:
        """See Placer."""
        return any(member.id not in tried for member in self._router.fleet.usable())
