"""Opening of leases: the work, the wait and the cached blocks that a replica has from this point on."""

from __future__ import annotations

from router.core.cache_state.event_index import EventIndex
from router.core.cache_state.prefix_index import PrefixIndex
from router.core.estimators.reuse import ReuseModel
from router.core.fleet.eligibility import Eligibility
from router.core.fleet.kv_reservations import shared_prefix_marks
from router.core.fleet.lease import Lease, LeaseMeasurements, LeasePrompt, PendingTierLoad
from router.core.fleet.member import ANSWER_TOKENS_MAX, ReplicaState
from router.core.fleet.registry import Fleet
from router.core.placement.answer_reuse import AnswerCredit
from router.core.placement.conversation_affinity import Conversations
from router.core.placement.lease_listener import LeaseListener
from router.core.placement.placement_request import PlacementRequest
from router.core.placement.prefix_match import PromptMatch
from router.core.placement.scoring import to_load
from router.core.prompts.block_keys import BLOCK_BYTES
from router.core.types.placements import Candidate, Receipt


class LeaseFactory:
    """Opens and numbers the Router's leases."""

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
        """Open a lease on a request that one replica serves."""
        lease, member = self.make(wanted, match, chosen, receipt, now_s), self._fleet.members[chosen.id]
        lease.guessed = guessed
        if chosen.tier_tokens:
            self.load(lease, member, chosen)
        if (pull := receipt.pull) is not None:
            pull.alone = not (member.queue.computing or chosen.kv_wait_ms or lease.to_load)
            if lease.to_load is not None:
                lease.to_load.alone = False
            self._fleet.pulls.begin(lease, pull, member.speeds.loads, now_s)
        member.open(lease, now_s, chosen.kv_wait_ms)
        self.count(wanted, match, lease, member, now_s)
        self.register(member, lease, match.credit, watch, now_s)
        return lease

    def count(
        self, wanted: PlacementRequest, match: PromptMatch, lease: Lease, member: ReplicaState, now_s: float
    ) -> None:
        """Count a request once, at the replica that answers it."""
        member.evidence.unobserved_responses += wanted.response_bypasses_router
        kin = wanted.conversation
        self._reuse.observe(lease.prompt.keys, now_s, final=kin is not None and kin.final)
        if kin is not None:
            self._conversations.note_placement(wanted, kin, match, lease)

    def load(self, lease: Lease, member: ReplicaState, chosen: Candidate) -> None:
        """Record the load of the lease's cached blocks from tiers outside the GPU."""
        if (stored := lease.prompt.stored) is not None:
            alone = not (member.queue.computing or chosen.kv_wait_ms)
            lease.to_load = PendingTierLoad(to_load(stored, chosen.cached_tokens), chosen.loading_ms, alone)

    def register(
        self, member: ReplicaState, lease: Lease, credit: AnswerCredit | None, watch: LeaseListener | None, now_s: float
    ) -> None:
        """Count a lease's prompt as held by its replica: from this point on its blocks are computed there or sent
        there."""
        prompt = lease.prompt
        self._fitness.on_lease_opened(member, lease)
        self._index.pin(member.id, lease.id, prompt.keys, now_s)
        if prompt.stored is not None and prompt.token_ids is not None:
            self._knowledge.expect_blocks(member.id, lease.id, prompt.token_ids, prompt.stored)
        if watch is not None:
            watch.on_opened(lease, credit, now_s)

    def make(
        self, wanted: PlacementRequest, match: PromptMatch, chosen: Candidate, receipt: Receipt, now_s: float
    ) -> Lease:
        """Return the next lease, for a request with a prompt that the candidate computes."""
        id_, ask, size, credit, stored = chosen.id, wanted.ask, match.size, match.credit, match.stored
        member, blocks_max = self._fleet.members[id_], self._index.capacity(id_)
        # Of a prompt longer than the whole cache, count only the part that fits.
        keys = match.keys if len(match.keys) <= blocks_max else match.keys[:blocks_max]
        shared_tokens = int(shared_prefix_marks(len(keys)) * BLOCK_BYTES / size.bytes_per_token)
        prompt = LeasePrompt(
            keys,
            size.prompt_tokens - shared_tokens,
            wanted.chain.end_key if wanted.chain else None,
            size.text_bytes,
            size.opaque_bytes,
            credit.tokens if credit is not None and credit.replica == id_ else 0,
            wanted.tokens,
            None if stored is None else stored.get(id_) or self._knowledge.empty(id_),
        )
        lease = Lease(
            id=self._next_lease,
            replica=id_,
            receipt=receipt,
            placed_s=now_s,
            model=wanted.model or "",
            streams=ask.stream and not wanted.response_bypasses_router,
            prompt=prompt,
            prompt_tokens=size.prompt_tokens,
            cached_tokens=receipt.predicted_cached_tokens,
            prefill_ms=chosen.uncached_ms,
            measurements=LeaseMeasurements(),
            answer_tokens_max=ask.output_tokens_max or ANSWER_TOKENS_MAX,
            stall_ms=max(0.0, chosen.uncached_ms - member.prefill_model.floor_ms),
        )
        self._next_lease += 1
        return lease
