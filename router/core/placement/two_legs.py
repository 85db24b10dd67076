"""The two leases of a request that one replica prefills and another one decodes, from placement to the end.

Whoever has placed such a request holds the decode leg's lease. The prefill leg's is kept in Legs.open, and ends when
`prefilled` says so, or with the decode leg. Where nobody says so, the decode leg's first token shows that the prefill
is over; when it was is then not known, and nothing is learned of its time.

Of the prompt the decode leg's engine calls cached what the prefill leg's engine has told it (vLLM 0.32 by NIXL, SGLang
0.5.23), or all that came from elsewhere (vLLM's other handshakes). So what was found in a cache is the prefill leg's to
tell, and the decode leg's word on that teaches nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from router.core.facts.placements import Ending, Outcome, Receipt
from router.core.fleet.fitness import Fitness
from router.core.fleet.fleet import Fleet
from router.core.fleet.lease import Lease
from router.core.fleet.member import Member
from router.core.placement.watch import LeaseWatch

_LEFT = Outcome(Ending.CLIENT_LEFT)
_UNSEEN = Outcome(Ending.OK, unseen=True)


class TwoLegs:
    """Ends prefill legs, and learns how long transfers take."""

    def __init__(
        self,
        fleet: Fleet,
        fitness: Fitness,
        first_token: Callable[[Lease, float], None],
        finish: Callable[[Lease, Outcome, float], None],
    ) -> None:
        """`first_token` and `finish` are the Router's, for the leases of prefill legs."""
        self._fleet, self._fitness = fleet, fitness
        self._first_token, self._finish = first_token, finish

    def prefilled(self, lease: Lease, outcome: Outcome, watch: LeaseWatch | None, now_s: float) -> None:
        """The prefill leg of this decode leg's lease ended, well or not: its replica is free of it, and learns from it.
        A second time changes nothing."""
        prefill = self._fleet.legs.open.pop(lease.id, None)
        if prefill is None:
            return
        if outcome.ending is Ending.OK:
            if prefill.first_token_s is None:
                self._first_token(prefill, now_s)
            lease.turn_s = now_s
        elif outcome.ending in (Ending.FAILED, Ending.UNREACHED):
            self._fleet.legs.prefill_failed(prefill.replica, lease.replica)
        member, leg = self._fleet.members.get(lease.replica), lease.receipt.leg
        if member is not None and leg is not None and lease.id in member.leases:
            if outcome.ending is Ending.OK:
                if not lease.streams:
                    member.decodes(lease, now_s)
                elif lease.first_token_s is None:
                    member.awaits(lease)
            elif leg.alone:
                member.computes(lease, _held_tokens(lease.receipt), now_s)
            if watch is not None:
                watch.recounted(lease.replica)
        self._finish(prefill, outcome, now_s)
        self._fleet.legs.decoders.pop(prefill.id, None)

    def first_token(self, member: Member, lease: Lease, watch: LeaseWatch | None, now_s: float) -> None:
        """The first body event of a decode leg's stream arrived from this member."""
        prefill, leg = self._fleet.legs.open.get(lease.id), lease.receipt.leg
        if prefill is not None and prefill.first_token_s is None:
            there = self._fleet.members.get(prefill.replica)
            if there is not None and prefill.id in there.leases:
                there.passed_on(prefill, now_s)
                if watch is not None:
                    watch.recounted(prefill.replica, prefill.stall_ms)
        # Where a prefill went on there, or room was waited for, the transfer was not all that took time.
        alone = not member.queue.computing and member.long_s < lease.turn_s and lease.id not in member.roomless
        if leg is not None and lease.turn_s and not leg.alone:
            self._fleet.legs.came(leg.replica, member.id)
            if alone:
                took_ms, tokens = (now_s - lease.turn_s) * 1e3, _lacking_tokens(lease.receipt)
                self._fleet.legs.learn(leg.replica, member.id, member.speeds.loads, tokens, took_ms, now_s)
        member.arrived(lease, now_s)
        if watch is not None:
            watch.recounted(lease.replica)  # others time prefills by first tokens, and this was none
        if lease.streams:
            member.speeds.first_tokens_split.observe(lease.expected_ms, (now_s - lease.placed_s) * 1e3)
        if member.breaker.backoff_s:
            self._fitness.token(member, lease, now_s)

    def over(self, lease: Lease, outcome: Outcome, now_s: float) -> Outcome:
        """The decode leg is over, and with it a prefill leg that is still open. Returns what there is to learn of the
        decode leg."""
        prefill = self._fleet.legs.open.pop(lease.id, None)
        if prefill is not None:
            done = outcome.ending is Ending.OK and prefill.first_token_s is None
            self._finish(prefill, _UNSEEN if done else _LEFT, now_s)
            self._fleet.legs.decoders.pop(prefill.id, None)
        usage = outcome.usage
        if usage is None:
            return outcome
        return Outcome(outcome.ending, usage.found_by(None), outcome.events, outcome.unseen)

    def computed(self, lease: Lease) -> bool:
        """Whether the prompt of a decode leg's lease was computed elsewhere, whatever became of the answer."""
        leg = lease.receipt.leg
        return leg is not None and lease.turn_s > 0 and not leg.alone


def _held_tokens(receipt: Receipt) -> int:
    """Tokens of the prompt that the decoding replica was believed to hold."""
    return receipt.prompt_tokens - _lacking_tokens(receipt)


def _lacking_tokens(receipt: Receipt) -> int:
    """Tokens of the prompt that the decoding replica was believed not to hold."""
    for candidate in receipt.candidates:
        if candidate.id == receipt.replica:
            return candidate.uncached_tokens
    return receipt.prompt_tokens
