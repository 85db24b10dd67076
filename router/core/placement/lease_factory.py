"""Opening of leases: the work, the wait and the cached blocks that a replica has from this point on."""

from __future__ import annotations

from router.core.cache_state.event_index import EventIndex
from router.core.cache_state.prefix_index import PrefixIndex
from router.core.estimators.reuse import ReuseModel
from router.core.fleet.eligibility import Eligibility
from router.core.fleet.kv_reservations import shared_prefix_marks
from router.core.fleet.lease import DECODE, PREFILL, Lease, PendingTierLoad
from router.core.fleet.member import ANSWER_TOKENS_MAX, ReplicaState
from router.core.fleet.registry import Fleet
from router.core.placement.answer_reuse import AnswerCredit
from router.core.placement.conversation_affinity import Conversations
from router.core.placement.lease_listener import LeaseListener
from router.core.placement.placement_request import PlacementRequest
from router.core.placement.prefix_match import PromptMatch
from router.core.placement.scoring import to_load
from router.core.placement.ttft_feasibility import expected_ms
from router.core.prompts.block_keys import BLOCK_BYTES
from router.core.types.disagg_types import KvConnector, PrefillStage
from router.core.types.placements import Candidate, Receipt


class LeaseFactory:
    """Opens and numbers the Router's leases. A request with disaggregated prefill has two leases."""

    def __init__(
        self,
        fleet: Fleet,
        fitness: Eligibility,
        index: PrefixIndex,
        knowledge: EventIndex,
        reuse: ReuseModel,
        conversations: Conversations,
    ) -> None:
        self._fleet, self._fitness, self._index = fleet, fitness, index
        self._knowledge, self._reuse, self._conversations = knowledge, reuse, conversations
        self._next_lease = 0

    def open(
        self,
        wanted: PlacementRequest,
        match: PromptMatch,
        chosen: Candidate,
        receipt: Receipt,
        guessed: bool,
        watch: LeaseListener | None,
        now_s: float,
    ) -> Lease:
        """Open a lease on a request, or on its decode stage."""
        lease, member = self._lease(wanted, match, chosen, receipt, now_s), self._fleet.members[chosen.id]
        lease.guessed = guessed
        if receipt.leg is not None:
            lease.role, lease.prefill_ms, lease.stall_ms = DECODE, 0.0, 0.0
            lease.cached_tokens, lease.guessed = max(0, lease.prompt_tokens - 1), False
        elif chosen.tier_tokens:
            self._load(lease, member, chosen)
        if (pull := receipt.pull) is not None:
            pull.alone = not (member.queue.computing or chosen.kv_wait_ms or lease.to_load)
            if lease.to_load is not None:
                lease.to_load.alone = False
            self._fleet.pulls.begin(lease, pull, member.speeds.loads, now_s)
        member.open(lease, now_s, chosen.kv_wait_ms)
        member.unobserved_responses += wanted.response_bypasses_router
        if wanted.response_bypasses_router and receipt.leg is not None:
            member.decodes(lease, now_s)  # no later report marks the start of decoding
        self._reuse.observe(lease.keys, now_s, final=wanted.conversation is not None and wanted.conversation.final)
        if wanted.conversation is not None:
            self._conversations.note_placement(wanted, wanted.conversation, match, lease)
        self._register_lease(member, lease, match.credit, watch, now_s)
        return lease

    def open_prefill(
        self,
        wanted: PlacementRequest,
        match: PromptMatch,
        chosen: Candidate,
        leg: PrefillStage,
        lease: Lease,
        watch: LeaseListener | None,
        now_s: float,
    ) -> None:
        """Open the lease of the prefill stage that belongs to the lease of a decode stage."""
        own, size = lease.receipt, match.size
        receipt = Receipt(
            chosen.id,
            own.policy,
            own.reason,
            chosen.grade,
            size.prompt_tokens,
            chosen.cached_tokens,
            weighed=own.weighed,
        )
        prefill, member = self._lease(wanted, match, chosen, receipt, now_s), self._fleet.members[chosen.id]
        prefill.role, prefill.streams, prefill.answer_tokens_max = PREFILL, not wanted.response_bypasses_router, 1
        # Everything that the request teaches except its prefill is learned from its decode stage.
        prefill.end_key, prefill.text_bytes, prefill.opaque_bytes = None, 0, 0
        prefill.expected_ms = expected_ms(chosen)
        leg.lease, self._fleet.legs.open[lease.id] = prefill.id, prefill
        if leg.handshake is not KvConnector.NIXL:
            self._fleet.legs.decoders[prefill.id] = lease.replica
        self._fleet.legs.count_request(prefill.replica, lease.replica)
        if chosen.tier_tokens:
            self._load(prefill, member, chosen)
        member.open(prefill, now_s, chosen.kv_wait_ms)
        self._register_lease(member, prefill, None, watch, now_s)

    def _load(self, lease: Lease, member: ReplicaState, chosen: Candidate) -> None:
        if lease.stored is not None:
            alone = not (member.queue.computing or chosen.kv_wait_ms)
            lease.to_load = PendingTierLoad(to_load(lease.stored, chosen.cached_tokens), chosen.loading_ms, alone)

    def _register_lease(
        self, member: ReplicaState, lease: Lease, credit: AnswerCredit | None, watch: LeaseListener | None, now_s: float
    ) -> None:
        """Count a lease's prompt as held by its replica: from this point on its blocks are computed there or sent
        there."""
        self._fitness.on_lease_opened(member, lease)
        self._index.pin(member.id, lease.id, lease.keys, now_s)
        if lease.stored is not None and lease.tokens is not None:
            self._knowledge.expect_blocks(member.id, lease.id, lease.tokens, lease.stored)
        if watch is not None:
            watch.on_opened(lease, credit, now_s)

    def _lease(
        self, wanted: PlacementRequest, match: PromptMatch, chosen: Candidate, receipt: Receipt, now_s: float
    ) -> Lease:
        """Return the next lease, for a request with a prompt that the candidate computes."""
        id_, ask, size, credit, stored = chosen.id, wanted.ask, match.size, match.credit, match.stored
        member, blocks_max = self._fleet.members[id_], self._index.capacity(id_)
        # Of a prompt longer than the whole cache, count only the part that fits.
        keys = match.keys if len(match.keys) <= blocks_max else match.keys[:blocks_max]
        lease = Lease(  # arguments by position: by name it takes three times as long
            self._next_lease,
            id_,
            receipt,
            now_s,
            wanted.model or "",
            ask.stream and not wanted.response_bypasses_router,
            size.prompt_tokens,
            receipt.predicted_cached_tokens,
            credit.tokens if credit is not None and credit.replica == id_ else 0,
            chosen.uncached_ms,
            size.prompt_tokens - int(shared_prefix_marks(len(keys)) * BLOCK_BYTES / size.bytes_per_token),
            keys,
            wanted.chain.end_key if wanted.chain else None,
            size.text_bytes,
            ask.output_tokens_max or ANSWER_TOKENS_MAX,
            wanted.tokens,
            None if stored is None else stored.get(id_) or self._knowledge.empty(id_),
            False,
            max(0.0, chosen.uncached_ms - member.prefill_model.floor_ms),
        )
        lease.opaque_bytes = size.opaque_bytes
        self._next_lease += 1
        return lease
