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

from router.core.fleet.eligibility import Eligibility
from router.core.fleet.lease import Lease
from router.core.fleet.member import ReplicaState
from router.core.fleet.registry import Fleet
from router.core.placement.lease_listener import LeaseListener
from router.core.types.placements import EndReason, Outcome, Receipt

_LEFT = Outcome(EndReason.CLIENT_LEFT)
_UNSEEN = Outcome(EndReason.OK, unobserved=True)


class DisaggLeases:
    """Ends prefill stages and learns transfer times."""

    def __init__(
        self,
        fleet: Fleet,
        fitness: Eligibility,
        first_token: Callable[[Lease, float], None],
        finish: Callable[[Lease, Outcome, float], None],
    ) -> None:
        """`first_token` and `finish` are the Router's methods, for the leases of prefill stages."""
        self._fleet, self._fitness = fleet, fitness
        self._first_token, self._finish = first_token, finish

    def finish_prefill(self, lease: Lease, outcome: Outcome, watch: LeaseListener | None, now_s: float) -> None:
        """End the prefill stage of this decode lease, successful or not. Its replica is released and learns from the
        outcome. A second call has no effect."""
        prefill = self._fleet.legs.open.pop(lease.id, None)
        if prefill is None:
            return
        if outcome.ending is EndReason.OK:
            if prefill.first_token_s is None:
                self._first_token(prefill, now_s)
            lease.effective_start_s = now_s
        elif outcome.ending in (EndReason.FAILED, EndReason.UNREACHED):
            self._fleet.legs.prefill_failed(prefill.replica, lease.replica)
        member, leg = self._fleet.members.get(lease.replica), lease.receipt.leg
        if member is not None and leg is not None and lease.id in member.leases:
            if outcome.ending is EndReason.OK:
                if not lease.streams:
                    member.decodes(lease, now_s)
                elif lease.first_token_s is None:
                    member.start_transfer_wait(lease)
            elif leg.alone:
                member.computes(lease, _held_tokens(lease.receipt), now_s)
            if watch is not None:
                watch.on_recount(lease.replica)
        self._finish(prefill, outcome, now_s)
        self._fleet.legs.decoders.pop(prefill.id, None)

    def first_token(self, member: ReplicaState, lease: Lease, watch: LeaseListener | None, now_s: float) -> None:
        """Record the first body event of a decode stage's stream from this member."""
        prefill, leg = self._fleet.legs.open.get(lease.id), lease.receipt.leg
        if prefill is not None and prefill.first_token_s is None:
            there = self._fleet.members.get(prefill.replica)
            if there is not None and prefill.id in there.leases:
                there.prefill_done_unobserved(prefill, now_s)
                if watch is not None:
                    watch.on_recount(prefill.replica, prefill.stall_ms)
        # If the replica also ran a prefill or waited for KV space, the transfer was not the only delay.
        alone = (
            not member.queue.computing
            and member.long_s < lease.effective_start_s
            and lease.id not in member.waiting_for_kv
        )
        if leg is not None and lease.effective_start_s and not leg.alone:
            self._fleet.legs.note_transfer(leg.replica, member.id)
            if alone:
                took_ms, tokens = (now_s - lease.effective_start_s) * 1e3, _lacking_tokens(lease.receipt)
                self._fleet.legs.learn(leg.replica, member.id, member.speeds.loads, tokens, took_ms, now_s)
        member.on_first_token_disagg(lease, now_s)
        if watch is not None:
            watch.on_recount(lease.replica)  # other routers time prefills by first tokens, and this was no prefill
        if lease.streams:
            member.speeds.first_tokens_split.observe(lease.expected_ms, (now_s - lease.placed_s) * 1e3)
        if member.breaker.backoff_s:
            self._fitness.token(member, lease, now_s)

    def finish(self, lease: Lease, outcome: Outcome, now_s: float) -> Outcome:
        """End the decode stage, and the prefill stage if it is still open. Returns the part of the outcome that may be
        used to learn about the decode stage."""
        prefill = self._fleet.legs.open.pop(lease.id, None)
        if prefill is not None:
            done = outcome.ending is EndReason.OK and prefill.first_token_s is None
            self._finish(prefill, _UNSEEN if done else _LEFT, now_s)
            self._fleet.legs.decoders.pop(prefill.id, None)
        usage = outcome.usage
        if usage is None:
            return outcome
        return Outcome(outcome.ending, usage.with_prefill_hits(None), outcome.events, outcome.unobserved)

    def has_computed_prompt(self, lease: Lease) -> bool:
        """True if the prompt of a decode lease was computed by the prefill stage, whatever the outcome of the
        answer."""
        leg = lease.receipt.leg
        return leg is not None and lease.effective_start_s > 0 and not leg.alone


def _held_tokens(receipt: Receipt) -> int:
    """Return the tokens of the prompt that the decoding replica was estimated to hold."""
    return receipt.prompt_tokens - _lacking_tokens(receipt)


def _lacking_tokens(receipt: Receipt) -> int:
    """Return the tokens of the prompt that the decoding replica was estimated not to hold."""
    for candidate in receipt.candidates:
        if candidate.id == receipt.replica:
            return candidate.uncached_tokens
    return receipt.prompt_tokens
