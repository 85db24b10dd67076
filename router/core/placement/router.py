"""Router: turns a request into a lease, and takes the lease back with its outcome.

    route:   filter the replicas, match the prompt, price the candidates, let the policy choose, plan if two replicas
             serve the request together, open the lease
    finish:  give the lease back, keep what prompt and answer left in the cache, learn from the answer

The knowledge about replicas is updated by core/fleet/observations.py from the engines' reports, and by
core/placement/answer_feedback.py from finished answers.

The Router does not depend on HTTP: the same object places for a proxy, for a gateway's endpoint picker, and in virtual
time. It is synchronous and single-threaded by contract: a method returns before the next begins, so there are no locks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from router.core.cache_state.event_index import BYTES_MAX as STORED_BYTES_MAX
from router.core.cache_state.prefix_index import PrefixIndex
from router.core.estimators.response_memory import ResponseMemory
from router.core.estimators.reuse import ReuseModel
from router.core.estimators.tier_load import LoadModel
from router.core.fleet import activity, stall_detector
from router.core.fleet.breaker import State
from router.core.fleet.eligibility import Eligibility
from router.core.fleet.expected_models import ExpectedModels
from router.core.fleet.lease import DECODE, Lease
from router.core.fleet.member import ReplicaState
from router.core.fleet.observations import Observations
from router.core.insights.breakdown import Explainer
from router.core.placement.answer_feedback import OutcomeFeedback
from router.core.placement.answer_reuse import AnswerReuse
from router.core.placement.conversation_affinity import Conversations
from router.core.placement.disaggregator import Disaggregator, DisaggregatorFactory
from router.core.placement.filters import NOBODY, filter_members
from router.core.placement.lease_factory import LeaseFactory
from router.core.placement.lease_listener import LeaseListener
from router.core.placement.placement_request import PlacementRequest
from router.core.placement.policies import Policy, RingOrdered
from router.core.placement.prefix_match import Matcher, PromptMatch
from router.core.placement.priced_request import PlacementScope, PricedRequest
from router.core.placement.receipt_factory import ReceiptFactory
from router.core.placement.ring_order import RingOrder
from router.core.placement.scoring import PRICE_ALL_BELOW, CostModel, long_enough
from router.core.placement.ttft_feasibility import in_time, predicted_ms
from router.core.types.placements import (
    Candidate,
    Confidence,
    Deferred,
    DisaggPlan,
    EndReason,
    Outcome,
    PlacementContext,
    PolicyDecision,
)
from router.core.types.replicas import Replica
from router.core.types.requests import Priority

NEAR = 4  # places on the ring that are considered for every request
STORED_BLOCKS_MAX = 1 << 20  # blocks of one replica that its events may add to the index


class Router:
    """All state of placement. `now_s` is any monotonic clock.

    Its parts have their own methods: `fleet` (replicas), `observations` (reports of engines), `fitness` (cooldowns),
    `models` (names, token counts), `index` (our estimate of caches), `knowledge` (state from events), `disaggregator`
    (requests that two replicas serve) and `outcomes` (evidence in answers).
    """

    def __init__(
        self,
        policy: Policy,
        *,
        index_bytes_max: int,
        remembered_prompts_max: int,
        default_cache_blocks: int,
        stored_blocks_max: int = STORED_BLOCKS_MAX,
        stored_bytes_max: int = STORED_BYTES_MAX,
        repeats: bool = False,
        tiers: bool = True,
        load_guesses: Mapping[str, LoadModel] | None = None,
        graded: Callable[[str, Confidence, str], None] = lambda *_: None,
        resync: Callable[[str], None] = lambda _: None,
        suspect: Callable[[str], None] = lambda _: None,
        slow_start_s: float = 0.0,
        stall_timeout_s: float = 3.0,
        breaker_changed: Callable[[str, State, str], None] = lambda *_: None,
        cleared: Callable[[str], None] = lambda _: None,
        several: Callable[[str], None] = lambda _: None,
        explainer: Explainer | None = None,
        expected: ExpectedModels | None = None,
        disaggregation: DisaggregatorFactory | None = None,
    ) -> None:
        """Parameters that are callbacks:

        - `graded(replica, grade, why)` is called once for each change of grade.
        - `resync(replica)` requests a replay of a replica's events from the beginning.
        - `suspect(replica)` requests a proof that a replica's event stream is from the same process.
        - `breaker_changed(replica, state, why)` is called when a replica's breaker opens or closes.
        - `cleared(replica)` is called when a replica has lost its cache.
        - `several(replica)` is called when a replica's metrics prove to be from several processes.

        Parameters that are settings:

        - `slow_start_s`: 0 disables slow start.
        - `explainer`: with it receipts contain the reasons of cache misses.
        - `stored_blocks_max` limits the events of one replica, `stored_bytes_max` those of all.
        - `repeats`: engines may be asked to repeat events (cache_state/engine_blocks.py).
        - `tiers`: blocks in tiers other than the GPU count as cached.
        - `load_guesses`: initial load times by tier.
        - `expected`: models that may have no replica.
        - `disaggregation`: plans of two replicas for a request; None: one replica serves each request.
        """
        self.policy = policy
        self.watch: LeaseListener | None = None  # observer of leases: core/peer_sync
        # Ids of replicas that this router prefers among equals, because others take the rest
        # (core/peer_sync/applier.py).
        self.own: Collection[str] = ()
        self.index = PrefixIndex(index_bytes_max)
        self.answers = ResponseMemory(remembered_prompts_max)
        self.reuse = ReuseModel(remembered_prompts_max)
        self.observations = Observations(
            self.index,
            default_cache_blocks=default_cache_blocks,
            stored_blocks_max=stored_blocks_max,
            stored_bytes_max=stored_bytes_max,
            repeats=repeats,
            tiers=tiers,
            graded=graded,
            resync=resync,
            suspect=suspect,
            cleared=cleared,
            several=several,
            expected=expected,
        )
        self.fleet, self.knowledge = self.observations.fleet, self.observations.knowledge
        self.models = self.observations.models
        self.fleet.means.load_guesses.update(load_guesses or {})
        self.fitness = Eligibility(self.fleet, slow_start_s=slow_start_s, breaker_changed=breaker_changed)
        self._stall_timeout_s = stall_timeout_s
        credits_ = AnswerReuse(self.fleet, self.models, self.index)
        self._matcher = Matcher(self.models, self.index, self.knowledge, self.answers, credits_, self.fleet.pulls)
        self.conversations = Conversations(remembered_prompts_max, self.index, self.reuse)
        self._pricer = CostModel(self.fleet, self.index, self.knowledge, self.reuse)
        self._opener = LeaseFactory(
            self.fleet, self.fitness, self.index, self.knowledge, self.reuse, self.conversations
        )
        self._ring = RingOrder(policy.order_by_ring) if isinstance(policy, RingOrdered) else None
        self._receipts = ReceiptFactory(self.fleet, self._pricer, policy, explainer)
        self.disaggregator = (
            Disaggregator(self.fleet, self.fitness)
            if disaggregation is None
            else disaggregation(
                self.fleet, self.fitness, self._pricer, policy, self._opener, self.first_token, self.finish
            )
        )
        self.outcomes = OutcomeFeedback(self.fleet, self.fitness, self.models, self.answers, self.knowledge)

    def configure(self, *, slow_start_s: float, stall_timeout_s: float) -> None:
        """Apply other settings."""
        self.fitness.slow_start_s, self._stall_timeout_s = slow_start_s, stall_timeout_s

    def replace(self, replicas: Iterable[Replica]) -> tuple[list[str], list[str]]:
        """Apply discovery's complete set; returns ids that joined and ids that left (`Observations.replace`)."""
        joined, left = self.observations.replace(replicas)
        for id_ in left:
            self._pricer.forget(id_)
        return joined, left

    @property
    def members(self) -> list[ReplicaState]:
        """All replicas, in a stable order. The list is a copy."""
        return list(self.fleet.members.values())

    def rest(self, id_: str, until_s: float, *, full: bool = False) -> None:
        """Start a replica's cooldown until this time, as the replica requested: nothing is placed there before. It does
        not count as a failure. With `full` the reason was a full queue: if no other replica is left, one request at a
        time may try it."""
        member = self.fleet.members.get(id_)
        if member is not None:
            self.fitness.set_cooldown(member, until_s, full=full)

    def set_p2p_address(self, id_: str, address: str) -> None:
        """Record that a replica takes part in P2P KV transfer: it serves its CPU memory to peers at this address
        (`host:port`), and fetches from them. "": it does not."""
        if id_ in self.fleet.members:
            self.fleet.pulls.prove(id_, address)

    def pull_address(self, id_: str) -> str | None:
        """Return the address at which a replica's engine takes requests of its peers (`host:port`); None if unknown."""
        peer = self.fleet.pulls.peers.get(id_)
        return None if peer is None else peer.address

    def takes_whole(self, member: ReplicaState) -> bool:
        """True if a replica takes requests without disaggregated prefill."""
        return member.id not in self.fleet.stage_only

    def scan_for_stalls(self, now_s: float) -> Iterator[list[str]]:
        """Search for stalled replicas; it must be called a few times a second. Yields replicas with silent requests
        that must be tried elsewhere. Each step covers a slice of the fleet, so that other work can run in between."""
        return stall_detector.scan(self.fleet, self.fitness, now_s, self._stall_timeout_s)

    def list_active(self, since_s: float) -> tuple[list[str], list[str]]:
        """Return the replicas with open leases in two lists: those active since this time, and the others that are
        healthy but report no token counter (core/fleet/activity.py)."""
        return activity.list_active(self.fleet, since_s)

    # -- placing -------------------------------------------------------------------------------------------------

    def route(
        self,
        wanted: PlacementRequest,
        now_s: float,
        *,
        exclude: frozenset[str] = NOBODY,
        only: str | frozenset[str] | None = None,
        full: Collection[str] = (),
        may_hold_back: bool = False,
    ) -> Lease:
        """Place one request on a fit replica that serves its model (None: any model).

        - `exclude`: replicas that failed the request. With them the placement is a retry.
        - `only`: either the one replica that can answer, which may be warming up (`Fleet.warm_up`), or the addresses of
          those that can.
        - `full`: replicas that are skipped if there are others.
        - `may_hold_back`: the request may be deferred.

        Raises NoReplicaReady if no candidate is left, and Deferred if the request should be placed later. Raises Shed
        if all candidates have requested a cooldown, or if none keeps the deadline of a request of low priority.
        """
        scope: PlacementScope | None = PlacementScope(exclude, only, full, not wanted.may_split)
        while scope is not None:
            priced = self._price(wanted, scope, now_s)
            choice, chosen = self._choose(priced, may_hold_back=may_hold_back)
            plan = self.disaggregator.plan(priced, chosen)
            if plan is not None:
                chosen = plan.decode
                break
            # another scope if the chosen replica serves only one stage of a request
            scope = self.disaggregator.narrow(priced, chosen)
        return self._open(priced, choice, chosen, plan)

    def predict_ttft(
        self, wanted: PlacementRequest, now_s: float, only: str | frozenset[str] | None = None
    ) -> tuple[float, float]:
        """Return the predicted time to the first token on the fastest replica now, and the shortest prefill time, both
        in milliseconds. Raises NoReplicaReady and Shed."""
        fleet, scope = self.fleet.members, PlacementScope(NOBODY, only, (), not wanted.may_split)
        priced = self._price(wanted, scope, now_s, bound=False)
        times_ms = [predicted_ms(each, fleet) for each in priced.candidates]
        prefills_ms = [each.loading_ms + each.uncached_ms for each in priced.candidates]
        plan = self.disaggregator.plan(priced, priced.candidates[times_ms.index(min(times_ms))])
        if plan is not None:
            times_ms.append(self.disaggregator.predicted_ms(plan))
            prefills_ms.append(plan.prefill.loading_ms + plan.prefill.uncached_ms)
        return min(times_ms), min(prefills_ms)

    def note_shed(self, wanted: PlacementRequest) -> None:
        """Record that a request will not be placed; its text may still be stored."""
        self._receipts.note_shed(wanted)

    def first_token(self, lease: Lease, now_s: float) -> None:
        """Record the first body event of a stream."""
        member = self.fleet.members.get(lease.replica)
        if member and lease.id in member.leases and lease.first_token_s is None:
            if lease.role == DECODE:
                self.disaggregator.first_token(member, lease, self.watch, now_s)
                return
            alone = lease.receipt.pull is not None and lease.receipt.pull.alone and member.is_clean_sample(lease)
            member.on_first_token(lease, now_s)
            if lease.receipt.pull is not None:
                self.fleet.pulls.on_transfer_complete(lease, lease.receipt.pull, now_s, alone=alone)
            if self.watch is not None:
                self.watch.first_token(lease, now_s)
            if lease.streams:
                took_ms = (now_s - lease.placed_s) * 1e3
                if lease.placed_s >= member.breaker.until_s:  # otherwise it is not a trial
                    member.own_speed.delay.observe(lease.expected_ms - lease.receipt.delay_ms, took_ms, now_s)
                member.speeds.first_tokens.observe(lease.expected_ms, took_ms)
            if member.breaker.backoff_s:
                self.fitness.token(member, lease, now_s)

    def finish_prefill(self, lease: Lease, outcome: Outcome, now_s: float) -> None:
        """End the prefill stage of a decode lease, successful or not. A second call has no effect."""
        self.disaggregator.finish_prefill(lease, outcome, self.watch, now_s)

    def finish(self, lease: Lease, outcome: Outcome, now_s: float) -> None:
        """Close a lease at the end of the answer, whatever the outcome. A second call has no effect."""
        if lease.receipt.pull is not None:
            self.fleet.pulls.leave(lease, lease.receipt.pull, now_s)
        if lease.role == DECODE:
            outcome = self.disaggregator.finish(lease, outcome, now_s)
        member = self.fleet.members.get(lease.replica)
        if member is None:
            if self.watch is not None:
                self.watch.on_orphaned(lease)
            return
        ok, left = outcome.ending is EndReason.OK, outcome.ending is EndReason.CLIENT_LEFT
        late = left and lease.placed_s >= member.breaker.until_s
        late = late and stall_detector.is_late(member, lease, now_s, self._stall_timeout_s)
        if late and self.fleet.waits_for_peer is not None:
            late = not self.fleet.waits_for_peer(lease, now_s, self._stall_timeout_s)
        if not member.close(lease, now_s, member.speeds.mean_answer_tokens):
            return
        if left:
            member.evidence.on_client_disconnect(lease, late=late)
        computed, prompt = ok or lease.first_token_s is not None, lease.prompt
        if prompt.stored is not None and prompt.token_ids is not None:
            grown = outcome.usage.answer_blocks(prompt.stored.block_tokens) if outcome.usage else 0
            self.knowledge.settle(
                lease.replica, lease.id, prompt.token_ids, now_s, computed=computed, grown_blocks=grown
            )
        computed = computed or (left and not lease.streams)  # the prompt may have been computed unseen
        answer_keys = self._matcher.credits.keys_of_answer(lease, outcome) if computed else []
        if self.watch is not None:
            self.watch.on_ended(lease, outcome, len(answer_keys), computed=computed)
        if computed:
            self.index.unpin(lease.replica, lease.id, now_s, grown=answer_keys)
            if (kin := lease.conversation) is not None:
                self.conversations.note_response(kin.name, lease.replica, answer_keys, now_s, final=kin.final)
        else:
            self.index.retract(lease.replica, lease.id)
            if not self.disaggregator.has_computed_prompt(lease):
                self._receipts.take_back(lease, member)
        if member.breaker.failures or member.breaker.backoff_s or not (ok or left):
            self.fitness.on_lease_ended(member, lease, outcome.ending, now_s)
        if ok:
            member.evidence.on_response_end(lease, now_s)
            self.outcomes.learn(member, lease, outcome, now_s)

    # -- steps of route ------------------------------------------------------------------------------------------

    def _price(
        self, wanted: PlacementRequest, scope: PlacementScope, now_s: float, *, bound: bool = True
    ) -> PricedRequest:
        """Filter the members, match the prompt and price the candidates: all members, or of many members those that can
        be the cheapest. A request is `bound` to its deadline and its conversation if it is placed now."""
        exclude, only = scope.exclude, scope.only
        members = filter_members(
            self.fleet, self.fitness, wanted.model, exclude, only, scope.full, now_s, whole=scope.whole
        )
        if bound:
            self.knowledge.tick(now_s)
        match = self._matcher.match(wanted, members[0].speeds, now_s)
        expected = ""
        if bound:
            if match.size.prompt_tokens > self.fleet.context_tokens_min:
                members = long_enough(members, wanted, match.size.prompt_tokens)
            if wanted.conversation is not None:
                expected = self.conversations.find_expected_replica(wanted, match)
        market, candidates = self._price_members(members, match, wanted.ring_key, expected, now_s)
        priced = PricedRequest(wanted, scope, members, match, market, candidates, candidates, now_s)
        if wanted.due_s is not None:
            priced.left_ms = (wanted.due_s - now_s) * 1e3
            priced.may_shed = bound and wanted.priority is Priority.LOW and not exclude
        return priced

    def _price_members(
        self, members: list[ReplicaState], match: PromptMatch, ring_key: str, expected: str, now_s: float
    ) -> tuple[PlacementContext, list[Candidate]]:
        pricer, count = self._pricer, len(members)
        survey = pricer.survey(members, now_s)
        waits_ms, order = survey.waits_ms, list[str]()
        if count > PRICE_ALL_BELOW and self._ring is not None:
            order = self._ring.order(ring_key, members)
            listed = pricer.shortlist(members, match, survey, [match.home, expected, *order[:NEAR]])
            members, waits_ms = [members[n] for n in listed], [waits_ms[n] for n in listed]
        candidates = pricer.candidates(members, waits_ms, survey.slower, match, now_s)
        tie_ms, unit_ms = members[0].speeds.units()
        backlog, median = survey.backlog_ms / unit_ms, survey.median_ms / unit_ms
        in_flight, elsewhere = survey.in_flight, self.fleet.other_router_probability
        market = PlacementContext(
            ring_key, tie_ms, unit_ms, backlog, median, count, in_flight, match.home, elsewhere, expected, order
        )
        market.preferred_replicas = self.own
        return market, candidates

    def _choose(self, priced: PricedRequest, *, may_hold_back: bool) -> tuple[PolicyDecision, Candidate]:
        """Let the policy choose among the candidates that keep the deadline. Raises Deferred, and Shed if none keeps
        the deadline of a request that may be shed."""
        candidates = priced.candidates
        if priced.left_ms is not None:
            alone = priced.scope.whole or not self.disaggregator.may_plan(priced.wanted, priced.scope.only)
            may_shed = priced.may_shed and alone
            priced.able = in_time(candidates, self.fleet.members, priced.left_ms, may_shed=may_shed)
        choice = self.policy.choose(priced.market, priced.able)
        if may_hold_back and choice.hold_back:
            raise Deferred
        chosen = candidates[0]
        for chosen in candidates:
            if chosen.id == choice.id:
                break
        return choice, chosen

    def _open(self, priced: PricedRequest, choice: PolicyDecision, chosen: Candidate, plan: DisaggPlan | None) -> Lease:
        """Open the lease of a placement, with its receipt."""
        wanted, match, now_s = priced.wanted, priced.matched, priced.now_s
        if match.home:
            self.models.tokens(wanted.model or "").count_credit()
        if match.credit is not None:
            self._matcher.credits.take(match.credit, now_s)
        receipt, holder = self._receipts.make(priced, chosen, choice, plan)
        speeds = self.fleet.members[chosen.id].speeds
        if plan is not None:
            lasts_ms, first_tokens = plan.expected_ms, speeds.first_tokens_split
            receipt.brought = self.disaggregator.external_kv(plan)
        else:
            lasts_ms, first_tokens = chosen.first_token_ms, speeds.first_tokens
            if match.sources:
                lasts_ms += self._receipts.add_pull(receipt, priced, chosen)
        receipt.ttft_ms, receipt.ttft_p90_ms = first_tokens.predict(lasts_ms)
        if wanted.response_bypasses_router and receipt.grade is Confidence.ESTIMATED:
            receipt.grade = Confidence.UNSEEN
        self._receipts.explain(receipt, priced, holder)
        if plan is not None:
            return self.disaggregator.open(priced, plan, receipt, self.watch, now_s)
        guessed = choice.guessed and not priced.scope.narrowed
        lease = self._opener.open(wanted, match, chosen, receipt, guessed, self.watch, now_s)
        lease.expected_ms = lasts_ms
        return lease
