"""The two leases of a request with disaggregated prefill, from placement to the end.

The caller that places such a request receives the lease of the decode stage. The lease of the prefill stage is kept in
`DisaggPairs.open`. It ends with a call of `prefilled`, or together with the decode stage. Without that call, the first
token of the decode stage shows that the prefill is over. The time of its end is then unknown, so no prefill time is
learned.

The decode stage's engine reports as cached either the count that the prefill stage's engine sent it (vLLM 0.32 by NIXL,
SGLang 0.5.23), or all tokens that it received (vLLM's other KV connectors). So only the prefill stage's report shows
how much of the prompt was in a cache. The decode stage's report is not used for learning.
"""

from __future__ import annotations

from collections.abc import Callable

from router.core.disagg import member_stages
from router.core.disagg.pairs import DisaggPairs
from router.core.fleet.eligibility import Eligibility
from router.core.fleet.lease import DECODE, PREFILL, Lease
from router.core.fleet.member import ReplicaState
from router.core.fleet.registry import Fleet
from router.core.placement.lease_factory import LeaseFactory
from router.core.placement.lease_listener import LeaseListener
from router.core.placement.priced_request import PricedRequest
from router.core.types.disagg_types import PrefillStage
from router.core.types.placements import Candidate, DisaggPlan, EndReason, Outcome, Receipt

_LEFT = Outcome(EndReason.CLIENT_LEFT)
_UNSEEN = Outcome(EndReason.OK, unobserved=True)


