"""Router: turns a request into a lease, and takes the lease back with its outcome.

    route:   filter who may, match the prompt, price the candidates, let the policy choose, open a lease
    finish:  give the lease back, keep what prompt and answer left in the cache, learn from the answer

The knowledge about replicas is updated by core/fleet/observations.py from the engines' reports, and by
core/placement/answer_feedback.py from finished answers.

The Router does not depend on HTTP: the same object places for a proxy, for a gateway's endpoint picker, and in virtual
time. It is synchronous and single-threaded by contract: a method returns before the next begins, so there are no locks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

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
from router.core.placement.capacity import CapacityPools
from router.core.placement.conversation_affinity import Conversations
from router.core.placement.disagg_leases import DisaggLeases
from router.core.placement.disagg_split import DisaggPlanner
from router.core.placement.filters import filter_members, refusal
from router.core.placement.lease_factory import LeaseFactory
from router.core.placement.lease_listener import LeaseListener
from router.core.placement.placement_request import PlacementRequest
from router.core.placement.policies import DisaggPolicy, Policy, PricingPolicy, PullPolicy, RingOrdered
from router.core.placement.prefix_match import Matcher, PromptMatch
from router.core.placement.receipts import reason_of, take_pull, trim_candidates
from router.core.placement.scoring import PRICE_ALL_BELOW, CostModel, long_enough
from router.core.placement.spill import spill
from router.core.placement.ttft_feasibility import expected_ms, in_time, predicted_ms, unreachable
from router.core.types.disagg_types import KvConnector, PairStatus
from router.core.types.placements import (
    Candidate,
    Confidence,
    Deferred,
    DisaggPlan,
    EndReason,
    ExternalKv,
    Outcome,
    PlacementContext,
    PlacementReason,
    PolicyDecision,
    PriceWeights,
    Receipt,
)
from router.core.types.replicas import Replica
from router.core.types.requests import Priority

NOBODY: frozenset[str] = frozenset()
NEAR = 4  # places on the ring that are considered for every request
STORED_BLOCKS_MAX = 1 << 20  # blocks of one replica that its events may add to the index
# Looking up an enum's member costs as much as a call.
_OK, _LEFT, _ESTIMATED, _LOW = EndReason.OK, EndReason.CLIENT_LEFT, Confidence.ESTIMATED, Priority.LOW


class Router:
    """All state of placement. `now_s` is any monotonic clock.

    Outside of the core only its methods are called. Three attributes are read that have methods of their own: `models`
    (names, token counts), `index` (our estimate of caches) and `knowledge` (state from events).
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
        """
        self.policy = policy
        self.watch: LeaseListener | None = None  # observer of leases: core/peer_sync
        # Ids of replicas that this router prefers among equals, because others take the rest
        # (core/peer_sync/applier.py).
        self.own: Collection[str] = ()
        self.explainer = explainer
        self.index = PrefixIndex(index_bytes_max)
        self.answers = ResponseMemory(remembered_prompts_max)
        self.reuse = ReuseModel(remembered_prompts_max)
        observations = Observations(
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
        self.fleet, self.knowledge, self.models = observations.fleet, observations.knowledge, observations.models
        self.fleet.means.load_guesses.update(load_guesses or {})
        self.fitness = Eligibility(self.fleet, slow_start_s=slow_start_s, breaker_changed=breaker_changed)
        self._stall_timeout_s = stall_timeout_s
        self._credits = AnswerReuse(self.fleet, self.models, self.index)
        self._matcher = Matcher(self.models, self.index, self.knowledge, self.answers, self._credits, self.fleet.pulls)
        self.conversations = Conversations(remembered_prompts_max, self.index, self.reuse)
        self._pricer = CostModel(self.fleet, self.index, self.knowledge, self.reuse)
        self._opener = LeaseFactory(
            self.fleet, self.fitness, self.index, self.knowledge, self.reuse, self.conversations
        )
        self._ids_of_last: tuple[list[ReplicaState], dict[str, None]] = ([], {})
        self._near = policy.order_by_ring if isinstance(policy, RingOrdered) else None
        self._pulls = policy.pulls if isinstance(policy, PullPolicy) else None
        self._weigh = policy.weigh if isinstance(policy, PricingPolicy) else None
        self._two_legs = DisaggLeases(self.fleet, self.fitness, self.first_token, self.finish)
        splitting = policy if isinstance(policy, DisaggPolicy) else None
        self._splitter = (
            DisaggPlanner(self.fleet, self.fitness, self._pricer, splitting) if splitting is not None else None
        )
        # Delegated methods: reading replicas, engines' reports, lessons of answers. They are documented at their
        # definitions.
        self.member, self.ready, self.usable = self.fleet.member, self.fleet.ready, self.fleet.usable
        self.serving, self.model_names = self.fleet.list_serving, self.fleet.model_names
        self.serving_alone = self.fleet.serving_alone
        self.same_server, self.prefill_model = self.fleet.same_server, self.fleet.prefill_model
        self.warm_up, self.is_warming_up = self.fleet.warm_up, self.fleet.is_warming_up
        self.is_to_warm_up, self.base_models = self.fleet.is_to_warm_up, self.fleet.base_models
        self._replace, self.forget, self.check = observations.replace, observations.forget, observations.check
        self.observe_health, self.observe_models = self.fleet.observe_health, observations.observe_models
        self.observe_load, self.alive = observations.observe_load, observations.alive
        self.lacks_model = observations.lacks_model
        self.found_dead, self.apply_peer_evidence = self.fitness.found_dead, self.fitness.apply_peer_evidence
        places = CapacityPools(self.fleet, self.fitness, splits=splitting is not None)
        self.who_may_prefill, self.has_room = places.prefill, places.has_room
        self.places_of, self.may_split = places.filter_places, places.may_split
        learner = OutcomeFeedback(self.fleet, self.fitness, self.models, self.answers, self.knowledge)
        self._learn, self.unannounced = learner.learn, learner.unannounced

    def configure(self, *, slow_start_s: float, stall_timeout_s: float) -> None:
        """Apply other settings."""
        self.fitness.slow_start_s, self._stall_timeout_s = slow_start_s, stall_timeout_s

    def replace(self, replicas: Iterable[Replica]) -> tuple[list[str], list[str]]:
        """Apply discovery's complete set; returns ids that joined and ids that left (`Observations.replace`)."""
        joined, left = self._replace(replicas)
        for id_ in left:
            self._pricer.forget(id_)
        return joined, left

    @property
    def members(self) -> list[ReplicaState]:
        """All replicas, in a stable order. The list is a copy."""
        return list(self.fleet.members.values())

    @property
    def panics(self) -> int:
        """Number of placements so far on replicas that may not be fit, because there were no others."""
        return self.fitness.panics

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

    def cooldown_pull_source(self, id_: str, until_s: float) -> None:
        """Stop fetching from a replica until this time: a request that needed a P2P transfer from it got no answer in
        time."""
        self.fleet.pulls.rest(id_, until_s)

    def set_kv_connector(self, id_: str, handshake: KvConnector | None, address: str) -> None:
        """Record the KV connector between a replica and the replicas that it prefills or decodes for.

        - `handshake`: the protocol; None: no connector is known.
        - `address`: the address that serves blocks (`host:port`); "" if the prefill stage's answer contains it.
        """
        if id_ in self.fleet.members:
            self.fleet.legs.set_connector(id_, handshake, address)

    def kv_connector_of(self, id_: str) -> tuple[KvConnector, str, bool] | None:
        """Return a replica's KV connector, its address, and True if it is active now; None if the replica never had
        one."""
        if (found := self.fleet.legs.connector_of(id_)) is None:
            return None
        hand, now = found
        return hand.handshake, hand.address, now

    def pair_counts(self, now_s: float) -> dict[str, dict[str, int]]:
        """Return the number of pairs for each paired replica: with traffic (`warm`), to be warmed (`new`), and in
        cooldown after a failure (`resting`)."""
        return self.fleet.legs.pair_counts(now_s)

    def pairs(self, pairs_max: int, now_s: float) -> tuple[list[PairStatus], int]:
        """Return pairs for display, those in cooldown first, and the total number of pairs."""
        return self.fleet.legs.list_pairs(pairs_max, now_s)

    def pull_address(self, id_: str) -> str | None:
        """Return the address at which a replica's engine takes requests of its peers (`host:port`); None if unknown."""
        peer = self.fleet.pulls.peers.get(id_)
        return None if peer is None else peer.address

    def takes_whole(self, member: ReplicaState) -> bool:
        """True if a replica takes requests without disaggregated prefill."""
        return self.fleet.legs.serves_unsplit(member)

    def pairs_to_warm(self, now_s: float) -> list[tuple[str, str]]:
        """Return new pairs of replicas (prefill, decode), which get no traffic before `pair_warmed`. It must be called
        about once a second. A replica is in one of them at a time."""
        return self.fleet.legs.to_warm(self.fleet.members, now_s) if self.fleet.legs.hands else []

    def pair_warmed(self, prefill: str, decode: str, *, ok: bool, now_s: float) -> None:
        """Record that a pair was warmed and takes traffic from now on, or that this failed and the pair is in
        cooldown."""
        self.fleet.legs.note_warm_up(prefill, decode, now_s, ok=ok)

    def pair_broke(self, prefill: str, decode: str, *, now_s: float) -> None:
        """Record that a disaggregated request failed at its decoding replica, for example because blocks do not arrive.
        The pair enters cooldown, and gets no traffic before it is warmed again."""
        self.fleet.legs.cooldown_pair(self.fleet.members, prefill, decode, now_s)

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
        whole = not wanted.may_split
        members = filter_members(self.fleet, self.fitness, wanted.model, exclude, only, full, now_s, whole=whole)
        self.knowledge.tick(now_s)
        match = self._matcher.match(wanted, members[0].speeds, now_s)
        if match.size.prompt_tokens > self.fleet.context_tokens_min:
            members = long_enough(members, wanted, match.size.prompt_tokens)
        expected = self.conversations.find_expected_replica(wanted, match) if wanted.conversation is not None else ""
        market, candidates = self._price(members, match, wanted.ring_key, expected, now_s)
        able: Sequence[Candidate] = candidates
        splitter = self._splitter_for(wanted, only)
        if wanted.due_s is not None:
            left_ms, may_shed = (wanted.due_s - now_s) * 1e3, wanted.priority is _LOW and not exclude
            able = in_time(candidates, self.fleet.members, left_ms, may_shed=may_shed and not splitter)
        choice = self.policy.choose(market, able)
        if may_hold_back and choice.hold_back:
            raise Deferred
        chosen = candidates[0]
        for chosen in candidates:
            if chosen.id == choice.id:
                break
        split: DisaggPlan | None = None
        if splitter is not None and not isinstance(only, str):
            split = splitter.split(wanted, match, market, able, chosen, exclude, only, full, now_s)
            if able is candidates and wanted.due_s is not None and wanted.priority is _LOW and not exclude:
                self._refuse_late(candidates, splitter, split, (wanted.due_s - now_s) * 1e3)
            if split is not None:
                chosen = split.decode
            elif not self.fleet.legs.serves_unsplit(self.fleet.members[chosen.id]):
                if not any(self.fleet.legs.serves_unsplit(member) for member in members):
                    if full:  # the replicas that are not full may not be paired
                        return self.route(wanted, now_s, exclude=exclude, only=only, may_hold_back=may_hold_back)
                    raise refusal(self.fleet, wanted.model, exclude, only, now_s)
                wanted.may_split = False
                try:
                    return self.route(wanted, now_s, exclude=exclude, only=only, full=full, may_hold_back=may_hold_back)
                finally:
                    wanted.may_split = True
        if match.home:
            self.models.tokens(wanted.model or "").count_credit()
        if match.credit is not None:
            self._credits.take(match.credit, now_s)
        weights = self._weigh(market) if self._weigh is not None else None
        receipt, holder = self._receipt(match, members, candidates, chosen, choice, exclude, full, split, weights)
        receipt.weighed = market.replicas
        if chosen.tier_tokens and split is None:
            receipt.brought = ExternalKv(chosen.tier_tokens)
        lasts_ms = expected_ms(chosen)
        if split is not None and splitter is not None:
            lasts_ms = split.expected_ms
            receipt.brought = ExternalKv(split.prefill.tier_tokens, None, splitter.leg(split))
        elif match.sources and self._pulls is not None:
            pull = self._pricer.pull(chosen, match, now_s)
            if pull is not None and self._pulls(market, chosen, pull):
                lasts_ms += pull.fetch_ms + pull.uncached_ms - chosen.uncached_ms
                take_pull(receipt, chosen, pull)
        speeds = self.fleet.members[chosen.id].speeds
        first_tokens = speeds.first_tokens if split is None else speeds.first_tokens_split
        receipt.ttft_ms, receipt.ttft_p90_ms = first_tokens.predict(lasts_ms)
        if wanted.response_bypasses_router and receipt.grade is _ESTIMATED:
            receipt.grade = Confidence.UNSEEN
        self._explain(receipt, wanted, match, bool(exclude), holder, now_s)
        # narrowed choices differ from another router's choices
        guessed = choice.guessed and not (exclude or only or full)
        lease = self._opener.open(wanted, match, chosen, receipt, guessed, self.watch, now_s)
        lease.expected_ms = lasts_ms
        if split is not None and receipt.leg is not None:
            self._opener.open_prefill(wanted, match, split.prefill, receipt.leg, lease, self.watch, now_s)
        return lease

    def _splitter_for(self, wanted: PlacementRequest, only: str | frozenset[str] | None) -> DisaggPlanner | None:
        """Return the DisaggPlanner if the request may use disaggregated prefill, else None."""
        return self._splitter if wanted.may_split and self.fleet.legs.hands and not isinstance(only, str) else None

    def _refuse_late(
        self, candidates: Sequence[Candidate], splitter: DisaggPlanner, split: DisaggPlan | None, left_ms: float
    ) -> None:
        """Raise Shed if neither a candidate nor a pair keeps the deadline."""
        soonest_ms = min([predicted_ms(each, self.fleet.members) for each in candidates])
        if split is not None:
            soonest_ms = min(soonest_ms, splitter.predicted_ms(split))
        if soonest_ms > left_ms:
            raise unreachable(soonest_ms, left_ms)

    def predict_ttft(
        self, wanted: PlacementRequest, now_s: float, only: str | frozenset[str] | None = None
    ) -> tuple[float, float]:
        """Return the predicted time to the first token on the fastest replica now, and the shortest prefill time, both
        in milliseconds. Raises NoReplicaReady and Shed."""
        whole, fleet = not wanted.may_split, self.fleet.members
        members = filter_members(self.fleet, self.fitness, wanted.model, NOBODY, only, (), now_s, whole=whole)
        match = self._matcher.match(wanted, members[0].speeds, now_s)
        market, candidates = self._price(members, match, wanted.ring_key, "", now_s)
        times_ms = [predicted_ms(each, fleet) for each in candidates]
        prefills_ms = [each.loading_ms + each.uncached_ms for each in candidates]
        splitter = self._splitter_for(wanted, only)
        if splitter is not None and not isinstance(only, str):
            first = candidates[times_ms.index(min(times_ms))]
            split = splitter.split(wanted, match, market, candidates, first, NOBODY, only, (), now_s)
            if split is not None:
                times_ms.append(splitter.predicted_ms(split))
                prefills_ms.append(split.prefill.loading_ms + split.prefill.uncached_ms)
        return min(times_ms), min(prefills_ms)

    def note_shed(self, wanted: PlacementRequest) -> None:
        """Record that a request will not be placed; its text may still be stored."""
        if self.explainer is not None and wanted.chain is not None:
            self.explainer.turned_away(wanted.chain)

    def first_token(self, lease: Lease, now_s: float) -> None:
        """Record the first body event of a stream."""
        member = self.fleet.members.get(lease.replica)
        if member and lease.id in member.leases and lease.first_token_s is None:
            if lease.role == DECODE:
                self._two_legs.first_token(member, lease, self.watch, now_s)
                return
            alone = lease.receipt.pull is not None and lease.receipt.pull.alone and member.is_clean_sample(lease)
            member.on_first_token(lease, now_s)
            if lease.receipt.pull is not None:
                self.fleet.pulls.on_transfer_complete(lease, lease.receipt.pull, now_s, alone=alone)
            if self.watch is not None:
                self.watch.first_token(lease, now_s)
            if lease.streams:
                member.speeds.first_tokens.observe(lease.expected_ms, (now_s - lease.placed_s) * 1e3)
            if member.breaker.backoff_s:
                self.fitness.token(member, lease, now_s)

    def finish_prefill(self, lease: Lease, outcome: Outcome, now_s: float) -> None:
        """End the prefill stage of a decode lease, successful or not. A second call has no effect."""
        self._two_legs.finish_prefill(lease, outcome, self.watch, now_s)

    def finish(self, lease: Lease, outcome: Outcome, now_s: float) -> None:
        """Close a lease at the end of the answer, whatever the outcome. A second call has no effect."""
        if lease.receipt.pull is not None:
            self.fleet.pulls.leave(lease, lease.receipt.pull, now_s)
        if lease.role == DECODE:
            outcome = self._two_legs.finish(lease, outcome, now_s)
        member = self.fleet.members.get(lease.replica)
        if member is None:
            if self.watch is not None:
                self.watch.on_orphaned(lease)
            return
        ok, left = outcome.ending is _OK, outcome.ending is _LEFT
        late = left and lease.placed_s >= member.breaker.until_s
        late = late and stall_detector.is_late(member, lease, now_s, self._stall_timeout_s)
        if late and self.fleet.legs.decoders:
            late = not stall_detector.waits_for_decode_peer(self.fleet, lease, now_s, self._stall_timeout_s)
        if not member.close(lease, now_s, member.speeds.mean_answer_tokens):
            return
        if left:
            member.on_client_disconnect(lease, late=late)
        computed = ok or lease.first_token_s is not None
        if lease.stored is not None and lease.tokens is not None:
            grown = outcome.usage.answer_blocks(lease.stored.block_tokens) if outcome.usage else 0
            self.knowledge.settle(lease.replica, lease.id, lease.tokens, now_s, computed=computed, grown_blocks=grown)
        computed = computed or (left and not lease.streams)  # the prompt may have been computed unseen
        answer_keys = self._credits.keys_of_answer(lease, outcome) if computed else []
        if self.watch is not None:
            self.watch.on_ended(lease, outcome, len(answer_keys), computed=computed)
        if computed:
            self.index.unpin(lease.replica, lease.id, now_s, grown=answer_keys)
            if lease.conversation:
                self.conversations.note_response(
                    lease.conversation, lease.replica, answer_keys, now_s, final=lease.final
                )
        else:
            self.index.retract(lease.replica, lease.id)
            if (
                self.explainer is not None
                and lease.end_key is not None
                and not self._two_legs.has_computed_prompt(lease)
            ):
                life = self._get_prefill_member(lease.receipt, member).cache_epoch
                self.explainer.take_back(lease.receipt, lease.keys, lease.end_key, lease.placed_s, life)
        if member.breaker.failures or member.breaker.backoff_s or not (ok or left):
            self.fitness.on_lease_ended(member, lease, outcome.ending, now_s)
        if ok:
            member.on_response_end(lease, now_s)
            self._learn(member, lease, outcome, now_s)

    # -- steps of route ------------------------------------------------------------------------------------------

    def _price(
        self, members: list[ReplicaState], match: PromptMatch, ring_key: str, expected: str, now_s: float
    ) -> tuple[PlacementContext, list[Candidate]]:
        """Return the placement context and the priced candidates: all members, or of many members those that can be the
        cheapest."""
        pricer, count = self._pricer, len(members)
        survey = pricer.survey(members, now_s)
        waits_ms, order = survey.waits_ms, list[str]()
        if count > PRICE_ALL_BELOW and self._near is not None:
            order = self._near(ring_key, self._ids_of(members))
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

    def _ids_of(self, members: list[ReplicaState]) -> dict[str, None]:
        """Return the ids of these members. Every change creates a new list of members (fleet/ready_index.py), so the
        ids of the last list are valid for the same list object."""
        if self._ids_of_last[0] is not members or len(self._ids_of_last[1]) != len(members):
            self._ids_of_last = members, dict.fromkeys([member.id for member in members])
        return self._ids_of_last[1]

    def _receipt(
        self,
        match: PromptMatch,
        members: list[ReplicaState],
        candidates: list[Candidate],
        chosen: Candidate,
        choice: PolicyDecision,
        exclude: frozenset[str],
        full: Collection[str],
        split: DisaggPlan | None,
        weights: PriceWeights | None,
    ) -> tuple[Receipt, str]:
        """Return the receipt, which states why a replica with more of the prompt was not chosen, and the id of that
        replica (or ""). With disaggregated prefill the prompt is computed by the prefill stage's replica, whatever the
        other one holds."""
        name, cache_aware = self.policy.name, self.policy.cache_aware
        reason = reason_of(chosen, candidates, tied=choice.tied, retry=bool(exclude), cache_aware=cache_aware)
        few, holder, computing = trim_candidates(candidates, chosen), "", chosen
        if split is not None:
            computing, reason = split.prefill, reason if reason is PlacementReason.RETRY else PlacementReason.SPLIT
        whole_ms = computing.price_ms
        tokens, cached = match.size.prompt_tokens, computing.cached_tokens
        receipt = Receipt(chosen.id, name, reason, computing.grade, tokens, cached, few, weights=weights)
        if match.depths or match.stored:
            elsewhere, only_prefill = self._pricer.holders_outside(members, match), self.fleet.prefillers.keys()
            if split is not None and self._splitter is not None and only_prefill:
                candidates = [*candidates, *[c for c in self._splitter.prefill if c.id in only_prefill]]
                elsewhere = {id_: n for id_, n in elsewhere.items() if all(id_ != c.id for c in candidates)}
            if split is not None:
                computing.price_ms = split.price_ms  # the price that a holder is compared with
            if it := spill(
                computing,
                candidates,
                reason,
                elsewhere=elsewhere,
                exclude=exclude,
                full=full,
                role=only_prefill,
                weights=weights,
            ):
                receipt.spill, receipt.spilled_tokens, holder = it.cause.value, it.tokens, it.holder
            computing.price_ms = whole_ms
        return receipt, holder

    def _explain(
        self, receipt: Receipt, wanted: PlacementRequest, match: PromptMatch, retry: bool, holder: str, now_s: float
    ) -> None:
        explainer = self.explainer
        if explainer is None:
            return
        member, ratio = (
            self._get_prefill_member(receipt, self.fleet.members[receipt.replica]),
            match.size.bytes_per_token,
        )
        depth, block_tokens, lives = (
            match.depths.get(member.id, 0),
            member.load.block_tokens or 1,
            self.fleet.cache_epochs,
        )
        chain, seen = wanted.chain, wanted.sighting
        explainer.explain(
            receipt,
            chain,
            ratio,
            depth,
            member.cache_epoch,
            seen,
            now_s,
            block_tokens=block_tokens,
            lives=lives,
            retry=retry,
        )
        # a P2P transfer may have supplied the holder's blocks
        if holder and receipt.spill and receipt.miss is not None:
            receipt.miss.held = (holder, receipt.spill)

    def _get_prefill_member(self, receipt: Receipt, decoding: ReplicaState) -> ReplicaState:
        """Return the member that computes the prompt: the decoding member, or that of the prefill stage."""
        leg = receipt.leg
        return decoding if leg is None else self.fleet.members.get(leg.replica, decoding)
