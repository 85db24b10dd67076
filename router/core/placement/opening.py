"""Opening of leases: the work, the wait and the cached blocks that a replica has from this point on."""

from __future__ import annotations

from router.core.cache.estimate import PrefixIndex
from router.core.cache.knowledge import Knowledge
from router.core.facts.legs import Handshake, PrefillLeg
from router.core.facts.placements import Candidate, Receipt
from router.core.fleet.fitness import Fitness
from router.core.fleet.fleet import Fleet
from router.core.fleet.kv_room import behind_marks
from router.core.fleet.lease import DECODE, PREFILL, Lease, ToLoad
from router.core.fleet.member import ANSWER_TOKENS_MAX, Member
from router.core.learned.reuse import ReuseMemory
from router.core.placement.candidates import to_load
from router.core.placement.conversations import Conversations
from router.core.placement.credit import AnswerCredit
from router.core.placement.deadlines import expected_ms
from router.core.placement.match import PromptMatch
from router.core.placement.wanted import Wanted
from router.core.placement.watch import LeaseWatch
from router.core.prompts.blocks import BLOCK_BYTES


class Opener:
    """Opens and numbers the Router's leases. A request with disaggregated prefill has two leases."""

    def __init__(
        self,
        fleet: Fleet,
        fitness: Fitness,
        index: PrefixIndex,
        knowledge: Knowledge,
        reuse: ReuseMemory,
        conversations: Conversations,
    ) -> None:
        self._fleet, self._fitness, self._index = fleet, fitness, index
        self._knowledge, self._reuse, self._conversations = knowledge, reuse, conversations
        self._next_lease = 0

    def open(
        self,
        wanted: Wanted,
        match: PromptMatch,
        chosen: Candidate,
        receipt: Receipt,
        guessed: bool,
        watch: LeaseWatch | None,
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
        member.unseen_answers += wanted.unseen
        if wanted.unseen and receipt.leg is not None:
            member.decodes(lease, now_s)  # no later report marks the start of decoding
        self._reuse.observe(lease.keys, now_s, final=wanted.kin is not None and wanted.kin.final)
        if wanted.kin is not None:
            self._conversations.placed(wanted, wanted.kin, match, lease)
        self._opened(member, lease, match.credit, watch, now_s)
        return lease

    def open_prefill(
        self,
        wanted: Wanted,
        match: PromptMatch,
        chosen: Candidate,
        leg: PrefillLeg,
        lease: Lease,
        watch: LeaseWatch | None,
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
        prefill.role, prefill.streams, prefill.answer_tokens_max = PREFILL, not wanted.unseen, 1
        # Everything that the request teaches except its prefill is learned from its decode stage.
        prefill.end_key, prefill.text_bytes, prefill.opaque_bytes = None, 0, 0
        prefill.expected_ms = expected_ms(chosen)
        leg.lease, self._fleet.legs.open[lease.id] = prefill.id, prefill
        if leg.handshake is not Handshake.NIXL:
            self._fleet.legs.decoders[prefill.id] = lease.replica
        self._fleet.legs.sent(prefill.replica, lease.replica)
        if chosen.tier_tokens:
            self._load(prefill, member, chosen)
        member.open(prefill, now_s, chosen.kv_wait_ms)
        self._opened(member, prefill, None, watch, now_s)

    def _load(self, lease: Lease, member: Member, chosen: Candidate) -> None:
        if lease.stored is not None:
            alone = not (member.queue.computing or chosen.kv_wait_ms)
            lease.to_load = ToLoad(to_load(lease.stored, chosen.cached_tokens), chosen.loading_ms, alone)

    def _opened(
        self, member: Member, lease: Lease, credit: AnswerCredit | None, watch: LeaseWatch | None, now_s: float
    ) -> None:
        """Count a lease's prompt as held by its replica: from this point on its blocks are computed there or sent
        there."""
        self._fitness.opened(member, lease)
        self._index.pin(member.id, lease.id, lease.keys, now_s)
        if lease.stored is not None and lease.tokens is not None:
            self._knowledge.expect(member.id, lease.id, lease.tokens, lease.stored)
        if watch is not None:
            watch.opened(lease, credit, now_s)

    def _lease(self, wanted: Wanted, match: PromptMatch, chosen: Candidate, receipt: Receipt, now_s: float) -> Lease:
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
            ask.stream and not wanted.unseen,
            size.prompt_tokens,
            receipt.predicted_cached_tokens,
            credit.tokens if credit is not None and credit.replica == id_ else 0,
            chosen.uncached_ms,
            size.prompt_tokens - int(behind_marks(len(keys)) * BLOCK_BYTES / size.bytes_per_token),
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