class DisaggLeases:
    """Opens and ends the leases of both stages, and learns transfer times."""

    def __init__(
        self,
        fleet: Fleet,
        fitness: Eligibility,
        pairs: DisaggPairs,
        leases: LeaseFactory,
        first_token: Callable[[Lease, float], None],
        finish: Callable[[Lease, Outcome, float], None],
    ) -> None:
        """`first_token` and `finish` are the Router's methods, for the leases of prefill stages."""
        self._fleet, self._fitness, self._pairs, self._leases = fleet, fitness, pairs, leases
        self._first_token, self._finish = first_token, finish

    def open(
        self, priced: PricedRequest, plan: DisaggPlan, receipt: Receipt, watch: LeaseListener | None, now_s: float
    ) -> Lease:
        """Open the leases of both stages. Returns that of the decode stage."""
        wanted, match, leg = priced.wanted, priced.matched, receipt.leg
        lease = self._leases.make(wanted, match, plan.decode, receipt, now_s)
        lease.role, lease.prefill_ms, lease.stall_ms = DECODE, 0.0, 0.0
        lease.cached_tokens = max(0, lease.prompt_tokens - 1)
        member = self._fleet.members[lease.replica]
        member.open(lease, now_s, plan.decode.kv_wait_ms)
        if leg is not None and leg.traits.concurrent:
            member.work.start_transfer_wait(lease)
        if wanted.response_bypasses_router:
            member_stages.start_decode(member, lease, now_s)  # no later report marks the start of decoding
        self._leases.count(wanted, match, lease, member, now_s)
        self._leases.register(member, lease, match.credit, watch, now_s)
        lease.expected_ms = plan.expected_ms
        if leg is not None:
            self._open_prefill(priced, plan.prefill, leg, lease, watch, now_s)
        return lease

    def _open_prefill(
        self,
        priced: PricedRequest,
        chosen: Candidate,
        leg: PrefillStage,
        lease: Lease,
        watch: LeaseListener | None,
        now_s: float,
    ) -> None:
        """Open the lease of the prefill stage that belongs to the lease of a decode stage."""
        own, wanted, tokens = lease.receipt, priced.wanted, priced.matched.size.prompt_tokens
        receipt = Receipt(
            chosen.id, own.policy, own.reason, chosen.grade, tokens, chosen.cached_tokens, weighed=own.weighed
        )
        prefill = self._leases.make(wanted, priced.matched, chosen, receipt, now_s)
        prefill.role, prefill.streams, prefill.answer_tokens_max = PREFILL, not wanted.response_bypasses_router, 1
        # Everything that the request teaches except its prefill is learned from its decode stage.
        prompt = prefill.prompt
        prompt.end_key, prompt.text_bytes, prompt.opaque_bytes = None, 0, 0
        prefill.expected_ms = chosen.first_token_ms
        leg.lease, self._pairs.open[lease.id] = prefill.id, prefill
        if leg.traits.concurrent:
            self._pairs.decoders[prefill.id] = lease.replica
        self._pairs.count_request(prefill.replica, lease.replica)
        member = self._fleet.members[chosen.id]
        if chosen.tier_tokens:
            self._leases.load(prefill, member, chosen)
        member.open(prefill, now_s, chosen.kv_wait_ms)
        self._leases.register(member, prefill, None, watch, now_s)

    def finish_prefill(self, lease: Lease, outcome: Outcome, watch: LeaseListener | None, now_s: float) -> None:
        """End the prefill stage of this decode lease, successful or not. Its replica is released and learns from the
        outcome. A second call has no effect."""
        prefill = self._pairs.open.pop(lease.id, None)
        if prefill is None:
            return
        if outcome.ending is EndReason.OK:
            if prefill.first_token_s is None:
                self._first_token(prefill, now_s)
            lease.effective_start_s = now_s
        elif outcome.ending in (EndReason.FAILED, EndReason.UNREACHED):
            self._pairs.prefill_failed(prefill.replica, lease.replica)
        member, leg = self._fleet.members.get(lease.replica), lease.receipt.leg
        if member is not None and leg is not None and lease.id in member.leases:
            if outcome.ending is EndReason.OK:
                if not lease.streams:
                    member_stages.start_decode(member, lease, now_s)
                elif lease.first_token_s is None:
                    member.work.start_transfer_wait(lease)
            elif leg.alone:
                member_stages.compute_prompt(member, lease, _held_tokens(lease.receipt), now_s)
            if watch is not None:
                watch.on_recount(lease.replica)
        self._finish(prefill, outcome, now_s)
        self._pairs.decoders.pop(prefill.id, None)

    def first_token(self, member: ReplicaState, lease: Lease, watch: LeaseListener | None, now_s: float) -> None:
        """Record the first body event of a decode stage's stream from this member."""
        prefill, leg = self._pairs.open.get(lease.id), lease.receipt.leg
        if prefill is not None and prefill.first_token_s is None:
            there = self._fleet.members.get(prefill.replica)
            if there is not None and prefill.id in there.leases:
                member_stages.complete_unobserved_prefill(there, prefill, now_s)
                if watch is not None:
                    watch.on_recount(prefill.replica, prefill.stall_ms)
        # If the replica also ran a prefill or waited for KV space, the transfer was not the only delay.
        alone = (
            not member.queue.computing
            and member.batches.long_s < lease.effective_start_s
            and lease.id not in member.work.waiting_for_kv
        )
        if leg is not None and lease.effective_start_s and not leg.alone:
            self._pairs.note_transfer(leg.replica, member.id)
            if alone:
                took_ms, tokens = (now_s - lease.effective_start_s) * 1e3, _lacking_tokens(lease.receipt)
                self._pairs.learn(leg.replica, member.id, member.speeds.loads, tokens, took_ms, now_s)
        member_stages.on_first_token(member, lease, now_s)
        if watch is not None:
            watch.on_recount(lease.replica)  # other routers time prefills by first tokens, and this was no prefill
        if lease.streams:
            member.speeds.first_tokens_split.observe(lease.expected_ms, (now_s - lease.placed_s) * 1e3)
        if member.breaker.backoff_s:
            self._fitness.token(member, lease, now_s)

    def finish(self, lease: Lease, outcome: Outcome, now_s: float) -> Outcome:
        """End the decode stage, and the prefill stage if it is still open. Returns the part of the outcome that may be
        used to learn about the decode stage."""
        prefill = self._pairs.open.pop(lease.id, None)
        if prefill is not None:
            done = outcome.ending is EndReason.OK and prefill.first_token_s is None
            self._finish(prefill, _UNSEEN if done else _LEFT, now_s)
            self._pairs.decoders.pop(prefill.id, None)
        usage = outcome.usage
        if usage is None:
            return outcome
        return Outcome(outcome.ending, usage.with_prefill_hits(None), outcome.events, outcome.unobserved)

    def has_computed_prompt(self, lease: Lease) -> bool:
        """True if the prompt of a decode lease was computed by the prefill stage, whatever the outcome of the
        answer."""
        leg = lease.receipt.leg
        return leg is not None and lease.effective_start_s > 0 and not leg.alone

    def waits_for_peer(self, lease: Lease, now_s: float, stall_timeout_s: float) -> bool:
        """True if the other stage of a request may be the cause of this lease's delay.

        - For a prefill stage: its decoding replica has answers in progress and shows no sign of life.
        - For a decode stage: its prefill replica shows no sign of life, and no answers are in progress here.
        """
        if not self._pairs.decoders:
            return False
        leg, members = lease.receipt.leg, self._fleet.members
        if leg is not None:
            member, first = members.get(lease.replica), members.get(leg.replica)
            if lease.effective_start_s or member is None or member.work.decoding > 0:
                return False
            return first is None or now_s - first.evidence.alive_s > stall_timeout_s / 2
        decoder = members.get(self._pairs.decoders.get(lease.id, ""))
        if decoder is None or decoder.work.decoding <= 0:
            return False
        return now_s - decoder.evidence.alive_s > stall_timeout_s / 2

    def prefill_ms(self, lease: Lease) -> float:
        """Return the expected milliseconds of prefill of a request, on the replica that prefills."""
        prefill = self._pairs.open.get(lease.id) if lease.receipt.leg is not None else None
        return lease.prefill_ms if prefill is None else prefill.prefill_ms


def _held_tokens(receipt: Receipt) -> int:
    """Return the tokens of the prompt that the decoding replica was estimated to hold."""
    return receipt.prompt_tokens - _lacking_tokens(receipt)


def _lacking_tokens(receipt: Receipt) -> int:
    """Return the tokens of the prompt that the decoding replica was estimated not to hold."""
    for candidate in receipt.candidates:
        if candidate.id == receipt.replica:
            return candidate.uncached_tokens
    return receipt.prompt_tokens
